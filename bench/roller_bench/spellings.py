"""Times of sums of products in other spellings, over those of the plain form. Prints JSON.

Estimates are for targets, of large sizes. `--time` also compiles the smaller sizes for the host CPU, and calls each
spelling and its plain form in turns. Times of one thread are those of its processor, so that other processes disturb
them less; those of several are times of the clock. The baseline is the plain form, times the number of products that a
spelling has.

    python -m roller_bench.spellings --targets nvidia-h200-sxm,nvidia-a100-sxm-80gb,amd-mi300x
    python -m roller_bench.spellings --targets cpu-x86-avx512 --time --seconds 3
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roller_bench.cpu.report import machine
from roller_svc import compile as compile_kernel
from roller_svc import hardware, set_num_threads
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import estimate_program
from roller_svc.frontend.parse import parse
from roller_svc.ir.constraints import ScheduleConstraints
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.semantics.inputs import random_inputs

TARGETS = "nvidia-h200-sxm,nvidia-a100-sxm-80gb,amd-mi300x,cpu-x86-avx512"
MIN_PAIRS, WARM_UP = 5, 2
A, B = "a[m, k].cast(float32)", "b[n, k].cast(float32)"
P, Q = "p[m, k].cast(int32)", "q[k, n].cast(int32)"
E, F = "e[m, g * 128 + r].cast(float32)", "f[n, g * 128 + r].cast(float32)"
BLOCKS = "where g in {K} // 128, r in 128"
# plain form: its text, its size for estimates and for the host
PLAIN = {
    "float16": ("y[m, n]: float32 +=! x[m, k] * w[k, n]", (4096, 4096, 4096), (768, 768, 768)),
    "int8": (f"y[m, n] +=! {P} * {Q}", (4096, 4096, 4096), (768, 768, 768)),
    "complex": ("y[m, n]: float32 +=! x[m, k] * w[k, n]", (2048, 2048, 2048), (512, 512, 512)),
    "rows": (f"y[m, n]: float32 +=! {A} * {B}", (4096, 4096, 512), (768, 768, 768)),
    "float8": ("y[m, n]: float32 +=! e[m, k] * f[n, k]", (4096, 4096, 7168), (768, 768, 768)),
}


@dataclass(frozen=True)
class Spelling:
    """A program, in place of several plain products."""

    plain: str
    text: str
    products: int = 1
    outputs: tuple[str, ...] = ("y",)
    options: Mapping[str, Any] = field(default_factory=dict)


DISTANCES = {"allow_expanded_squares": True}
SPELLINGS = {
    "-(a * b)": Spelling("float16", "y[m, n]: float32 +=! -(x[m, k] * w[k, n])"),
    "(a * b).cast(float32)": Spelling("float16", "y[m, n]: float32 +=! (x[m, k] * w[k, n]).cast(float32)"),
    "where(k <= m, a * b, 0)": Spelling("float16", "y[m, n]: float32 +=! where(k <= m, x[m, k] * w[k, n], 0.0)"),
    "where(k <= n, a * b, 0)": Spelling("float16", "y[m, n]: float32 +=! where(k <= n, x[m, k] * w[k, n], 0.0)"),
    "a.when([k <= m], 0) * b": Spelling("float16", "y[m, n]: float32 +=! x[m, k].when([k <= m], 0.0) * w[k, n]"),
    "a * b * s[k]": Spelling("float16", "y[m, n]: float32 +=! x[m, k] * w[k, n] * s[k]"),
    "a * b + c * d": Spelling("float16", "y[m, n]: float32 +=! x[m, k] * w[k, n] + c[m, k] * d[k, n]", 2),
    "a * b - c * d": Spelling("float16", "y[m, n]: float32 +=! x[m, k] * w[k, n] - c[m, k] * d[k, n]", 2),
    "complex product, two sums": Spelling(
        "complex",
        "y[m, n]: float32 +=! x[m, k] * w[k, n] - c[m, k] * d[k, n];z[m, n]: float32 +=! x[m, k] * d[k, n] + c[m, k] * w[k, n]",
        4,
        ("y", "z"),
    ),
    "(a - 128) * b": Spelling("int8", f"y[m, n] +=! ({P} - 128) * {Q}"),
    "(a - za[m]) * b": Spelling("int8", f"y[m, n] +=! ({P} - u[m].cast(int32)) * {Q}"),
    "(a - za[m]) * (b - zb[n])": Spelling("int8", f"y[m, n] +=! ({P} - u[m].cast(int32)) * ({Q} - v[n].cast(int32))"),
    "square(a - b), allowed": Spelling("rows", f"y[m, n]: float32 +=! square({A} - {B})", options=DISTANCES),
    "(a - b) ** 2, allowed": Spelling("rows", f"y[m, n]: float32 +=! ({A} - {B}) ** 2", options=DISTANCES),
    "scaled blocks, nested": Spelling(
        "float8",
        f"s[m, n, g]: float32 +=! {E} * {F} {BLOCKS}; y[m, n] +=! s[m, n, g] * sa[m, g] * sb[n // 128, g]",
    ),
    "scaled blocks, one sum": Spelling(
        "float8", "y[m, n] +=! e[m, k].cast(float32) * sa[m, k // 128] * (f[n, k].cast(float32) * sb[n // 128, k // 128])"
    ),
}


def parsed(text: str, size: tuple[int, int, int], outputs: Sequence[str] = ("y",)) -> TensorProgram:
    """Return a program with the tensors that its text reads."""
    m, n, k = size
    half, byte = DType.FLOAT16, DType.UINT8
    types = {
        "x": (half, (m, k)), "w": (half, (k, n)), "c": (half, (m, k)), "d": (half, (k, n)), "s": (half, (k,)),
        "a": (half, (m, k)), "b": (half, (n, k)), "p": (byte, (m, k)), "q": (DType.INT8, (k, n)), "u": (byte, (m,)),
        "v": (DType.INT8, (n,)), "e": (DType.FLOAT8_E4M3FN, (m, k)), "f": (DType.FLOAT8_E4M3FN, (n, k)),
        "sa": (DType.FLOAT32, (m, k // 128)), "sb": (DType.FLOAT32, (n // 128, k // 128)),
    }  # fmt: skip
    text = text.replace("{K} // 128", str(k // 128))
    computed = {statement.strip().split("[")[0] for statement in text.split(";")}
    read = set(re.findall(r"\b(\w+)\[", text)) - computed
    used = {name: TensorType(*kind) for name, kind in types.items() if name in read}
    return parse(text, used, tuple(outputs))


def estimated_ratios(target: str) -> dict[str, float]:
    """Return the estimate of each spelling over that of its plain products."""
    hw, plain = hardware.load(target), dict[str, float]()

    def seconds(program: TensorProgram, options: Mapping[str, Any]) -> float:
        constraints = ScheduleConstraints(**options)
        return estimate_program(PartitionCache(program), hw, 1, constraints).plans[0].estimate.seconds

    ratios = {}
    for name, spelling in SPELLINGS.items():
        text, size, _ = PLAIN[spelling.plain]
        if spelling.plain not in plain:
            plain[spelling.plain] = seconds(parsed(text, size), {})
        ratio = seconds(parsed(spelling.text, size, spelling.outputs), spelling.options)
        ratios[name] = ratio / (spelling.products * plain[spelling.plain])
    return ratios


def measured_ratios(seconds: float, threads: int, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the times of spellings on the host over those of their plain products: of the least and the median."""
    set_num_threads(threads)
    calls: dict[str, Callable[[], object]] = {}
    ratios = {}
    for name in names:
        spelling = SPELLINGS[name]
        text, _, size = PLAIN[spelling.plain]
        if spelling.plain not in calls:
            calls[spelling.plain] = _call(parsed(text, size), text, size, {})
        call = _call(parsed(spelling.text, size, spelling.outputs), spelling.text, size, spelling.options, spelling.outputs)
        own, plain = time_in_turns(call, calls[spelling.plain], seconds, threads)
        products = spelling.products
        ratios[name] = {
            "least": min(own) / (products * min(plain)),
            "median": statistics.median(own) / (products * statistics.median(plain)),
            "plain_s": min(plain),
            "pairs": len(own),
        }
    return ratios


