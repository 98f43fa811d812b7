"""Models that are functions of parameters, buffers and inputs, which a fast engine may train."""

import torch
from torch import nn
from torch.nn.utils import parametrizations

from helpers.zoo.parts import CausalAttention, Model, SelfAttention, Tokens, convolutions, mlp, plain, pure


@pure
def logistic():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


@pure
def relu():
    return mlp(nn.ReLU())


@pure
def relu_in_place():
    return mlp(nn.ReLU(inplace=True))


@pure
def gelu_tanh():
    return mlp(nn.GELU(), nn.Tanh())


@pure
def without_bias():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3, bias=False))


@pure
def softplus():
    return mlp(nn.Softplus())


@pure
def parametric_relu():
    return mlp(nn.PReLU())


@pure
def batch_norm_1d():
    return mlp(nn.BatchNorm1d(6), nn.ReLU())


@pure
def batch_norm_2d():
    return convolutions(nn.BatchNorm2d(4), nn.ReLU())


@pure
def batch_norm_without_weights():
    return convolutions(nn.BatchNorm2d(4, affine=False), nn.ReLU())


@pure
def batch_norm_without_statistics():
    return convolutions(nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU())


@pure
def batch_norm_cumulative():
    return convolutions(nn.BatchNorm2d(4, momentum=None), nn.ReLU())


@pure
def group_norm():
    return convolutions(nn.GroupNorm(2, 4), nn.ReLU())


@pure
def layer_norm():
    return mlp(nn.LayerNorm(6), nn.ReLU())


@pure
def instance_norm():
    return convolutions(nn.InstanceNorm2d(4, affine=True), nn.ReLU())


@pure
def instance_norm_with_statistics():
    return convolutions(nn.InstanceNorm2d(4, track_running_stats=True), nn.ReLU())


@pure
def rms_norm():
    return mlp(nn.RMSNorm(6), nn.ReLU())


@pure
def pooling():
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4, 3))


@pure
def grouped_convolution():
    return convolutions(nn.Conv2d(4, 4, 3, padding=1, groups=2))


@pure
def circular_padding():
    return convolutions(nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"))


@pure
def transposed_convolution():
    return convolutions(nn.ConvTranspose2d(4, 4, 3, padding=1))


@pure
def convolution_1d():
    return nn.Sequential(nn.Flatten(2), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(28, 3))


@pure
def lstm():
    return Tokens(nn.LSTM(4, 4, batch_first=True))


@pure
def gru():
    return Tokens(nn.GRU(4, 4, batch_first=True))


@pure
def elman():
    return Tokens(nn.RNN(4, 4, batch_first=True))


@pure
def attention():
    return Tokens(SelfAttention())


@pure
def transformer():
    return Tokens(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True))


@pure
def causal_attention():
    return Tokens(CausalAttention())


@pure
def causal_attention_with_hidden_mask():
    return Tokens(CausalAttention(persistent=False))


@pure
def embedding():
    return Model(lambda m, x: m.fc(m.table((x > 0).long()).mean(1)), table=nn.Embedding(2, 6))


@pure
def embedding_with_padding():
    return Model(lambda m, x: m.fc(m.table((x > 0).long()).mean(1)), table=nn.Embedding(2, 6, padding_idx=0))


# Weights


@pure
def tied_weights():
    model = Model(lambda m, x: m.fc(m.third(torch.tanh(m.second(m.first(x))))), second=nn.Linear(6, 6))
    model.third = nn.Linear(6, 6)
    model.third.weight = model.second.weight
    return model


@pure
def used_twice():
    return Model(lambda m, x: m.fc(m.again(torch.tanh(m.again(m.first(x))))), again=nn.Linear(6, 6))


@pure
def unused_layer():
    return Model(plain, idle=nn.Linear(2, 2))


@pure
def frozen_layer():
    model = Model(plain)
    model.first.requires_grad_(False)
    return model


@pure
def frozen_bias():
    model = mlp(nn.ReLU())
    model[1].bias.requires_grad_(False)
    return model


