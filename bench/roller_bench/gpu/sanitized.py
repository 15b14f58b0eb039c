"""Run checks under compute-sanitizer. As a module this is the program that the sanitizer runs."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

from roller_bench.gpu.cases import checks
from roller_bench.gpu.cases.check import Check
from roller_bench.gpu.verify import build_check
from roller_svc.compiler.artifact import package_kernel
from roller_svc.frontend.lang.input_types import tensor_types
from roller_svc.frontend.parse import parse
from roller_svc.runtime.cuda.arrays import copy_to_device, import_cupy
from roller_svc.runtime.cuda.module import CudaModule
from roller_svc.semantics.inputs import random_inputs

Json = dict[str, Any]
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
_FOUND = 86  # exit code for findings; Python uses none of this value
_ERRORS = re.compile(r"(?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards?)")
_MAX_TEXT_CHARS = 4000
_LAST_WORDS_S = 3.0


def sample_checks(all_checks: list[Check]) -> list[Check]:
    """Return the second check of each family, which is small, or its only one; no large families."""
    families: dict[str, list[Check]] = {}
    for check in all_checks:
        if not check.family.endswith("-large"):
            families.setdefault(check.family, []).append(check)
    return [group[min(1, len(group) - 1)] for group in families.values()]


def sanitize(chosen: list[Check], target: str, timeout_s: float) -> list[Json]:
    """Run all tools concurrently; return one row per tool, or one row if compute-sanitizer is missing."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return [{"tool": "compute-sanitizer", "status": "not run", "detail": "it is not on the PATH"}]
    words = [
        sys.executable,
        "-m",
        "roller_bench.gpu.sanitized",
        "--target",
        target,
        *(check.id for check in chosen),
    ]
    running = [
        subprocess.Popen(
            [program, "--tool", tool, "--error-exitcode", str(_FOUND), "--print-limit", "20", *words],
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for tool in TOOLS
    ]
    until = time.monotonic() + timeout_s
    return confirm_racecheck([_finish(tool, one, until) for tool, one in zip(TOOLS, running, strict=True)])


def confirm_racecheck(rows: list[Json]) -> list[Json]:
    """Mark findings of racecheck as unconfirmed unless memcheck or synccheck report errors too.

    racecheck does not model all of mbarrier, TMA and wgmma and reports false hazards.
    """
    confirmed = any(row["status"] == "wrong" for row in rows if row["tool"] in ("memcheck", "synccheck"))
    return [
        {**row, "status": "unconfirmed"} if row["tool"] == "racecheck" and row["status"] == "wrong" and not confirmed else row
        for row in rows
    ]


def _finish(tool: str, process: subprocess.Popen[str], until: float) -> Json:
    try:
        text, _ = process.communicate(timeout=max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # also kills the sanitized program
        return {"tool": tool, "status": "timeout", "detail": _last_words(process)}
    return parse_report(tool, text, process.returncode)


def _last_words(process: subprocess.Popen[str]) -> str:
    """Return the output of a killed tool; a process stuck in the driver may keep the pipe open."""
    try:
        text, _ = process.communicate(timeout=_LAST_WORDS_S)
    except subprocess.TimeoutExpired:
        return "it could not be killed"
    return text[-_MAX_TEXT_CHARS:]


def parse_report(tool: str, text: str, code: int) -> Json:
    """Parse the report of a tool; "not run" if it has no summary, or fails without an error."""
    summary = _ERRORS.search(text)
    if summary is None:
        return {"tool": tool, "status": "not run", "detail": text[-_MAX_TEXT_CHARS:], "exit_code": code}
    errors = int(summary[1] or summary[2])
    status = "wrong" if errors else "ok" if code == 0 else "not run"
    detail = "" if status == "ok" else text[-_MAX_TEXT_CHARS:]
    return {"tool": tool, "status": status, "errors": errors, "detail": detail, "exit_code": code}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("ids", nargs="+")
    options = parser.parse_args()
    cupy = import_cupy()
    cupy.cuda.set_allocator(None)  # a memory pool would hide out-of-bounds accesses
    for check in (check for check in checks() if check.id in options.ids):
        print(f"== {check.id}", flush=True)
        program = parse(check.expression, dict(tensor_types(check.types)), None)
        arrays = random_inputs(program, 0, check.hints)
        CudaModule(package_kernel(build_check(check, options.target)).compiled).run(copy_to_device(arrays))
        cupy.cuda.runtime.deviceSynchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
