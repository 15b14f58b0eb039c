"""Schedules by hand against construction on this CPU: `python -m roller_bench.by_hand`.

Kernels are timed in turn, least of all rounds; results are compared. Under `taskset -c 0` both run on one thread.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import roller_svc
from roller_svc.ir.program import TensorProgram
from roller_svc.runtime.measure import measure
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate_sample

ROUNDS = 15
ROUND_S = 0.05
PRODUCT = "C[m, n] +=! A[m, k] * B[k, n]"
BLUR = """bx[y, x] = (A[y, x] + A[y, x + 1] + A[y, x + 2]) / 3.0 where y in 1026, x in 1024;
    B[y, x] = (bx[y, x] + bx[y + 1, x] + bx[y + 2, x]) / 3.0 where y in 1024, x in 1024"""


def product_steps(rows: int, columns: int, outer: str, inner: str) -> str:
    """Return a product in register tiles, in thirteen steps; the iterations of `outer` run on threads."""
    return f"""
        C: split m {rows} as mo mi
        C: split n {columns} as no ni
        C: reorder {outer} {inner} mi ni
        C: accumulate_at {inner}
        C.acc: store_in registers
        C.acc: unroll m
        C.acc: vectorise n
        C.acc.update: reorder k m n
        C.acc.update: unroll m
        C.acc.update: vectorise n
        C: unroll mi
        C: vectorise ni
        C: parallel {outer}"""


BLUR_STEPS = """
    B: tile y 16 x 256
    bx: compute_root
    bx: compute_at B x.outer
    bx: vectorise x
    B: vectorise x.inner
    B: parallel y.outer"""
CASES: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "product 512x512x512": (
        PRODUCT,
        {"A": ("float32", (512, 512)), "B": ("float32", (512, 512))},
        product_steps(8, 32, "no", "mo"),
    ),
    "product 500x300x200": (
        PRODUCT,
        {"A": ("float32", (500, 200)), "B": ("float32", (200, 300))},
        product_steps(5, 60, "mo", "no"),
    ),
    "blur 1024x1024": (BLUR, {"A": ("float32", (1026, 1026))}, BLUR_STEPS),
}


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a kernel of construction and of one by steps; the least of all rounds."""

    constructed_s: float
    scheduled_s: float
    differs: str = ""  # how results differ from the reference beyond its bounds

    @property
    def ratio(self) -> float:
        return self.scheduled_s / self.constructed_s


def time_alternately(constructed: roller_svc.Kernel, scheduled: roller_svc.Kernel, program: TensorProgram, rounds: int) -> Times:
    """Time two kernels of a program in turn, after a sample of their results is checked."""
    arrays = random_inputs(program, seed=0)
    expected = evaluate_sample(program, arrays)
    agreements = [agrees(program, kernel.run(arrays), expected) for kernel in (constructed, scheduled)]
    calls = [kernel.bind(arrays) for kernel in (constructed, scheduled)]
    times = [[measure(call, ROUND_S).min_s for call in calls] for _ in range(rounds)]
    first, second = (min(each) for each in zip(*times, strict=True))
    return Times(first, second, next((each.detail or each.output for each in agreements if not each.ok), ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    for name, (text, inputs, steps) in CASES.items():
        schedule = roller_svc.Schedule(text, inputs, steps=steps)
        times = time_alternately(roller_svc.compile(text, inputs), schedule.compile(), schedule.program, options.rounds)
        print(json.dumps({"case": name, "steps": len(schedule.steps), **asdict(times), "ratio": times.ratio}), flush=True)


if __name__ == "__main__":
    main()
