"""Errors and times of Winograd convolutions beside direct ones, on layers of networks. Prints JSON.

Errors are against a convolution in float64, relative to the root mean square of its outputs. Inputs are normal, weights
too with deviation 1 / (3 sqrt(C)). Candidates of all algorithms run interleaved in one process, with packed or
transformed weights; the fastest of each algorithm counts.

    python -m roller_bench.winograd --threads 1
    python -m roller_bench.winograd --lines         # convolutions over time, most of them dilated
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roller_bench.cpu.report import machine
from roller_svc import hardware
from roller_svc.analysis.winograd import relative_error_bound
from roller_svc.api import set_num_threads
from roller_svc.calibration import calibrate_at_first_use
from roller_svc.compiler.autotune import build_candidates
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import best_plans, rank_partitions
from roller_svc.frontend.parse import parse
from roller_svc.hardware.catalog import restrict_cores
from roller_svc.ir.constraints import ScheduleConstraints, WinogradMode
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.report import GroupedPlan
from roller_svc.runtime.cpu import CpuModule

Json = dict[str, Any]
Array = NDArray[np.float32]

DIRECT = 0  # the output tile of a direct convolution
NAMES = {DIRECT: "direct", 2: "F(2x2,3x3)", 4: "F(4x4,3x3)"}
LINE_NAMES = {DIRECT: "direct", 2: "F(2,3)", 4: "F(4,3)"}
RANKED_PLANS = 200  # of which each algorithm's first are measured
MIN_ROUNDS = 5
_CONVOLUTION = (
    "Y[n, f, y, x] +=! W[f, c, i, j] * X[n, c, y + i - 1, x + j - 1]"
    ".when([y + i - 1 >= 0, y + i - 1 < {size}, x + j - 1 >= 0, x + j - 1 < {size}], 0.0)"
    " where y in {size}, x in {size}"
)
_LINE = (
    "Y[n, f, t] +=! W[f, c, i] * X[n, c, t + i * {d} - {d}].when([t + i * {d} - {d} >= 0, t + i * {d} - {d} < {size}], 0.0)"
    " where t in {size}"
)


@dataclass(frozen=True, slots=True)
class Layer:
    """A 3 x 3 convolution of stride 1 with padding 1, for one image; or of 3 taps over time."""

    network: str
    channels: int
    filters: int
    size: int  # extent of each dimension
    dilation: int = 0  # over time; 0: of an image

    @property
    def dims(self) -> int:
        return 1 if self.dilation else 2

    def program(self) -> TensorProgram:
        types = {name: TensorType(DType.FLOAT32, array.shape) for name, array in self.arrays().items()}
        text = (_LINE if self.dilation else _CONVOLUTION).format(size=self.size, d=self.dilation)
        return replace(parse(text, types), constants=("W",))

    def arrays(self) -> dict[str, Array]:
        rng = np.random.default_rng(0)
        deviation = np.float32(1 / (3 ** (self.dims / 2) * math.sqrt(self.channels)))
        return {
            "X": rng.standard_normal((1, self.channels, *[self.size] * self.dims), np.float32),
            "W": rng.standard_normal((self.filters, self.channels, *[3] * self.dims), np.float32) * deviation,
        }


LAYERS = (
    Layer("ResNet", 64, 64, 56), Layer("ResNet", 128, 128, 28), Layer("ResNet", 256, 256, 14),
    Layer("ResNet", 512, 512, 7), Layer("VGG", 64, 64, 224), Layer("VGG", 64, 128, 112), Layer("VGG", 128, 256, 56),
    Layer("VGG", 256, 256, 56), Layer("VGG", 512, 512, 28), Layer("VGG", 512, 512, 14),
)  # fmt: skip
LINES = (
    *(Layer("TCN", 80, 160, 600, dilation) for dilation in (1, 2, 4, 8, 16, 32)),
    Layer("WaveNet", 64, 128, 4000, 64), Layer("Conv-TasNet", 128, 128, 1600, 1), Layer("keywords", 40, 64, 100, 1),
    Layer("Whisper", 384, 384, 1500, 1),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="threads (default: %(default)s)")
    parser.add_argument("--lines", action="store_true", help="convolutions of 3 taps over time")
    parser.add_argument("--plans", type=int, default=3, help="plans of each algorithm to time (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for a layer's calls (default: %(default)s)")
    options = parser.parse_args(arguments)
    calibrate_at_first_use((hardware.LOCAL,), lambda line: print(line, file=sys.stderr))
    hw = hardware.load(hardware.LOCAL)
    set_num_threads(options.threads)
    spec = restrict_cores(hw, options.threads)
    rows = [bench_layer(layer, spec, options.plans, options.seconds) for layer in (LINES if options.lines else LAYERS)]
    settings = {"threads": options.threads, "plans": options.plans, "seconds": options.seconds}
    print(json.dumps({"machine": machine(hw), "settings": settings, "layers": rows}, indent=1))


def bench_layer(layer: Layer, hw: HardwareSpec, plans: int, seconds: float) -> Json:
    """Return the errors and times of each algorithm on a layer."""
    arrays, kernels = layer.arrays(), list(compile_layer(layer, hw, plans))
    expected = convolve_float64(arrays["X"], arrays["W"], layer.dilation or 1)
    calls = [CpuModule(kernel).prepare({"W": arrays["W"]}).bind({"X": arrays["X"]}) for _, kernel in kernels]
    times = time_interleaved(calls, seconds)
    algorithms: dict[str, Json] = {}
    for tile, name in (LINE_NAMES if layer.dilation else NAMES).items():
        own = [number for number, (m, _) in enumerate(kernels) if m == tile]
        fastest = min(own, key=lambda number: min(times[number]))
        errors = relative_errors(calls[fastest].results()["Y"], expected)
        algorithms[name] = {
            "min_s": min(times[fastest]), "median_s": statistics.median(times[fastest]), "calls": len(times[fastest]),
            "plans": len(own), **errors,
        }  # fmt: skip
        if tile != DIRECT:
            algorithms[name]["error_bound"] = relative_error_bound(tile, layer.channels, layer.dims)
    direct, *others = algorithms.values()
    ratio = min(other["min_s"] for other in others) / direct["min_s"]
    return asdict(layer) | {"algorithms": algorithms, "winograd_over_direct": ratio}


def compile_layer(layer: Layer, hw: HardwareSpec, plans: int) -> Iterator[tuple[int, CompiledKernel]]:
    """Yield the output tile of Winograd's algorithm (0: direct) and a kernel, for the first plans of each algorithm."""
    program = layer.program()
    for mode in (WinogradMode.NEVER, WinogradMode.ALWAYS):
        partitions = rank_partitions(PartitionCache(program), hw, RANKED_PLANS, ScheduleConstraints(winograd=mode))
        ranked = [GroupedPlan(plan, each.groups) for each in partitions for plan in best_plans(each.candidates, RANKED_PLANS)]
        for tile in sorted({_tile(plan) for plan in ranked}):
            first = [plan for plan in ranked if _tile(plan) == tile][:plans]
            for result in build_candidates(tuple(first), program, hw):
                if result.compiled is None:
                    raise result.error or AssertionError("neither a kernel nor an error")
                yield tile, result.compiled


