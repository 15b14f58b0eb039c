"""Run one baseline compiler: read case ids from stdin, write a JSON line with seconds and bytes for each.

    python -m roller_bench.compile.worker triton|tilelang ARCH

The first line is {"ready": seconds} after the compiler is loaded and has compiled a warm-up case, or {"missing": why}.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from roller_bench.compile.cases import CASES, Case, gemm

WARM_UP = gemm(256, 256, 256)


def main(baseline: str, arch: int) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # compilers may print to stdout
    start = time.perf_counter()
    try:
        compiled: Callable[[Case, int], bytes] = importlib.import_module(f"roller_bench.compile.{baseline}_kernels").compiled
    except ImportError as missing:
        print(json.dumps({"missing": str(missing)}), file=answers)
        return
    compiled(WARM_UP, arch)
    print(json.dumps({"ready": time.perf_counter() - start}), file=answers)
    cases = {case.id: case for case in CASES}
    for line in sys.stdin:
        print(json.dumps(_timed(compiled, cases[line.strip()], arch)), file=answers)


def _timed(compiled: Callable[[Case, int], bytes], case: Case, arch: int) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        binary = compiled(case, arch)
    except Exception as failure:  # noqa: BLE001 - other compilers may raise anything: it is a result
        return {"error": f"{type(failure).__name__}: {failure}"[:300]}
    return {"seconds": time.perf_counter() - start, "bytes": len(binary)}


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        main(sys.argv[1], int(sys.argv[2]))
