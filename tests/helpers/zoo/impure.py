"""Models with random draws, Python state or gradient hooks, which only the reference trains correctly."""

import random
from collections import deque

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from helpers.zoo.parts import Model, Tokens, impure, mlp, plain


@impure
def dropout():
    return mlp(nn.ReLU(), nn.Dropout(0.2))


@impure
def functional_dropout():
    return Model(lambda m, x: m.fc(F.dropout(m.first(x), 0.1, m.training)))


@impure
def recurrent_dropout():
    return Tokens(nn.LSTM(4, 4, 2, batch_first=True, dropout=0.1))


@impure
def layer_drop():
    def forward(m, x):
        h = m.first(x)
        if not (m.training and torch.rand(1).item() < 0.05):
            h = h + m.skipped(h)
        return m.fc(h)

    return Model(forward, skipped=nn.Linear(6, 6))


@impure
def draws_from_python():
    return Model(lambda m, x: plain(m, x) * (1 if random.random() < 0.95 else 0.5))


@impure
def draws_from_numpy():
    return Model(lambda m, x: plain(m, x) * (1 if np.random.random() < 0.95 else 0.5))


@impure
def gaussian_input_noise():
    return Model(lambda m, x: plain(m, x + 1e-4 * torch.randn_like(x)))


@impure
def private_torch_generator():
    return Model(
        lambda m, x: plain(m, x) * (1 if torch.rand(1, generator=m.source) < 0.95 else 0.5), source=torch.Generator()
    )


@impure
def private_numpy_generator():
    return Model(lambda m, x: plain(m, x) * (1 if m.source.random() < 0.95 else 0.5), source=np.random.default_rng(0))


@impure
def private_python_generator():
    return Model(lambda m, x: plain(m, x) * (1 if m.source.random() < 0.95 else 0.5), source=random.Random(0))


@impure
def entropy_of_the_system():
    return Model(lambda m, x: plain(m, x) + np.random.default_rng().random())


@impure
def draw_in_a_hook():
    model = mlp(nn.ReLU())
    model[1].register_forward_hook(lambda layer, inputs, output: output * (1 if random.random() < 0.95 else 0.5))
    return model


@impure
def draw_on_small_batches():
    return Model(lambda m, x: plain(m, x) * (1 if len(x) > 3 or torch.rand(1).item() < 0.95 else 0.5))


# State in Python


@impure
def warm_up_counter():
    def forward(m, x):
        m.calls += 1
        return plain(m, x) * min(1.0, 0.1 * m.calls)

    return Model(forward, calls=0)


@impure
def late_switch():
    def forward(m, x):
        m.calls += 1
        return plain(m, x) * (0.5 if m.calls > 10 else 1.0)

    return Model(forward, calls=0)


@impure
def counter_in_a_dict():
    def forward(m, x):
        m.log["calls"] = m.log.get("calls", 0) + 1
        return plain(m, x) * (0.5 if m.log["calls"] > 10 else 1.0)

    return Model(forward, log={})


@impure
def counter_in_a_submodule():
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * (0.5 if self.calls > 10 else 1.0)

    return nn.Sequential(nn.Flatten(), Counting(16, 3))


@impure
def counter_in_the_class():
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x):
            type(self).calls += 1
            return super().forward(x) * (0.5 if self.calls > 10 else 1.0)

    return nn.Sequential(nn.Flatten(), Counting(16, 3))


@impure
def counter_in_a_closure():
    class Counting(nn.Linear):
        def forward(self, x):
            nonlocal calls
            calls += 1
            return super().forward(x) * (0.5 if calls > 10 else 1.0)

    calls = 0
    return nn.Sequential(nn.Flatten(), Counting(16, 3))


@impure
def queue_of_activations():
    def forward(m, x):
        m.last.append(x.mean().item())
        return plain(m, x) + sum(m.last) / len(m.last)

    return Model(forward, last=deque(maxlen=3))


@impure
def kept_activation():
    def forward(m, x):
        m.features = torch.relu(m.first(x))
        return m.fc(m.features)

    return Model(forward)


@impure
def recording_hook():
    model, seen = mlp(nn.ReLU()), []
    model[1].register_forward_hook(lambda layer, inputs, output: seen.append(output.mean().item()))
    return model


@impure
def gradients_switched_in_forward():
    def forward(m, x):
        m.first.weight.requires_grad_(not m.first.weight.requires_grad)
        return plain(m, x)

    return Model(forward)


@impure
def mode_switched_in_forward():
    def forward(m, x):
        m.fc.train(not m.fc.training)
        return plain(m, x)

    return Model(forward)


# Hooks on gradients


@impure
def parameter_hook():
    model = mlp(nn.ReLU())
    model[1].weight.register_hook(lambda grad: 0.97 * grad)
    return model


@impure
def accumulation_hook():
    model = mlp(nn.ReLU())
    model[1].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", 0.97 * p.grad))
    return model


@impure
def backward_hook():
    model = mlp(nn.ReLU())
    model[1].register_full_backward_hook(lambda layer, grad_input, grad_output: None)
    return model


@impure
def backward_pre_hook():
    model = mlp(nn.ReLU())
    model[1].register_full_backward_pre_hook(lambda layer, grad_output: (0.97 * grad_output[0],))
    return model
