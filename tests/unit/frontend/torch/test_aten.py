"""Every kind of ATen operator through export, graph and interpreter, against torch."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from torch import nn
from torch.nn import functional as F

from roller_svc.frontend.torch.export import export_module, import_program
from roller_svc.frontend.torch.tensors import array_of
from roller_svc.graph.interpret import interpret
from roller_svc.graph.weights import Weights
from roller_svc.ir.graph import verify
from roller_svc.semantics.interpreter import reference

# Remarks of torch on its own modules while it exports them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning"),
]


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def check(module, *inputs, tolerance=2e-5):
    """Compare the graph of a module with torch: shapes, element types and values."""
    module = module.eval() if isinstance(module, nn.Module) else Function(module)
    with torch.no_grad():
        expected = module(*inputs)
    expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    weights = Weights()
    graph = verify(import_program(export_module(module, inputs), weights, reference))
    arrays = {name: array_of(x) for (name, _), x in zip(graph.inputs, inputs, strict=True)}
    results = list(interpret(graph, weights, arrays).values())
    assert len(results) == len(expected)
    for result, tensor in zip(results, expected, strict=True):
        wanted = array_of(tensor)
        assert result.dtype == wanted.dtype
        assert result.shape == wanted.shape
        if np.issubdtype(wanted.dtype, np.integer) or wanted.dtype == np.bool_:
            np.testing.assert_array_equal(result, wanted)
        else:
            loose = 2e-2 if wanted.dtype.itemsize == 2 else tolerance
            np.testing.assert_allclose(result.astype(np.float64), wanted.astype(np.float64), rtol=loose, atol=loose)
    return graph


def floats(*shape, dtype=None, low=-2.0, high=2.0):
    generator = torch.Generator().manual_seed(sum(shape) + 7)
    return (torch.rand(shape, generator=generator) * (high - low) + low).to(dtype or torch.float32)


def ints(*shape, low=-5, high=6, dtype=None):
    generator = torch.Generator().manual_seed(sum(shape) + 3)
    return torch.randint(low, high, shape, generator=generator).to(dtype or torch.int64)


def bools(*shape):
    return ints(*shape, low=0, high=2).bool()


UNARY = [
    "abs", "asinh", "atan", "ceil", "cos", "cosh", "erf", "exp", "exp2", "expm1", "floor", "isinf", "isnan",
    "logical_not", "neg", "reciprocal", "relu", "round", "sigmoid", "sign", "sin", "sinh", "square", "tan", "tanh",
    "trunc", "isfinite", "frac", "deg2rad", "sgn",
]  # fmt: skip
UNARY_POSITIVE = ["acosh", "log", "log10", "log1p", "log2", "rsqrt", "sqrt"]
UNARY_UNIT = ["acos", "asin", "atanh"]
ACTIVATIONS = [
    nn.CELU(0.7), nn.ELU(0.5), nn.GELU(), nn.GELU("tanh"), nn.Hardshrink(), nn.Hardsigmoid(), nn.Hardswish(),
    nn.Hardtanh(-0.5, 0.7), nn.LeakyReLU(0.2), nn.LogSigmoid(), nn.Mish(), nn.ReLU6(), nn.SELU(), nn.SiLU(),
    nn.Softplus(), nn.Softplus(2.0), nn.Softshrink(), nn.Softsign(), nn.Tanhshrink(), nn.Threshold(0.1, 20.0),
    nn.GLU(), nn.Softmin(1), nn.Softmax(0), nn.LogSoftmax(1), nn.Dropout(0.5), nn.Identity(),
]  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
def test_unary_functions_of_floats_equal_torch(name):
    check(getattr(torch, name), floats(3, 5))


@pytest.mark.parametrize("name", [name for name in UNARY if name not in ("frac", "isinf")])
def test_unary_functions_of_integers_equal_torch(name):
    check(getattr(torch, name), ints(3, 5, low=1))


@pytest.mark.parametrize("name", UNARY_POSITIVE + UNARY_UNIT)
def test_functions_of_part_of_the_numbers_equal_torch(name):
    low, high = (1.1, 4.0) if name in UNARY_POSITIVE else (-0.9, 0.9)
    check(getattr(torch, name), floats(3, 5, low=low, high=high))


@pytest.mark.parametrize("module", ACTIVATIONS, ids=str)
def test_activations_equal_torch(module):
    check(module, floats(4, 6))


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "maximum", "minimum", "atan2", "fmod", "remainder"])
def test_arithmetic_broadcasts_and_equals_torch(name):
    check(getattr(torch, name), floats(3, 1, 5), floats(4, 1, low=0.5))


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "maximum", "fmod", "remainder", "floor_divide", "pow"])
def test_arithmetic_of_whole_numbers_equals_torch(name):
    check(getattr(torch, name), ints(3, 5), ints(3, 5, low=1, high=4))


@pytest.mark.parametrize("name", ["bitwise_left_shift", "bitwise_right_shift"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64])
def test_shifts_by_any_number_of_bits_equal_torch(name, dtype):
    bits = torch.iinfo(dtype).bits
    by = torch.tensor([0, 1, bits - 2, bits - 1, bits, bits + 1, 100] + [-1, -100] * dtype.is_signed).to(dtype)
    check(getattr(torch, name), ints(3, 1, low=-100, high=100, dtype=dtype), by)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64])
def test_powers_of_whole_numbers_equal_torch(dtype):
    by = torch.tensor([0, 1, 2, 3, 21, 39, 63] + [-1, -2] * dtype.is_signed).to(dtype)
    check(torch.pow, torch.tensor([[-7], [-1], [0], [1], [2], [3], [10]]).to(dtype), by)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 4, 39, 0.5, -1.0, 2.0, 2.5])
def test_powers_by_a_number_equal_torch(exponent):
    check(lambda i: i**exponent, torch.tensor([1, 2, 3, 7]))
    check(lambda i: (1 + i) ** exponent, torch.tensor([1, 2, 3, 7], dtype=torch.int32))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i, b: x + i,
        lambda x, i, b: i * 0.5,
        lambda x, i, b: i / 2,
        lambda x, i, b: b + b,
        lambda x, i, b: b * i,
        lambda x, i, b: b + 1,
        lambda x, i, b: x.double() * 0.1,
        lambda x, i, b: x.half() * 0.1 + x.half(),
        lambda x, i, b: x.bfloat16() + x,
        lambda x, i, b: i.to(torch.int32) + i,
        lambda x, i, b: i.to(torch.int8) * 2,
        lambda x, i, b: (x > i, x == 0.5, i <= 2, i != 1.5, b == 1),
        lambda x, i, b: (b & (x > 0), b | (i > 0), b ^ b, ~b, ~i),
        lambda x, i, b: (i & 3, i | 8, i ^ 5, i << 2, i >> 1),
        lambda x, i, b: torch.logical_and(x, i),
        lambda x, i, b: torch.logical_xor(b, i),
        lambda x, i, b: 1 - x,
        lambda x, i, b: 3 - i,
        lambda x, i, b: torch.add(x, i, alpha=2),
        lambda x, i, b: torch.sub(x, x, alpha=0.5),
        lambda x, i, b: torch.div(x, 0.7, rounding_mode="floor"),
        lambda x, i, b: torch.div(i, 2, rounding_mode="trunc"),
        lambda x, i, b: x**2 + x**3 + x**1 + 2**x,
        lambda x, i, b: (x.abs() + 1) ** 0.5 + (x.abs() + 1) ** -0.5 + (x.abs() + 1) ** -1 + (x.abs() + 1) ** 1.7,
        lambda x, i, b: i**2,
        lambda x, i, b: i.float(),
        lambda x, i, b: (x * 3).long(),
        lambda x, i, b: x.bool(),
        lambda x, i, b: b.float(),
        lambda x, i, b: torch.where(b, x, i),
        lambda x, i, b: torch.where(b, 1.0, x),
        lambda x, i, b: x.masked_fill(b, -1.5),
        lambda x, i, b: torch.softmax(x.masked_fill(i > 4, -math.inf), -1),
        lambda x, i, b: (x.clamp(-0.5), x.clamp(max=0.5), x.clamp(-1, 1), i.clamp(0, 3), x.clamp(x * 0.1, x * 0.2)),
        lambda x, i, b: i.clamp(0.5, 2.5),
        lambda x, i, b: torch.lerp(x, x + 1, 0.3),
        lambda x, i, b: torch.addcmul(x, x, x, value=0.3),
        lambda x, i, b: torch.addcdiv(x, x, x.abs() + 1, value=0.3),
        lambda x, i, b: torch.nan_to_num(x / (i * 0)),
        lambda x, i, b: torch.hypot(x, x + 1),
        lambda x, i, b: torch.logaddexp(x, x + 1),
        lambda x, i, b: x.to(torch.float16).to(torch.bfloat16),
        lambda x, i, b: x.new_zeros(3, 5) + x.new_full((5,), 2.0) + torch.ones_like(x),
        lambda x, i, b: torch.arange(5) * i + torch.arange(1, 11, 2),
        lambda x, i, b: torch.zeros(300, 100)[:3, :5] + x,
        lambda x, i, b: torch.eye(5)[:3] + x,
        lambda x, i, b: torch.linspace(0, 1, 5) + x,
        lambda x, i, b: torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]) * x,
        lambda x, i, b: (torch.tril(x), torch.triu(x, 1), torch.tril(i, -1)),
    ],
)
def test_promotion_and_scalars_equal_torch(function):
    check(function, floats(3, 5), ints(3, 5), bools(3, 5))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.view(6, 20),
        lambda x: x.reshape(2, -1),
        lambda x: x.flatten(1),
        lambda x: x.permute(2, 0, 3, 1),
        lambda x: x.transpose(1, -1).contiguous().view(2, -1),
        lambda x: x[0, :, 0].t(),
        lambda x: x.unsqueeze(-1).squeeze(-1).unsqueeze(0).squeeze(),
        lambda x: x[:, :1].expand(2, 3, 4, 5),
        lambda x: x[1:, ::2, -3:],
        lambda x: x[:, -1, 1],
        lambda x: x.split(2, 1),
        lambda x: x.split([1, 3, 1], 3),
        lambda x: x.chunk(3, 2),
        lambda x: x.unbind(1),
        lambda x: torch.cat([x, x * 2, x[:, :1]], 1),
        lambda x: torch.cat([x.int(), x], 1),
        lambda x: torch.stack([x, x + 1], 2),
        lambda x: torch.cat([torch.zeros(0), x.flatten()]),
        lambda x: x.flip(1, 3),
        lambda x: x.roll(1, 2),
        lambda x: x.roll((1, -2), (1, 3)),
        lambda x: x.roll(7),
        lambda x: x.repeat(1, 2, 1, 3),
        lambda x: x.repeat(2, 1, 1, 1, 1),
        lambda x: x.tile(2, 2),
        lambda x: x.repeat_interleave(2, 1),
        lambda x: F.pad(x, (1, 2, 0, 1), value=0.5),
        lambda x: F.pad(x, (-1, 1)),
        lambda x: F.pad(x, (1, 2, 3, 1), mode="reflect"),
        lambda x: F.pad(x, (1, 2, 3, 1), mode="replicate"),
        lambda x: F.pad(x, (1, 2, 3, 1), mode="circular"),
        lambda x: torch.slice_scatter(x, x[:, :2] * 2, 1, 1, 3),
        lambda x: torch.select_scatter(x, x[:, 0] * 2, 1, 2),
        lambda x: F.pixel_shuffle(x.reshape(1, 12, 2, 5), 2),
        lambda x: F.pixel_unshuffle(x.reshape(1, 3, 4, 10), 2),
        lambda x: F.channel_shuffle(x.reshape(1, 6, 4, 5), 3),
        lambda x: torch.diagonal(x, 1, 2, 3),
        lambda x: torch.diagonal(x, -1, 1, 2),
        lambda x: x.movedim(1, 3),
        lambda x: x.unfold(3, 2, 2),
        lambda x: F.interpolate(x, scale_factor=2),
        lambda x: F.interpolate(x, size=(7, 3)),
        lambda x: F.interpolate(x, size=(7, 3), mode="nearest-exact"),
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda x: F.interpolate(x, size=(7, 9), mode="bilinear", align_corners=True),
        lambda x: F.interpolate(x, size=(3, 2), mode="bilinear"),
        lambda x: F.interpolate(x, size=(7, 3), mode="bicubic"),
        lambda x: F.interpolate(x, size=(7, 9), mode="bicubic", align_corners=True),
        lambda x: F.interpolate(x[:, :, 0], scale_factor=1.7, mode="linear"),
        lambda x: F.interpolate(x[None], scale_factor=2, mode="trilinear"),
    ],
)
def test_arrangements_equal_torch(function):
    check(function, floats(2, 3, 4, 5))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.sum(), x.mean(), x.amax(), x.amin(), x.max(), x.min(), x.prod()),
        lambda x: (x.sum(1), x.mean((1, 2)), x.amax(-1, True), x.prod(1, True)),
        lambda x: (x > 0).sum(1),
        lambda x: (x > 0).float().mean(),
        lambda x: x.sum(1, dtype=torch.float64),
        lambda x: x.max(1),
        lambda x: x.min(2, keepdim=True),
        lambda x: (x.argmax(), x.argmin(1), x.argmax(2, keepdim=True)),
        lambda x: ((x > 0).any(), (x > 0).all(1), x.any(2, keepdim=True)),
        lambda x: (x.var(), x.var(1, correction=0), x.std((1, 2), keepdim=True), x.std(1, unbiased=False)),
        lambda x: torch.var_mean(x, 1),
        lambda x: torch.std_mean(x, (0, 2)),
        lambda x: torch.logsumexp(x, 1),
        lambda x: torch.linalg.vector_norm(x, dim=1),
        lambda x: (x.norm(p=1, dim=1), torch.linalg.vector_norm(x, math.inf, (1, 2)), x.norm()),
        lambda x: F.normalize(x, dim=1),
        lambda x: F.cosine_similarity(x, x + 1, dim=2),
        lambda x: torch.aminmax(x, dim=1),
        lambda x: F.mse_loss(x, x * 0.5),
        lambda x: F.smooth_l1_loss(x, x * 0.5),
        lambda x: torch.histc(x, 4, -1, 1),
        lambda x: torch.histc(x, 5),
        lambda x: torch.histc(x * 0, 3),
        lambda x: torch.histc(x, 4, 2, 2),
        lambda x: torch.histc(x * 0 + 3, 4, -7, -7),
        lambda x: torch.histc(x.abs().mul(4).floor(), 4, 0, 3),
        lambda x: torch.histc(x.double(), 7, 0.25, 1.5),
    ],
)
def test_reductions_equal_torch(function):
    check(function, floats(3, 4, 5))


INTEGERS = [lambda i: (i.sum(), i.sum(1), i.amax(1), i.max(), i.argmax(1), i.prod(1), i.any(1), i.float().mean(1))]


@pytest.mark.parametrize("function", INTEGERS)
@pytest.mark.parametrize("kind", ["int32", "int64", "uint8"])
def test_reductions_of_whole_numbers_equal_torch(function, kind):
    check(function, ints(3, 4, low=0).to(getattr(torch, kind)))


LAYERS = [
    (nn.Linear(5, 7), (3, 5)),
    (nn.Linear(5, 7, bias=False), (2, 3, 5)),
    (nn.Linear(5, 7), (5,)),
    (nn.Conv2d(4, 6, 3, padding=1), (2, 4, 6, 7)),
    (nn.Conv2d(4, 6, 3, stride=2, bias=False), (1, 4, 7, 7)),
    (nn.Conv2d(4, 8, (3, 1), padding=(1, 0), groups=2, dilation=(2, 1)), (1, 4, 7, 7)),
    (nn.Conv2d(4, 4, 3, groups=4), (1, 4, 6, 6)),
    (nn.Conv2d(4, 6, 4, padding="same"), (1, 4, 6, 6)),
    (nn.Conv2d(4, 6, 3, padding="valid"), (4, 6, 6)),
    (nn.Conv1d(4, 6, 3, padding=1), (2, 4, 9)),
    (nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 5)),
    (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (1, 4, 6, 6)),
    (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1), (1, 4, 5, 5)),
    (nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), (1, 4, 5)),
    (nn.ConvTranspose3d(2, 3, 2), (1, 2, 3, 3, 3)),
    (nn.MaxPool2d(3, 2, 1), (1, 3, 8, 8)),
    (nn.MaxPool1d(2), (1, 3, 8)),
    (nn.MaxPool2d(2, ceil_mode=True), (3, 7, 7)),
    (nn.AvgPool2d(3, 1, 1, count_include_pad=False), (1, 3, 6, 6)),
    (nn.AvgPool2d(3, 2, 1), (1, 3, 7, 7)),
    (nn.AvgPool2d(3, 2, 1, ceil_mode=True), (1, 3, 8, 8)),
    (nn.AvgPool1d(2), (1, 3, 8)),
    (nn.AvgPool3d(2), (1, 2, 4, 4, 4)),
    (nn.AdaptiveAvgPool2d(1), (2, 3, 6, 5)),
    (nn.AdaptiveAvgPool2d((3, 5)), (1, 3, 6, 5)),
    (nn.AdaptiveAvgPool2d((4, 3)), (1, 3, 6, 5)),
    (nn.AdaptiveAvgPool1d(3), (1, 3, 7)),
    (nn.AdaptiveMaxPool2d((3, 5)), (1, 3, 6, 5)),
    (nn.AdaptiveAvgPool3d((2, 1, 3)), (1, 2, 3, 4, 5)),
    (nn.LayerNorm(5), (3, 5)),
    (nn.LayerNorm((4, 5)), (3, 4, 5)),
    (nn.LayerNorm(5, elementwise_affine=False), (3, 5)),
    (nn.LayerNorm(5, bias=False), (2, 3, 5)),
    (nn.RMSNorm(5), (3, 5)),
    (nn.RMSNorm(5, 1e-6), (3, 5)),
    (nn.BatchNorm2d(3), (2, 3, 4, 4)),
    (nn.BatchNorm1d(3, affine=False), (4, 3)),
    (nn.BatchNorm3d(2), (1, 2, 3, 3, 3)),
    (nn.GroupNorm(2, 4), (2, 4, 5)),
    (nn.InstanceNorm2d(3), (2, 3, 4, 4)),
    (nn.InstanceNorm2d(3, affine=True), (1, 3, 4, 4)),
    (nn.PReLU(), (2, 3, 4)),
    (nn.PReLU(3), (2, 3, 4)),
    (nn.PReLU(3), (2, 3)),
    (nn.Bilinear(3, 4, 5), ((2, 3), (2, 4))),
    (nn.LocalResponseNorm(2), (1, 4, 5, 5)),
    (nn.LSTM(5, 4), (6, 2, 5)),
    (nn.LSTM(5, 4, 2, bidirectional=True, batch_first=True), (2, 6, 5)),
    (nn.LSTM(5, 4, bias=False), (6, 5)),
    (nn.GRU(5, 4, 2), (6, 2, 5)),
    (nn.GRU(5, 4, bidirectional=True), (6, 2, 5)),
    (nn.RNN(5, 4), (6, 2, 5)),
    (nn.RNN(5, 4, nonlinearity="relu"), (6, 2, 5)),
    (nn.LSTMCell(5, 4), (2, 5)),
    (nn.GRUCell(5, 4), (2, 5)),
    (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 5, 8)),
    (nn.TransformerDecoderLayer(8, 2, 16, batch_first=True, norm_first=True), ((2, 5, 8), (2, 6, 8))),
    (nn.Unfold(2), (1, 2, 4, 5)),
    (nn.ZeroPad2d(1), (1, 2, 3, 3)),
    (nn.Fold((4, 5), 2), (1, 8, 12)),
    (nn.MaxPool2d(3, 2, 1, return_indices=True), (2, 3, 7, 6)),
    (nn.MaxPool3d(2, return_indices=True), (1, 2, 4, 4, 4)),
    (nn.UpsamplingBilinear2d(scale_factor=2), (1, 2, 3, 3)),
]


class First(nn.Module):
    """Flattens nested results, as those of recurrent layers."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return torch.utils._pytree.tree_leaves(self.module(*inputs))


