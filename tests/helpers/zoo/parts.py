"""Shared parts of the models of the zoo, and the tables of models."""

import torch
from torch import nn

PURE, IMPURE = {}, {}


def pure(make):
    PURE[make.__name__] = make
    return make


def impure(make):
    IMPURE[make.__name__] = make
    return make


class Model(nn.Module):
    """A model with a forward function: (model, features (m, 16)) -> logits."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.run = forward
        self.first, self.fc = nn.Linear(16, 6), nn.Linear(6, 3)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.run(self, x.flatten(1))


def plain(model, x):
    return model.fc(torch.relu(model.first(x)))


def mlp(*middle):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), *middle, nn.Linear(6, 3))


def convolutions(*middle):
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), *middle, nn.Flatten(), nn.Linear(64, 3))


class Tokens(nn.Module):
    """A layer on sequences (m, 4 tokens, 4 features), and a head on the last token."""

    def __init__(self, layer, width=4):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 3)

    def forward(self, x):
        h = self.layer(x.flatten(1, 2))
        return self.head((h[0] if isinstance(h, tuple) else h)[:, -1])


class CausalAttention(nn.Module):
    """Self-attention with a mask of -inf above the diagonal."""

    def __init__(self, persistent=True):
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1), persistent=persistent)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.softmax(q @ k.transpose(1, 2) / 2 + self.mask, -1) @ v


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]