@pure
def frozen_batch_norm():
    class Frozen(nn.BatchNorm2d):
        def train(self, mode=True):
            return super().train(False)

    return convolutions(Frozen(4), nn.ReLU())


@pure
def free_parameter():
    model = Model(lambda m, x: plain(m, x) * m.scale)
    model.scale = nn.Parameter(torch.tensor(2.0))
    return model


@pure
def weight_norm():
    return nn.Sequential(nn.Flatten(), parametrizations.weight_norm(nn.Linear(16, 3)))


@pure
def spectral_norm():
    return nn.Sequential(nn.Flatten(), parametrizations.spectral_norm(nn.Linear(16, 3)))


@pure
def orthogonal():
    return nn.Sequential(nn.Flatten(), parametrizations.orthogonal(nn.Linear(16, 3)))


# Buffers


def with_buffer(forward, value, persistent=True):
    model = Model(forward)
    model.register_buffer("buffer", value, persistent=persistent)
    return model


@pure
def constant_buffer():
    return with_buffer(lambda m, x: plain(m, x + m.buffer), torch.linspace(0, 1, 16))


@pure
def integer_buffer():
    return with_buffer(lambda m, x: plain(m, x[:, m.buffer]), torch.arange(15, -1, -1))


@pure
def boolean_buffer():
    return with_buffer(lambda m, x: plain(m, x.masked_fill(m.buffer, 0)), torch.arange(16) > 8)


@pure
def counting_buffer():
    def forward(m, x):
        m.buffer += 1
        return plain(m, x) / (1 + m.buffer)

    return with_buffer(forward, torch.tensor(0))


@pure
def branch_on_counting_buffer():
    def forward(m, x):
        m.buffer += 1
        return plain(m, x) * (0.5 if m.buffer > 4 else 1.0)

    return with_buffer(forward, torch.tensor(0))


@pure
def moving_average_buffer():
    def forward(m, x):
        with torch.no_grad():
            m.buffer.lerp_(x.mean(0), 0.1)
        return plain(m, x - m.buffer)

    return with_buffer(forward, torch.zeros(16))


# Forward passes


@pure
def blocked_gradient():
    def forward(m, x):
        with torch.no_grad():
            h = torch.relu(m.first(x))
        return m.fc(h)

    return Model(forward)


@pure
def detached():
    return Model(lambda m, x: m.fc(m.first(x).detach() + m.first(x)))


@pure
def other_in_training():
    return Model(lambda m, x: plain(m, x) * (2 if m.training else 1))


@pure
def mixed_samples():
    return Model(lambda m, x: plain(m, x - x.mean(0)))


@pure
def other_on_small_batches():
    return Model(lambda m, x: plain(m, x) * (1.0 if len(x) > 3 else 0.5))


@pure
def branch_on_data():
    return Model(lambda m, x: plain(m, x) if x.sum() > 0 else plain(m, -x))


@pure
def branch_on_weights():
    return Model(lambda m, x: plain(m, x) if m.first.weight.sum() > 0 else plain(m, -x))


@pure
def loop_on_data():
    def forward(m, x):
        while x.abs().max() > 1:
            x = x / 2
        return plain(m, x)

    return Model(forward)


@pure
def cumulative_sum():
    return Model(lambda m, x: plain(m, x.cumsum(1).sort(1).values))


@pure
def bilinear():
    return Model(lambda m, x: m.bilinear(m.first(x), x[:, :6]), bilinear=nn.Bilinear(6, 6, 3))


@pure
def forward_hook():
    model = mlp(nn.ReLU())
    model[1].register_forward_hook(lambda layer, inputs, output: 1.03 * output)
    return model


@pure
def hook_on_large_values():
    model = mlp(nn.ReLU())
    model[1].register_forward_hook(lambda layer, inputs, output: output.clamp(max=100))
    return model


@pure
def forward_pre_hook():
    model = mlp(nn.ReLU())
    model[1].register_forward_pre_hook(lambda layer, inputs: (1.03 * inputs[0],))
    return model


@pure
def hook_on_the_whole():
    model = mlp(nn.ReLU())
    model.register_forward_hook(lambda layer, inputs, output: output + 0.001 * output.square())
    return model
