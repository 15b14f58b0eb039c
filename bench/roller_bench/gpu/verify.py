"""Run the kernel of a check on a device or in the emulator, on several sets of inputs, and verify the results."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from roller_bench.gpu.cases.check import Check
from roller_bench.gpu.device_errors import fatal_device_errors
from roller_bench.gpu.guarded import GuardedCall
from roller_bench.gpu.products import check_full_product
from roller_bench.gpu.values import inputs, values_of
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.pipeline import build_kernel
from roller_svc.compiler.request import build_request
from roller_svc.errors import BuildError, RollerError, ToolchainMissingError
from roller_svc.ir.accumulation import AccumulatorPrecision
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.report import BuildReport
from roller_svc.runtime.binding import Array
from roller_svc.runtime.cuda.arrays import import_cupy
from roller_svc.verify.kernel_stats import summarize_kernels
from roller_svc.verify.run_and_verify import MAX_INTERPRETED_POINTS, accumulation_of, verify_results

Json = dict[str, Any]
# Beyond this the interpreter (ten million points per second) checks a sample only (verify/run_and_verify.py).
EMULATED_POINTS = MAX_INTERPRETED_POINTS
RUNS = 2  # per set: results of a race may differ between runs
LATER_SETS_S = 2.0  # time limit for the sets after the first; most of it is spent in the reference


@dataclass(frozen=True, slots=True)
class Verification:
    """One check to run."""

    check: Check
    target: str
    sets: int  # of inputs
    on_device: bool  # else the emulator runs small kernels, and large ones are only compiled
    verdict: Json | None = None  # the row of a dry run, with the key of its kernel source


def build_check(check: Check, target: str) -> BuildReport:
    """Build the kernel that the model ranks first. Raises RollerError."""
    return build_kernel(
        build_request(
            check.expression,
            check.types,
            target=target,
            top_k=1,
            select="model",
            allow_tf32=check.allow_tf32,
            family=check.unit,
            tiles=dict(check.tiles),
            donate=list(check.donate),
        )
    )


def verify(task: Verification) -> Json:
    """Return the row of a check; its status is "refused" if the kernel cannot be built."""
    check, began = task.check, time.monotonic()
    row: Json = {"id": check.id, "family": check.family, "status": "ok", "detail": ""}
    try:
        report = build_check(check, task.target)
        compiled = _require_compiled(report)
    except RollerError as failure:
        return row | {"status": "refused", "detail": f"{failure.code}: {failure.message}"}
    row |= kernel_columns(report, compiled)
    row |= {"build_s": time.monotonic() - began, "key": compiled.source.key}
    if task.verdict is not None and task.verdict["key"] == row["key"]:
        row["emulator"] = task.verdict["emulator"]
    verifier = ResultVerifier(check, report.program, accumulation_of(report.winner.plan, report.hardware))
    points = sum(statement.points for statement in report.program.statements)
    emulable = points <= EMULATED_POINTS
    if not task.on_device and not emulable:
        return row | {"status": "compiled", "detail": f"{points:.2g} points are too many for the emulator"}
    first_done = math.inf
    for number in range(task.sets if emulable else 1):
        arrays = inputs(report.program, number, check)
        found = _run(verifier, compiled, arrays) if task.on_device else None
        if emulable and (found is None or found.verdict["status"] != "ok"):  # the device is idle meanwhile
            row["emulator"] = emulate(verifier, compiled, arrays, found)
        verdict = found.verdict if found is not None else row["emulator"]
        row = _merge_verdict(row, verdict, number)
        first_done = min(first_done, time.monotonic())
        if row["status"] != "ok" or time.monotonic() > first_done + LATER_SETS_S:
            break
    row["seconds"] = time.monotonic() - began
    return row


@dataclass(frozen=True, slots=True)
class ResultVerifier:
    """Verifies the results of one check."""

    check: Check
    program: TensorProgram
    accumulation: AccumulatorPrecision | None  # how its kernels accumulate products

    def verdict(self, arrays: Mapping[str, Array], results: Mapping[str, Array]) -> Json:
        """Compare with the reference interpreter within its error bounds: all elements, or a sample of large results.

        A check with `product` also compares all elements with a float32 product, if PyTorch has a device.
        """
        check = self.check
        agreement = verify_results(self.program, arrays, results, allow_tf32=check.allow_tf32, accumulation=self.accumulation)
        verdict: Json = {
            "status": "ok" if agreement.ok else "wrong", "detail": agreement.detail,
            "max_abs_error": agreement.max_abs_error,
        }  # fmt: skip
        if agreement.ok and check.product is not None:
            whole = check_full_product(check.product, arrays, results)
            if whole is not None:
                verdict["whole"] = dataclasses.asdict(whole)
                if whole.wrong:
                    verdict |= {"status": "wrong", "detail": whole.detail}
        return verdict


@dataclass(frozen=True, slots=True)
class DeviceRun:
    """The results of one set of inputs on the device, and their verdict."""

    results: Mapping[str, Array]
    verdict: Json


def kernel_columns(report: BuildReport, compiled: CompiledKernel) -> Json:
    """Return the columns that describe a kernel, as `roller corpus` names them, and its resources."""
    return {
        "kernels": list(summarize_kernels(report.groups, report.winner.plan, report.hardware)),
        "launches": [
            {
                "name": launch.name,
                "grid": launch.grid[0],
                "threads": launch.block[0],
                "zeroed": list(launch.zeroed),
                **dataclasses.asdict(resources),
            }
            for launch, resources in zip(compiled.source.launches, compiled.resources, strict=True)
        ],
        "workspace_bytes": compiled.source.workspace_bytes,
    }


def emulate(verifier: ResultVerifier, compiled: CompiledKernel, arrays: Mapping[str, Array], device_run: DeviceRun | None) -> Json:
    """Run the kernel in the emulator; return its verdict and the largest difference from the device's results."""
    try:
        donated = {name: arrays[name].copy() for name in verifier.check.donate}
        results = load_emulated(compiled).run({**arrays, **donated})
    except ToolchainMissingError as missing:
        return {"status": "not run", "detail": missing.message}
    except BuildError as failure:
        return {"status": "error", "detail": f"{failure.code}: {failure.message}"}
    verdict = verifier.verdict(arrays, results)
    if device_run is not None:
        verdict["difference"] = max(_max_difference(results[name], device_run.results[name]) for name in results)
    return verdict


