"""The first three minutes on a device: what is there, and whether the least of everything works."""

from __future__ import annotations

import importlib
import shutil
import time
from collections.abc import Iterable
from typing import Any

from roller_svc.bench.gpu.cases.check import Check

Json = dict[str, Any]
MODULES = ("cupy", "torch", "triton")
TOOLS = ("nvidia-smi", "compute-sanitizer", "ncu", "cuobjdump", "g++", "cc")


def imported(name: str) -> Json:
    """A package's version, and how long importing it takes; for a process of its own."""
    began = time.monotonic()
    try:
        module = importlib.import_module(name)
    except ImportError as failure:
        return {"status": "missing", "detail": str(failure)}
    return {"status": "ok", "detail": str(module.__version__), "seconds": time.monotonic() - began}


def tools() -> Json:
    """Which programs are on the PATH."""
    there = {name: shutil.which(name) is not None for name in TOOLS}
    missing_packages = [name for name, found in there.items() if not found]
    return {"status": "ok", "detail": f"not there: {', '.join(missing_packages)}" if missing_packages else "all", "tools": there}


def first_of_each_family(found: Iterable[Check]) -> list[Check]:
    """The first check of each family: small, its sizes such that tiles fit."""
    first: dict[str, Check] = {}
    for check in found:
        if not check.family.endswith("-large"):
            first.setdefault(check.family, check)
    return list(first.values())
