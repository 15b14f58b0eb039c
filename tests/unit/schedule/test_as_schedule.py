"""Construction's plans as steps and as options, and what no step says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from schedule_support import inputs_of, interpreted, judged

import roller_svc
from roller_svc import hardware
from roller_svc.cli import main
from roller_svc.compiler.as_schedule import MAX_PRICE_RATIO, explain_as_schedule, first_plan
from roller_svc.compiler.lower_and_emit import emit_plan, lower
from roller_svc.compiler.request import build_request
from roller_svc.compiler.schedule_cost import price_schedule, price_trees
from roller_svc.errors import ScheduleError
from roller_svc.schedule.by_hand import schedule_by_hand

A100, AVX2 = "nvidia-a100-sxm-80gb", "cpu-x86-avx2"
SAID: dict[str, tuple[str, Any]] = {
    "fused axes": ("c[i, j] = a[i, j] * 2.0", {"a": ("float32", (24, 32))}),
    "rows": ("c[n, h, f] = relu(a[n, h, f] + b[f])", {"a": ("float32", (4, 6, 32)), "b": ("float32", (32,))}),
    "inlined": ("t[i] = a[i] + 1.0; c[i] = t[i] * t[i]", {"a": ("float32", (96,))}),
}
ON_GPU = SAID | {
    "tail": ("c[i, j] = a[i, j] + b[j]", {"a": ("float32", (13, 21)), "b": ("float32", (21,))}),
    "window": ("p[n, y, x] >=! a[n, y + i, x + j] where y in 10, x in 14, i in 3, j in 3", {"a": ("float32", (2, 12, 16))}),
    "pooled channels": (
        "p[y, x, c] +=! a[y * 2 + i, x * 2 + j, c] where y in 4, x in 6, i in 2, j in 2",
        {"a": ("float32", (8, 12, 32))},
    ),
    "one term": ("C[m, n] +=! A[m, k] * B[k, n]", {"A": ("float32", (13, 1)), "B": ("float32", (1, 13))}),
    "one block": ("c[i] = a[i] - 1.0", {"a": ("float32", (128,))}),
}
ROWS: dict[str, tuple[str, Any]] = {
    "row sum": ("s[r] +=! a[r, c]", {"a": ("float32", (12, 64))}),
    "narrow row sum": ("s[r] +=! a[r, c] * x[c]", {"a": ("float16", (8, 64)), "x": ("float16", (64,))}),
    "lanes of a whole row": ("s[r] >=! a[r, c]", {"a": ("float32", (9, 32))}),
    "one row": ("s[r] +=! a[r, c]", {"a": ("float32", (1, 96))}),
    "kept exponentials": (
        "m[r] >=! a[r, c]; e[r, c] = exp(a[r, c] - m[r]); s[r] +=! e[r, c]; o[r, c] = e[r, c] - s[r]",
        {"a": ("float32", (8, 64))},
    ),
    "normalised rows": (
        "m[r] +=! a[r, c]; v[r] +=! (a[r, c] - m[r]) * (a[r, c] - m[r]); w[r] = 1.0 / (v[r] + 1.0);"
        "o[r, c] = (a[r, c] - m[r]) * w[r] * g[c]",
        {"a": ("float32", (10, 64)), "g": ("float32", (64,))},
    ),
    "product": ("C[m, n] +=! A[m, k] * B[k, n]", {"A": ("float32", (32, 48)), "B": ("float32", (48, 48))}),
    "columns": ("m[c] >=! a[r, c]; o[r, c] = a[r, c] - m[c]", {"a": ("float32", (6, 64))}),
}
UNSAID = [
    ("s[r] +=! a[r, c]", {"a": ("float32", (64, 512))}, A100, "sums over the threads of a warp"),
    ("s[r] +=! a[r, c]", {"a": ("float32", (64, 500))}, AVX2, "loops do not cover their axis"),
    ("t[j] >=! a[i, j]", {"a": ("float32", (13, 15))}, AVX2, "an accumulator is the whole result"),
    ("C[m, n] +=! A[m, k] * B[n, k]", {"A": ("float32", (64, 96)), "B": ("float32", (96, 96))}, AVX2, "panels of an input are"),
    ("C[m, n] +=! A[m, k] * B[k, n]", {"A": ("float32", (64, 3000)), "B": ("float32", (3000, 96))}, AVX2, "blocks of a reduction"),
    (
        "C[m, n] +=! A[m, k] * B[k, n]",
        {"A": ("float32", (256, 256)), "B": ("float32", (256, 256))},
        A100,
        "asynchronous copies",
    ),
    ("b[j, i] = a[i, j]", {"a": ("float32", (64, 64))}, AVX2, "transposes in vector registers"),
    ("m[r] >=! a[r, c]; o[r, c] = a[r, c] - m[r]", {"a": ("float32", (64, 64))}, A100, "several points of a reduction"),
]


@pytest.mark.parametrize(("name", "target"), [*((n, A100) for n in ON_GPU), *((n, AVX2) for n in (*SAID, "one term", *ROWS))])
def test_steps_of_a_plan_give_its_values_at_its_price(name: str, target: str) -> None:
    expression, inputs = (ON_GPU | ROWS)[name]
    request = build_request(expression, inputs, target=target, select="model")
    chosen, hw = first_plan(request), hardware.load(target)
    found = explain_as_schedule(request, chosen)
    assert found.missing == ""
    schedule = schedule_by_hand(chosen.program, found.text())
    arrays = inputs_of(chosen.program)
    assert judged(chosen.program, arrays, interpreted(schedule, arrays)).ok
    (group,), (choice,) = chosen.groups, chosen.plan.choices
    trees = lower(group, choice.program, hw)
    ratio = price_schedule(schedule, hw).seconds / price_trees(trees, dict((*group.inputs, *group.stored)), hw).seconds
    assert 1 / MAX_PRICE_RATIO <= ratio <= MAX_PRICE_RATIO


@pytest.mark.parametrize(("expression", "inputs", "target", "missing"), UNSAID)
def test_what_no_step_says_is_named(expression: str, inputs: Any, target: str, missing: str) -> None:
    with pytest.raises(ScheduleError, match=missing) as refused:
        roller_svc.Schedule.from_construction(expression, inputs, target)
    assert refused.value.code == "schedule-construction"


def test_a_nest_with_two_results_has_no_steps() -> None:
    expression = "m[r] +=! a[r, c]; o[r, c] = a[r, c] - m[r]"
    with pytest.raises(ScheduleError, match="a nest has several results"):
        roller_svc.Schedule.from_construction(expression, {"a": ("float32", (64, 64))}, AVX2, outputs=["m", "o"])


PLANS = [
    ("C[m, n] +=! A[m, k] * B[k, n]", {"A": ("float16", (64, 512)), "B": ("float16", (512, 96))}, A100),
    ("C[m, n] +=! A[m, k] * B[k, n]", {"A": ("float16", (16, 4096)), "B": ("float16", (4096, 512))}, "nvidia-h200-sxm"),
    ("C[m, n] +=! A[m, k] * B[k, n]; D[m, n] = relu(C[m, n])", {"A": ("float32", (50, 60)), "B": ("float32", (60, 70))}, AVX2),
    ("s[r] +=! a[r, c]", {"a": ("float32", (64, 512))}, A100),
]


@pytest.mark.parametrize(("expression", "inputs", "target"), [*PLANS, *((*ON_GPU[name], A100) for name in ON_GPU)])
def test_options_of_a_plan_build_its_text(expression: str, inputs: Any, target: str) -> None:
    request = build_request(expression, inputs, target=target, allow_tf32=True)
    found = explain_as_schedule(request, first_plan(request))
    assert found.options is not None
    assert found.options["allow_tf32"]
    plans = [first_plan(request), first_plan(build_request(expression, inputs, target=target, **found.options))]
    texts = [emit_plan(each.plan, each.program, each.groups, each.hardware).text for each in plans]
    assert texts[0] == texts[1]


def test_a_plan_is_edited_and_compiled(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Read what construction chose, change a line, run it."""
    expression, inputs = SAID["rows"]
    program = [expression, "--input", "a=float32[4,6,32]", "--input", "b=float32[32]", "--target", AVX2]
    assert main(["explain", *program, "--as-schedule"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# kernel0: cpu/loops on vector_f32, ")
    edited = "\n".join(line for line in text.splitlines() if "vectorise" not in line)
    assert edited != text.rstrip()
    kernel = roller_svc.compile(expression, inputs, schedule=edited)
    arrays = inputs_of(roller_svc.Schedule(expression, inputs).program)
    assert (kernel(**arrays)["c"] == roller_svc.reference(expression, inputs, arrays)["c"]).all()
    assert main(["explain", *program, "--as-schedule", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert roller_svc.Schedule(expression, inputs, steps=document["schedule"]).steps
    assert document["options"]["select"] == "model"
    assert main(["explain", expression.replace("relu", "sqrt"), *program[1:5], "--target", A100, "--as-schedule"]) == 0
    assert "block" in capsys.readouterr().out
    page = tmp_path / "page.html"
    for option in (["--html", str(page)], ["--source"], ["--steps", "40"]):
        assert main(["explain", *program, "--as-schedule", *option]) == 2
        assert f"--as-schedule and {option[0]} exclude each other" in capsys.readouterr().err
    assert not page.exists()
