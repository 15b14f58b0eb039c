"""Smoke tests for the first minutes on a device: tools, modules and one small kernel of each family."""

from __future__ import annotations

import importlib
import shutil
import time
from collections.abc import Iterable
from typing import Any

from roller_bench.gpu.cases.check import Check

Json = dict[str, Any]
MODULES = ("cupy", "torch", "triton")
TOOLS = ("nvidia-smi", "compute-sanitizer", "ncu", "cuobjdump", "g++", "cc")


def imported(name: str) -> Json:
    """Import a module; return its version and import time. Meant to run in its own process."""
    began = time.monotonic()
    try:
        module = importlib.import_module(name)
    except ImportError as failure:
        return {"status": "missing", "detail": str(failure)}
    return {"status": "ok", "detail": str(module.__version__), "seconds": time.monotonic() - began}


def tools() -> Json:
    """Return which programs are on the PATH."""
    available = {name: shutil.which(name) is not None for name in TOOLS}
    missing_packages = [name for name, all_checks in available.items() if not all_checks]
    return {
        "status": "ok",
        "detail": f"missing: {', '.join(missing_packages)}" if missing_packages else "all",
        "tools": available,
    }


def first_of_each_family(all_checks: Iterable[Check]) -> list[Check]:
    """Return the first check of each family: small, with sizes that tiles divide."""
    first: dict[str, Check] = {}
    for check in all_checks:
        if not check.family.endswith("-large"):
            first.setdefault(check.family, check)
    return list(first.values())