def _call(
    program: TensorProgram, text: str, size: tuple[int, int, int], options: Mapping[str, Any], outputs: Sequence[str] = ("y",)
) -> Callable[[], object]:
    """Compile a program for the host, and return a call on random inputs."""
    inputs = {name: (type_.dtype.value, type_.shape) for name, type_ in program.inputs}
    whole = text.replace("{K} // 128", str(size[2] // 128))
    kernel = compile_kernel(whole, inputs, outputs=outputs, select="model", top_k=1, **options)
    return kernel.bind(random_inputs(program, 0))


def time_in_turns(
    one: Callable[[], object], other: Callable[[], object], seconds: float, threads: int
) -> tuple[list[float], list[float]]:
    """Call both in turns for a time, and return the seconds of their calls."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while len(times[0]) < WARM_UP + MIN_PAIRS or time.perf_counter() < end:
        for call, found in zip((one, other), times, strict=True):
            start = clock()
            call()
            found.append(clock() - start)
    return times[0][WARM_UP:], times[1][WARM_UP:]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the ratios of all spellings as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=TARGETS, help="ids, with commas (default: %(default)s)")
    parser.add_argument("--time", action="store_true", help="also measure on the host CPU")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each spelling that is measured (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of kernels that are measured (default: %(default)s)")
    parser.add_argument("--only", nargs="*", choices=tuple(SPELLINGS), help="spellings that are measured")
    options = parser.parse_args(arguments)
    report: dict[str, Any] = {"baseline": "the plain form, times the number of products", "estimates": {}}
    for target in filter(None, options.targets.split(",")):
        report["estimates"][target] = estimated_ratios(target)
    if options.time:
        report["machine"] = machine(hardware.load("local")) | {"threads": options.threads}
        report["measured"] = measured_ratios(options.seconds, options.threads, options.only or tuple(SPELLINGS))
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