@pytest.mark.parametrize(("module", "shapes"), LAYERS, ids=[str(module).split("\n")[0][:60] for module, _ in LAYERS])
def test_layers_equal_torch(module, shapes):
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.6, 0.6)
        for name, buffer in module.named_buffers():
            if "running" in name:
                buffer.uniform_(0.5, 1.5)
    shapes = shapes if isinstance(shapes[0], tuple) else (shapes,)
    check(First(module), *(floats(*shape) for shape in shapes))


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, c: a @ b,
        lambda a, b, c: a[0] @ b[0],
        lambda a, b, c: a[0] @ b[0, :, 0],
        lambda a, b, c: a[0, 0] @ b,
        lambda a, b, c: torch.dot(a[0, 0], b[0, :, 0]),
        lambda a, b, c: a[:, None] @ b,
        lambda a, b, c: torch.bmm(a, b) + torch.baddbmm(c, a, b, beta=0.5, alpha=2),
        lambda a, b, c: torch.addmm(c[0], a[0], b[0], beta=0.5, alpha=2),
        lambda a, b, c: torch.mv(a[0], b[0, :, 0]),
        lambda a, b, c: torch.outer(a[0, 0], b[0, 0]),
        lambda a, b, c: torch.einsum("bik,bkj->bij", a, b),
        lambda a, b, c: torch.einsum("bik, bkj", a, b),
        lambda a, b, c: torch.einsum("...ik,...kj->...ji", a, b),
        lambda a, b, c: torch.einsum("bii->b", c[:, :3, :3]),
        lambda a, b, c: torch.tensordot(a, b, ([2], [1])),
        lambda a, b, c: F.linear(a, b[0].t(), c[0, 0]),
        lambda a, b, c: torch.kron(a[0], b[0]),
        lambda a, b, c: torch.cdist(a, b.transpose(1, 2)),
        lambda a, b, c: a.half() @ b.half(),
        lambda a, b, c: (a * 3).long() @ (b * 3).long(),
    ],
)
def test_products_equal_torch(function):
    check(function, floats(2, 3, 4), floats(2, 4, 5), floats(2, 3, 5))


