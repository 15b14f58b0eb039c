"""The walk of docs/map.md is the one that a compile takes: its functions exist, few files have them, in that order."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from types import FrameType

import pytest

import roller_svc
from roller_svc import toolchain
from roller_svc.hardware import load

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
WALK = PAGE.split("## One kernel from text to launch")[1].split("\n## ")[0]
STEPS = re.findall(r"^\d+\. `([\w/]+\.py)`: `([\w.]+)`", WALK, re.MULTILINE)
MAX_FILES = 15


def function_of(path: str, name: str) -> object:
    found: object = importlib.import_module("roller_svc." + path.removesuffix(".py").replace("/", "."))
    for part in name.split("."):
        found = getattr(found, part)
    return found


def test_the_walk_names_few_files() -> None:
    numbered = re.findall(r"^\d+\. ", WALK, re.MULTILINE)
    assert len(STEPS) == len(numbered)
    assert len({path for path, _ in STEPS}) == len(STEPS) <= MAX_FILES


@pytest.mark.parametrize(("path", "name"), STEPS)
def test_a_step_of_the_walk_is_a_function_of_its_file(path: str, name: str) -> None:
    found = function_of(path, name)
    assert inspect.getsourcefile(found) == str(ROOT / "roller_svc" / path)  # type: ignore[arg-type]


def test_a_compile_takes_the_steps_in_this_order() -> None:
    """All but the last, which needs a device."""
    if not toolchain.availability(load("nvidia-h200-sxm")).ok:
        pytest.skip("no NVRTC: pip install 'roller-svc[cuda]'")
    codes = {}
    for path, name in STEPS[:-1]:
        found = function_of(path, name)
        codes[inspect.unwrap(found).__code__] = path, name  # type: ignore[arg-type, attr-defined]
    seen: list[tuple[str, str]] = []

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (step := codes.get(frame.f_code)) is not None and step not in seen:
            seen.append(step)

    sys.setprofile(watch)
    try:
        roller_svc.compile(
            "C[m, n] +=! A[m, k].cast(`float32`) * B[k, n].cast(`float32`)",
            {"A": ("float16", (256, 256)), "B": ("float16", (256, 256))}, target="nvidia-h200-sxm", select="model",
        )  # fmt: skip
    finally:
        sys.setprofile(None)
    assert seen == STEPS[:-1]
