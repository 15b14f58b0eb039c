"""Simulated torch and Triton: tensors have shapes only, and operations advance the device's clock."""

from __future__ import annotations

import importlib.machinery
import math
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_BITS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int64": 8,
         "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "uint32": 4, "uint64": 8, "uint16": 2}  # fmt: skip
_DEVICE: Any = None  # of this process


class Dtype:
    def __init__(self, name: str) -> None:
        self.name, self.itemsize = name, _BITS[name]


DTYPES = {name: Dtype(name) for name in _BITS}


class Tensor:
    """A tensor without data. `layout` is a numpy view of one zero, which computes shapes and strides."""

    def __init__(self, shape: tuple[int, ...], dtype: Dtype, layout: Any = None) -> None:
        self.layout = np.broadcast_to(np.zeros((), np.int8), shape) if layout is None else layout
        self.dtype, self.shape, self.ndim = dtype, tuple(self.layout.shape), self.layout.ndim
        self.device = "cuda:0"
        self.last = False  # whether it is channels-last in memory

    @property
    def nbytes(self) -> int:
        return self.layout.size * self.dtype.itemsize

    def like(self, layout: Any) -> Tensor:
        return Tensor((), self.dtype, layout)

    def numel(self) -> int:
        return int(self.layout.size)

    def view(self, *how: Any) -> Tensor:
        if isinstance(how[0], Dtype):
            shape = (*self.shape[:-1], self.shape[-1] * self.dtype.itemsize // how[0].itemsize)
            return Tensor(shape, how[0])
        return self.reshape(*how)

    def reshape(self, *shape: Any) -> Tensor:
        wanted = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        known = math.prod(n for n in wanted if n >= 0)
        return Tensor(tuple(n if n >= 0 else self.layout.size // known for n in wanted), self.dtype)

    def permute(self, *order: Any) -> Tensor:
        axes = tuple(order[0]) if len(order) == 1 and not isinstance(order[0], int) else order
        result = self.like(self.layout.transpose(axes))
        result.last = axes == (0, self.ndim - 1, *range(1, self.ndim - 1))
        return result

    def t(self) -> Tensor:
        return self.permute(1, 0)

    def stride(self, dim: int | None = None) -> Any:
        found = [math.prod(self.shape[at + 1 :]) for at in range(self.ndim)]
        return tuple(found) if dim is None else found[dim]

    def is_contiguous(self, memory_format: object = None) -> bool:
        return self.last

    def contiguous(self, memory_format: object = None) -> Tensor:
        return _result(self, self)

    def repeat_interleave(self, times: int, dim: int) -> Tensor:
        shape = list(self.shape)
        shape[dim] *= times
        return _result(Tensor(tuple(shape), self.dtype), self)

    def to(self, dtype: Dtype) -> Tensor:
        return _result(Tensor(self.shape, dtype), self)

    def expand(self, *shape: Any) -> Tensor:
        return self.like(np.broadcast_to(self.layout, shape[0] if not isinstance(shape[0], int) else shape))

    def flatten(self, start: int) -> Tensor:
        return self.reshape(*self.shape[:start], -1)

    def select(self, dim: int, index: int) -> Tensor:
        return self.like(self.layout[(slice(None),) * dim + (index,)])

    def sum(self, dims: Any, dtype: Dtype | None = None) -> Tensor:
        remaining = tuple(n for at, n in enumerate(self.shape) if at not in dims)
        return _result(Tensor(remaining, dtype or self.dtype), self)

    def amax(self, dims: Any) -> Tensor:
        return self.sum(dims)

    amin = amax

    def prod(self, dim: int) -> Tensor:
        return self.sum((dim % self.ndim,))

    def __getitem__(self, key: Any) -> Tensor:
        keys = key if isinstance(key, tuple) else (key,)
        places = [one.shape for one in keys if isinstance(one, Tensor)]
        if places:
            return _result(Tensor(np.broadcast_shapes(*places), self.dtype), self)
        return self.like(self.layout[key])

    def _with(self, *others: Any) -> Tensor:
        return elementwise(self, *others)

    bool = long = abs = _with
    clamp = __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __truediv__ = __neg__ = _with


def elementwise(*operands: Any, **_: Any) -> Tensor:
    """Any elementwise function."""
    tensors = [one for one in operands if isinstance(one, Tensor)]
    shape = np.broadcast_shapes(*(one.shape for one in tensors))
    return _result(Tensor(shape, tensors[0].dtype), *tensors)


def _result(result: Tensor, *operands: Tensor, flops: float = 0.0) -> Tensor:
    _advance(sum(one.nbytes for one in (result, *operands)), flops, result.dtype.name)
    return result


def _advance(nbytes: float, flops: float, dtype: str) -> None:
    """Advance the clock, or record this in the current graph."""
    if Graph.recording is not None:
        Graph.recording.append((nbytes, flops, dtype))
    else:
        _DEVICE.check()
        _DEVICE.work(nbytes, flops, dtype)


class Graph:
    recording: list[tuple[float, float, str]] | None = None

    def __init__(self) -> None:
        self.steps: list[tuple[float, float, str]] = []

    def replay(self) -> None:
        for step in self.steps:
            _DEVICE.work(*step)


@contextmanager
def recorded(graph: Graph) -> Iterator[None]:
    Graph.recording = graph.steps
    try:
        yield
    finally:
        Graph.recording = None


class Event:
    def __init__(self, enable_timing: bool = False) -> None:  # noqa: FBT001, FBT002 - as torch has it
        self.at_s = 0.0

    def record(self) -> None:
        self.at_s = _DEVICE.now_s

    def synchronize(self) -> None:
        _DEVICE.wait()

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at_s - self.at_s)


def einsum(equation: str, *operands: Tensor) -> Tensor:
    left, _, right = equation.partition("->")
    terms = zip(left.split(","), operands, strict=True)
    sizes = {letter: n for term, one in terms for letter, n in zip(term, one.shape, strict=True)}
    result = Tensor(tuple(sizes[letter] for letter in right), operands[0].dtype)
    return _result(result, *operands, flops=2.0 * math.prod(sizes.values()))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    result = Tensor((*a.shape[:-1], b.shape[-1]), a.dtype)
    return _result(result, a, b, flops=2.0 * result.numel() * a.shape[-1])


def attention(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    result = Tensor((*q.shape[:-1], v.shape[-1]), q.dtype)
    return _result(result, q, k, v, flops=4.0 * result.numel() * k.shape[-2])


def convolution(
    data: Tensor, weight: Tensor, bias: object = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Tensor:
    taps = weight.shape[2:]
    result = Tensor((data.shape[0], weight.shape[0], *_window_extents(data.shape[2:], taps, stride, padding, dilation)), data.dtype)
    return _result(result, data, weight, flops=2.0 * result.numel() * math.prod(weight.shape[1:]))


def pooling(data: Tensor, kernel: Any, stride: Any, padding: Any) -> Tensor:
    result = Tensor((*data.shape[:-2], *_window_extents(data.shape[-2:], kernel, stride, padding, 1)), data.dtype)
    return _result(result, data)


def _window_extents(sizes: Any, taps: Any, *how: Any) -> list[int]:
    strides, pads, gaps = ([one] * len(sizes) if isinstance(one, int) else list(one) for one in how)
    every = zip(sizes, taps, strides, pads, gaps, strict=True)
    return [(n + 2 * p - d * (t - 1) - 1) // s + 1 for n, t, s, p, d in every]


def first_like(x: Tensor, *others: Any, **_: Any) -> Tensor:
    """Return a function whose result has the shape of its first argument: norms, softmax."""
    return _result(Tensor(x.shape, x.dtype), x, *(one for one in others if isinstance(one, Tensor)))


class _Torch(types.ModuleType):
    """Functions that are not defined below are elementwise."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return DTYPES.get(name, elementwise)


def torch_modules() -> dict[str, types.ModuleType]:
    """Return modules with the parts of torch that are used."""
    nothing = types.SimpleNamespace
    stream = nothing(wait_stream=lambda _: None, cuda_stream=0)
    chosen = ["cublas"]

    def preferred(library: str | None = None) -> str:
        chosen[0] = library or chosen[0]
        return chosen[0]

    @contextmanager
    def within(*_: Any) -> Iterator[None]:
        yield

    functional = _module(
        "torch.nn.functional",
        {
            "scaled_dot_product_attention": attention,
            "conv1d": convolution,
            "conv2d": convolution,
            "conv3d": convolution,
            "max_pool2d": pooling,
            "avg_pool2d": pooling,
            "layer_norm": first_like,
            "rms_norm": first_like,
            "embedding": lambda at, table: _result(Tensor((*at.shape, table.shape[-1]), table.dtype), at),
        },
    )
    bias = _module("torch.nn.attention.bias", {"causal_lower_right": lambda *_: None})
    backends = nothing(FLASH_ATTENTION=0, CUDNN_ATTENTION=1, EFFICIENT_ATTENTION=2, MATH=3)
    attending = _module("torch.nn.attention", {"SDPBackend": backends, "sdpa_kernel": within, "bias": bias})
    neural = _module("torch.nn", {"functional": functional, "attention": attending})
    traced = _module("torch.fx.experimental.proxy_tensor", {"make_fx": lambda function, **_: lambda *_: function})
    torch = _Torch("torch")
    torch.__spec__ = importlib.machinery.ModuleSpec("torch", None)
    names: dict[str, Any] = {
        "__version__": "rehearsed", "Tensor": Tensor, "dtype": Dtype, "matmul": matmul, "einsum": einsum,
        "softmax": first_like, "relu": first_like, "nn": neural, "channels_last": "last", "channels_last_3d": "last",
        "from_dlpack": lambda raw: Tensor(raw.shape, DTYPES["uint8"]), "set_grad_enabled": lambda _: None,
        "where": lambda cond, then, other: elementwise(then, other, cond),
        "full": lambda shape, _value, dtype, device: Tensor(tuple(shape), dtype),
        "arange": lambda n, device: Tensor((n,), DTYPES["int64"]), "promote_types": lambda one, _: one,
        "empty": lambda shape, device, dtype: Tensor(tuple(shape), dtype),
        "empty_like": lambda x: Tensor(x.shape, x.dtype),
        "compile": lambda function, **_: function, "compiler": nothing(reset=lambda: None),
        "_C": nothing(_nn=_Torch("torch._C._nn")), "special": _Torch("torch.special"),
        "backends": nothing(cuda=nothing(matmul=nothing(allow_tf32=True), preferred_blas_library=preferred),
                            cudnn=nothing(allow_tf32=True, benchmark=False)),
        "cuda": nothing(Stream=lambda: stream, current_stream=lambda *_: stream, stream=within, Event=Event,
                        synchronize=lambda: _DEVICE.wait(), CUDAGraph=Graph, graph=recorded,
                        empty_cache=lambda: None, is_available=lambda: False),
    }  # fmt: skip
    for name, value in names.items():
        setattr(torch, name, value)
    return {
        "torch": torch,
        "torch.nn": neural,
        "torch.nn.functional": functional,
        "torch.nn.attention": attending,
        "torch.nn.attention.bias": bias,
        "torch.fx": _module("torch.fx", {}),
        "torch.fx.experimental": _module("torch.fx.experimental", {}),
        "torch.fx.experimental.proxy_tensor": traced,
    }


class Config:
    def __init__(self, kwargs: dict[str, int], **_: int) -> None:
        self.kwargs = kwargs


class Kernel:
    """A Triton kernel: a launch evaluates the grid for the first tile and reads all its tensors."""

    def __init__(self, function: Callable[..., Any], tile: dict[str, int]) -> None:
        self.__name__, self._tile = function.__name__, tile

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*operands: Any, **_: Any) -> None:
            blocks = grid(self._tile) if callable(grid) else grid
            assert all(n > 0 for n in blocks)
            _advance(sum(one.nbytes for one in operands if isinstance(one, Tensor)), 0.0, "float32")

        return launch


def triton_modules() -> dict[str, types.ModuleType]:
    class TritonError(Exception):
        pass

    language = _module("triton.language", {"constexpr": int})
    errors = _module("triton.errors", {"TritonError": TritonError})
    triton = _module(
        "triton",
        {
            "__version__": "rehearsed",
            "language": language,
            "errors": errors,
            "Config": Config,
            "jit": lambda function: Kernel(function, {}),
            "cdiv": lambda a, b: -(-a // b),
            "next_power_of_2": lambda n: 1 << (n - 1).bit_length(),
            "autotune": lambda configs, key: lambda kernel: Kernel(kernel, configs[0].kwargs),
        },
    )
    return {"triton": triton, "triton.language": language, "triton.errors": errors}


def install_libraries(device: Any) -> None:
    global _DEVICE
    _DEVICE = device
    sys.modules |= torch_modules() | triton_modules()


def _module(name: str, names: dict[str, Any]) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    for one, value in names.items():
        setattr(module, one, value)
    return module