@pytest.mark.parametrize("ends", [[3, 3, 8], [0, 5, 8], [8, 8, 8]])
def test_grouped_products_equal_torch(ends):
    x, weight = floats(8, 16, dtype=torch.bfloat16), floats(3, 16, 8, dtype=torch.bfloat16)
    check(lambda a, b, c: torch._grouped_mm(a, b, offs=c), x, weight, torch.tensor(ends, dtype=torch.int32))


def test_a_grouped_product_of_a_library_is_one():
    fallback = torch.library.custom_op("transformers::grouped_mm_fallback", split_product, mutates_args=())
    fallback.register_fake(lambda input, weight, offs: input.new_empty(input.shape[0], weight.shape[2]))
    check(lambda a, b, c: fallback(a, b, c), floats(8, 4), floats(3, 4, 5), torch.tensor([3, 3, 7], dtype=torch.int32))


def split_product(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of each group by its matrix, as transformers does without a kernel for it."""
    output, start = input.new_zeros(input.shape[0], weight.shape[2]), 0
    for matrix, end in zip(weight, offs.tolist(), strict=True):
        output[start:end] = input[start:end] @ matrix
        start = end
    return output


@pytest.mark.parametrize(
    ("mode", "padding"),
    [
        (mode, padding)
        for mode in ("bilinear", "nearest", "bicubic")
        for padding in ("zeros", "border", "reflection")
        if (mode, padding) != ("bicubic", "border")
    ],
)
def test_samples_of_a_grid_equal_torch(mode, padding):
    def function(x, grid):
        return F.grid_sample(x, grid, mode, padding, align_corners=padding == "border")

    check(function, floats(1, 2, 4, 5), floats(1, 3, 3, 2, low=-1.3, high=1.3))


def test_norms_by_the_statistics_of_a_batch_equal_torch():
    def function(x, weight):
        norm = torch.ops.aten._native_batch_norm_legit.no_stats
        return norm(x, weight, None, True, 0.1, 1e-5)[0] + norm(x, None, None, True, 0.1, 1e-5)[0]

    check(function, floats(2, 3, 4), floats(3))


def test_memory_that_is_not_written_is_zero():
    check(lambda x: x + torch.empty_strided((2, 3), (1, 2)) * 0, floats(2, 3))


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v),
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, scale=0.3),
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v, m: F.scaled_dot_product_attention(q[:, :, :4], k, v, is_causal=True),
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m > 0.3),
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m.masked_fill(m < 0.3, -math.inf)),
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], attn_mask=m > 0.3, enable_gqa=True),
        lambda q, k, v, m: F.scaled_dot_product_attention(q[0], k[0], v[0], is_causal=True),
    ],
)
def test_attention_equals_torch(function):
    mask = floats(5, 6)
    mask[1] = -1.0  # a row without a key
    check(function, floats(2, 4, 5, 8), floats(2, 4, 6, 8), floats(2, 4, 6, 7), mask)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i, j: F.embedding(i, x[:, :, 0].contiguous()),
        lambda x, i, j: x[i],
        lambda x, i, j: x[:, j],
        lambda x, i, j: x[i, j],
        lambda x, i, j: x[i - 4, :, j],
        lambda x, i, j: x[:, j, j],
        lambda x, i, j: x[i.reshape(2, 2), j[:2]],
        lambda x, i, j: x[torch.tensor([0, -1, 2])],
        lambda x, i, j: x.index_select(1, j),
        lambda x, i, j: torch.gather(x, 2, j[:, None, None].expand(4, 3, 2)),
        lambda x, i, j: torch.take_along_dim(x, x.argmax(1, keepdim=True), 1),
        lambda x, i, j: F.one_hot(i, 5),
        lambda x, i, j: x.index_put((i,), x * 2),
        lambda x, i, j: x.index_put((i[:2], j[:2]), x[0, 0], accumulate=True),
        lambda x, i, j: torch.ops.aten.index_put(x, [None, j[:2]], x[:, :2] * 2),
        lambda x, i, j: torch.ops.aten.index_put(x, [i - 4, None, j], x[:, :, 0]),
        lambda x, i, j: x.index_add(1, j, x[:, [0, 1, 2, 0]]),
        lambda x, i, j: x.index_copy(0, i, x * 2),
        lambda x, i, j: x.index_fill(1, j[:2], 0.5),
        lambda x, i, j: x.clone().masked_fill_(x > 0, 0.5),
        lambda x, i, j: torch.ops.aten.index_put(x, [x > 0], torch.tensor(0.5)),
        lambda x, i, j: torch.ops.aten.index_put(x, [x[:, :, 0] > 0], torch.tensor([0.5]), True),
        lambda x, i, j: x.scatter(2, j[:, None, None].expand(4, 2, 1), x * 2),
        lambda x, i, j: x.scatter(2, j[:, None, None].expand(4, 3, 1), 0.5),
        lambda x, i, j: x.scatter_add(2, j[:, None, None].expand(4, 3, 2), x * 2),
        lambda x, i, j: x.scatter_reduce(2, j[:, None, None].expand(4, 3, 2), x * 2, "amax"),
        lambda x, i, j: x.scatter_reduce(2, j[:, None, None].expand(4, 3, 2), x * 2, "prod"),
        lambda x, i, j: (x.cumsum(1), i.cumsum(0), (x > 0).cumsum(2), x.cumprod(2)),
        lambda x, i, j: x.topk(2, 2),
        lambda x, i, j: x.topk(2, 1, largest=False),
        lambda x, i, j: x.sort(2),
        lambda x, i, j: (j.sort(0, descending=True)[0], x.argsort(2)),
        lambda x, i, j: F.cross_entropy(x[:, :, 0], j),
        lambda x, i, j: F.nll_loss(F.log_softmax(x[:, :, 0], 1), j),
    ],
)
def test_indices_from_data_equal_torch(function):
    check(function, floats(4, 3, 5), torch.tensor([3, 0, 1, 2]), torch.tensor([2, 0, 1, 1]))
