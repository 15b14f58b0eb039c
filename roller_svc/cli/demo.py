"""make demo: compile and run two kernels on the host CPU, and compile one for a GPU."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roller_svc import hardware
from roller_svc.api import Kernel
from roller_svc.calibration import calibrate_at_first_use
from roller_svc.cli import format as show
from roller_svc.cli.compile import candidates_table
from roller_svc.cli.explain import format_search
from roller_svc.compiler.artifact import package_kernel
from roller_svc.compiler.pipeline import build_kernel
from roller_svc.compiler.reports import report_json
from roller_svc.compiler.request import build_request
from roller_svc.errors import RollerError, WrongAnswerError
from roller_svc.ir.report import BuildReport
from roller_svc.runtime.measure import measure
from roller_svc.semantics.inputs import random_inputs
from roller_svc.verify.run_and_verify import Arrays, load_kernel, verify_results

GPU = "nvidia-h200-sxm"
FOLDER = Path("build/demo")
STEPS = 6  # of a search; `roller explain` shows more

MATMUL = """\
C[m, n] +=! A[m, k] * B[k, n];
D[m, n] = gelu(C[m, n] + bias[n])"""

CONV = """\
Y[n, f, ho, wo] +=! X[n, c, ho + kh - 1, wo + kw - 1]
    .when([ho + kh - 1 >= 0, ho + kh - 1 < 56, wo + kw - 1 >= 0, wo + kw - 1 < 56], 0.0)
    * W[f, c, kh, kw] where ho in 56, wo in 56"""


@dataclass(frozen=True, slots=True)
class DemoProgram:
    """A program of the demonstration."""

    title: str
    expression: str
    inputs: dict[str, tuple[str, tuple[int, ...]]]


PROGRAMS = (
    DemoProgram(
        "matmul + bias + GELU, 512 × 512 × 512",
        MATMUL,
        {"A": ("float32", (512, 512)), "B": ("float32", (512, 512)), "bias": ("float32", (512,))},
    ),
    DemoProgram(
        "3 × 3 convolution, 64 → 64 channels, 56 × 56",
        CONV,
        {"X": ("float32", (1, 64, 56, 56)), "W": ("float32", (64, 64, 3, 3))},
    ),
)


def main() -> int:
    calibrate_at_first_use((hardware.LOCAL,), print)
    for program in PROGRAMS:
        _run_on_cpu(program)
    _build_for_gpu(PROGRAMS[0])
    return 0


def _run_on_cpu(program: DemoProgram) -> None:
    request = build_request(program.expression, program.inputs, target=hardware.LOCAL, top_k=10, select="measure")
    report = build_kernel(request)
    facts = report_json(report)
    arrays = random_inputs(report.program, seed=0)
    kernel = load_kernel(package_kernel(report).compiled, arrays)
    agreement = verify_results(report.program, arrays, kernel.results(), allow_tf32=False)
    if not agreement.ok:
        raise WrongAnswerError(f"{program.title}: {agreement.detail}")
    kernel_s = kernel.measure().min_s  # least times: those of a busy machine differ by its load
    numpy_s = measure(lambda: _run_numpy(arrays), budget_s=0.5).min_s
    _print_report(program, report, facts)
    work = report.program.flops / 1e9
    print(f"\nroller {show.format_seconds(kernel_s):>8}  {work / kernel_s:7.1f} GFLOP/s (least times)")
    print(f"numpy  {show.format_seconds(numpy_s):>8}  {work / numpy_s:7.1f} GFLOP/s")
    print(f"PASS: max abs error {agreement.max_abs_error:.3g}\n")


def _print_report(program: DemoProgram, report: BuildReport, facts: dict[str, Any]) -> None:
    print(f"=== {program.title}, on {report.hardware.name}\n\n{program.expression}\n\nConstruction:")
    story, attempts = facts["story"], facts["attempts"]
    for construction, kernel in zip(story["constructions"], story["programs"][0]["kernels"], strict=True):
        for found in kernel["found"]:
            print(format_search(story["searches"][found["search"]], STEPS, found["step"]))
        print(f"... {construction['tiles_visited']} tiles visited, {construction['programs']} programs estimated")
    print(f"\nThe best {len(attempts)}, by measured time:\n{candidates_table(attempts)}")
    for note in (*report.notes, *report.remarks):
        print(f"note: {note}")


def _build_for_gpu(program: DemoProgram) -> None:
    kernel = Kernel.from_report(
        build_kernel(build_request(program.expression, program.inputs, target=GPU, top_k=1, select="model"))
    )
    folder = kernel.save(FOLDER / GPU)
    print(f"=== {program.title}, for {GPU}")
    for launch, used in zip(kernel.launches, kernel.resources, strict=True):
        print(
            f"{launch.name}: grid {launch.grid}, block {launch.block}, {used.registers_per_thread} registers,"
            f" {used.spill_bytes} bytes spilled, {used.shared_bytes} bytes of shared memory"
        )
    print(f"written to {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


def _run_numpy(arrays: Arrays) -> NDArray[np.float32]:
    """Compute the same program by numpy: matmul and erf GELU, or im2col and matmul."""
    if "X" in arrays:
        return _convolution(arrays["X"], arrays["W"])
    value: NDArray[np.float32] = arrays["A"] @ arrays["B"] + arrays["bias"]
    return value * (np.float32(0.5) * (1 + _erf(value * np.float32(0.5**0.5))))


def _convolution(x: NDArray[np.float32], w: NDArray[np.float32]) -> NDArray[np.float32]:
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    batch, channels, high, wide = windows.shape[:4]
    columns = windows.transpose(0, 2, 3, 1, 4, 5).reshape(batch * high * wide, channels * 9)
    out = columns @ w.reshape(w.shape[0], -1).T
    return out.reshape(batch, high, wide, -1).transpose(0, 3, 1, 2)


def _erf(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Approximate erf (Abramowitz and Stegun 7.1.26), which numpy lacks."""
    t = 1 / (1 + np.float32(0.3275911) * np.abs(x))
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    result: NDArray[np.float32] = np.sign(x) * (1 - poly.astype(np.float32) * np.exp(-x * x))
    return result


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RollerError as error:
        show.print_message(f"error: {error.code}: {error.message}")
        sys.exit(1)