def _tile(plan: GroupedPlan) -> int:
    (choice,) = plan.plan.choices
    return choice.program.space.winograd_tile


def time_interleaved(calls: Sequence[Callable[[], object]], seconds: float) -> list[list[float]]:
    """Return the seconds of each call, in rounds of one call each, after a round that does not count."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    end = time.perf_counter() + seconds
    while len(times[-1]) < MIN_ROUNDS or time.perf_counter() < end:
        for call, own in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            own.append(time.perf_counter() - start)
    return times


def convolve_float64(x: Array, w: Array, dilation: int = 1) -> NDArray[np.float64]:
    """Return the convolution in float64 with as many results as elements, tap by tap."""
    _, channels, *extents = x.shape
    padded = np.pad(x[0].astype(np.float64), ((0, 0), *[(dilation, dilation)] * len(extents)))
    result = np.zeros((w.shape[0], math.prod(extents)))
    for place in np.ndindex(*w.shape[2:]):
        window = tuple(slice(at * dilation, at * dilation + extent) for at, extent in zip(place, extents, strict=True))
        result += w[(slice(None), slice(None), *place)].astype(np.float64) @ padded[(slice(None), *window)].reshape(channels, -1)
    return result.reshape(1, -1, *extents)


def relative_errors(results: NDArray[Any], expected: NDArray[np.float64]) -> dict[str, float]:
    """Return the largest and the root mean square error, relative to the root mean square of the expected values."""
    scale, error = np.sqrt(np.mean(expected**2)), results.astype(np.float64) - expected
    return {
        "max_error": float(np.max(np.abs(error)) / scale),
        "rms_error": float(np.sqrt(np.mean(error**2)) / scale),
    }


if __name__ == "__main__":
    main()