def _run(verifier: ResultVerifier, compiled: CompiledKernel, arrays: Mapping[str, Array]) -> DeviceRun:
    with fatal_device_errors():
        call = GuardedCall(compiled, arrays, import_cupy())
        runs = [call.results() for _ in range(RUNS)]
    verdict = verifier.verdict(arrays, runs[0])
    violations = call.guard_violations()
    if violations:
        verdict |= {"status": "wrong", "detail": f"wrote {'; '.join(violations)}"}
    verdict["repeatable"] = all(_are_bitwise_equal(runs[0], other) for other in runs[1:])
    if verdict["status"] == "ok" and not verdict["repeatable"]:
        again = verifier.verdict(arrays, runs[-1])
        verdict |= {key: again[key] for key in ("status", "detail")}
    return DeviceRun(runs[0], verdict)


def _merge_verdict(row: Json, verdict: Json, number: int) -> Json:
    """Update a row with the verdict of one more set of inputs: the largest error and the first failure."""
    errors = [error for error in (row.get("max_abs_error"), verdict.get("max_abs_error")) if error is not None]
    row |= {"max_abs_error": max(errors, default=None), "sets": number + 1}
    if "repeatable" in verdict:
        row["repeatable"] = row.get("repeatable", True) and verdict["repeatable"]
    if "whole" in verdict:
        row["whole"] = verdict["whole"]
    if verdict["status"] == "ok":
        return row
    status = "compiled" if verdict["status"] == "not run" else verdict["status"]
    return row | {"status": status, "detail": f"set {number} ({values_of(number).value}): {verdict['detail']}"}


def _require_compiled(report: BuildReport) -> CompiledKernel:
    compiled = report.winner.compiled
    if compiled is None or not compiled.binary:
        raise ToolchainMissingError(f"no binary was compiled for {report.hardware.id}")
    return compiled


def _are_bitwise_equal(first: Mapping[str, Array], second: Mapping[str, Array]) -> bool:
    return all(np.array_equal(first[n].view(np.uint8), second[n].view(np.uint8)) for n in first if first[n].shape)


def _max_difference(first: Array, second: Array) -> float:
    """Return the largest absolute difference; two NaN count as equal."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        return float(np.max(np.where(same, 0.0, np.abs(a - b)), initial=0.0))
