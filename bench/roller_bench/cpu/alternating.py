"""Time CPU kernels that alternate with a library's matrix products, and each of them alone.

    python -m roller_bench.cpu.alternating --library numpy|torch [--seconds 0.15] [--blocks 4]

Libraries have threads of their own, which may occupy the cores that a kernel needs, and the other way round. Prints
JSON lines: the median seconds of kernel and product alone and alternating. The machine should be idle otherwise.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from roller_svc.api import compile as compile_kernel

Call = Callable[[], object]

_SOFTMAX = "m[i] >=! x[i, j]; e[i, j] = (x[i, j] - m[i]).call(`exp`); s[i] +=! e[i, j]; y[i, j] = e[i, j] / s[i]"
_MATMUL = "y[i, j] +=! a[i, k] * b[k, j]"
KERNELS = {
    "matmul-512": (_MATMUL, {"a": (512, 512), "b": (512, 512)}),
    "matmul-192": (_MATMUL, {"a": (192, 192), "b": (192, 192)}),
    "softmax-512x1024": (_SOFTMAX, {"x": (512, 1024)}),
}
PRODUCTS = (512, 192)
_PAUSE_S = 0.1  # between blocks: threads of all libraries go to sleep
_WARM_UP = 3


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a JSON line for each kernel and product."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--library", choices=("numpy", "torch"), default="numpy")
    parser.add_argument("--seconds", type=float, default=0.15, help="length of a block (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=4, help="blocks of each kind (default: %(default)s)")
    options = parser.parse_args(arguments)
    products = {size: product(options.library, size) for size in PRODUCTS}
    for name, (expression, shapes) in KERNELS.items():
        kernel = bound_kernel(expression, shapes)
        for size, multiply in products.items():
            blocks = [(kernel,), (multiply,), (kernel, multiply)]
            times = [time_block(calls, options.seconds) for _ in range(options.blocks) for calls in blocks]
            alone, product_alone, alternating = (times[kind::3] for kind in range(3))
            row = {"kernel": name, "library": options.library, "product": size}
            row |= {"kernel_alone_s": _median(alone, 0), "kernel_alternating_s": _median(alternating, 0)}
            row |= {"product_alone_s": _median(product_alone, 0), "product_alternating_s": _median(alternating, 1)}
            print(json.dumps(row), flush=True)


def bound_kernel(expression: str, shapes: Mapping[str, tuple[int, ...]]) -> Call:
    """Compile a kernel on random float32 inputs."""
    rng = np.random.default_rng(0)
    inputs = {name: ("float32", shape) for name, shape in shapes.items()}
    kernel = compile_kernel(expression, inputs, select="model", top_k=1)
    return kernel.runner().bind({name: rng.random(shape, np.float32) for name, shape in shapes.items()})


def product(library: str, size: int) -> Call:
    """Return a product of two square matrices by a library."""
    rng = np.random.default_rng(0)
    a, b = (rng.random((size, size), np.float32) for _ in range(2))
    if library == "numpy":
        out = np.empty_like(a)
        return lambda: np.matmul(a, b, out=out)
    torch: Any = importlib.import_module("torch")
    left, right, result = torch.from_numpy(a), torch.from_numpy(b), torch.empty(size, size)
    return lambda: torch.mm(left, right, out=result)


def time_block(calls: Sequence[Call], seconds: float) -> list[float]:
    """Return the median seconds of each call in a block in which they alternate."""
    for _ in range(_WARM_UP):
        for call in calls:
            call()
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while not times[-1] or time.perf_counter() < end:
        for call, own in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            own.append(time.perf_counter() - start)
    time.sleep(_PAUSE_S)
    return [statistics.median(own) for own in times]


def _median(blocks: Sequence[Sequence[float]], which: int) -> float:
    return statistics.median(block[which] for block in blocks)


if __name__ == "__main__":
    main()
