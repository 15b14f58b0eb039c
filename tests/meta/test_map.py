"""The walks of docs/map.md are those that compiles take: their functions exist, few files have them, in that order."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from onnx_models import mlp

import roller_svc
from roller_svc import toolchain
from roller_svc.hardware import load
from roller_svc.settings import read_settings, use

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
Step = tuple[str, str]  # file, function


def section(heading: str) -> str:
    return PAGE.split(f"## {heading}")[1].split("\n## ")[0]


def steps_of(heading: str) -> list[Step]:
    return re.findall(r"^\d+\. `([\w/]+\.py)`: `([\w.]+)`", section(heading), re.MULTILINE)


KERNEL, MODEL = "One kernel from text to launch", "One model from file to call"
STEPS, MODEL_STEPS = steps_of(KERNEL), steps_of(MODEL)
MAX_FILES = {KERNEL: 15, MODEL: 10}


def function_of(path: str, name: str) -> object:
    found: object = importlib.import_module("roller_svc." + path.removesuffix(".py").replace("/", "."))
    for part in name.split("."):
        found = getattr(found, part)
    return found


def calls_of(steps: list[Step], run: Callable[[], object]) -> list[Step]:
    """The steps that a run calls, in the order of their first calls."""
    codes = {}
    for path, name in steps:
        found = function_of(path, name)
        codes[inspect.unwrap(found).__code__] = path, name
    seen: list[Step] = []

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (step := codes.get(frame.f_code)) is not None and step not in seen:
            seen.append(step)

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("heading", MAX_FILES)
def test_a_walk_names_few_files(heading: str) -> None:
    steps = steps_of(heading)
    assert len(steps) == len(re.findall(r"^\d+\. ", section(heading), re.MULTILINE))
    assert len({path for path, _ in steps}) == len(steps) <= MAX_FILES[heading]


@pytest.mark.parametrize(("path", "name"), STEPS + MODEL_STEPS)
def test_a_step_of_the_walk_is_a_function_of_its_file(path: str, name: str) -> None:
    found = function_of(path, name)
    assert inspect.getsourcefile(found) == str(ROOT / "roller_svc" / path)


def test_a_compile_takes_the_steps_in_this_order() -> None:
    """All but the last, which needs a device."""
    if not toolchain.availability(load("nvidia-h200-sxm")).ok:
        pytest.skip("no NVRTC: pip install 'roller-svc[cuda]'")
    operands = {"A": ("float16", (256, 256)), "B": ("float16", (256, 256))}

    def compile_product() -> None:
        roller_svc.compile(
            "C[m, n] +=! A[m, k].cast(`float32`) * B[k, n].cast(`float32`)",
            operands,
            target="nvidia-h200-sxm",
            select="model",
        )

    assert calls_of(STEPS[:-1], compile_product) == STEPS[:-1]


def test_a_model_takes_the_steps_in_this_order(tmp_path: Path) -> None:
    use(read_settings(cache=tmp_path))
    try:
        model = mlp()

        def compile_and_call() -> None:
            compiled = roller_svc.compile_model(model, select="model", top_k=1)
            compiled(x=np.ones((2, 8), np.float32))

        assert calls_of(MODEL_STEPS, compile_and_call) == MODEL_STEPS
    finally:
        use(read_settings())
