"""Scatters that overwrite keep the program's order on GPUs: the last write wins, and rows are not torn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from roller_svc import hardware
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.donation import donate_targets
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.plans import best_plans, rank_best_partition
from roller_svc.errors import IndexRangeError
from roller_svc.frontend.lang import parse
from roller_svc.fusion.ordered_scatter import order_scatters, ordered_axes
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.runtime.emulator import EmulatorModule
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate

Types = Mapping[str, tuple[str, tuple[int, ...]]]
T, X, A = ("float32", (5, 7)), ("float32", (40, 7)), ("int32", (40,))
REPEATED: dict[str, tuple[str, Types]] = {
    "rows": ("t[a[i], j] =. x[i, j]", {"t": T, "a": A, "x": X}),
    "columns": ("t[j, a[i]] =. x[i, j]", {"t": ("float32", (7, 5)), "a": A, "x": X}),
    "elements": ("t[a[i]] =. x[i]", {"t": ("int8", (5,)), "a": A, "x": ("int8", (40,))}),
    "halves": ("t[a[i], j] =. x[i, j]", {"t": ("float16", (5, 7)), "a": A, "x": ("float16", (40, 7))}),
    "by arithmetic": ("t[i % 3] =. x[i]", {"t": ("float32", (5,)), "x": ("float32", (40,))}),
    "equal sums": ("t[i + j] =. x[i, j]", {"t": ("float32", (46,)), "x": X}),
    "a dimension that nothing writes twice, and one": (
        "t[i, a[k]] =. x[i, k]", {"t": ("float32", (3, 5)), "a": A, "x": ("float32", (3, 40))}
    ),
    "an axis that is no index": ("t[a[i]] =. x[i, j]", {"t": ("float32", (5,)), "a": A, "x": X}),
    "a scalar": ("t[] =. x[i, j]", {"t": ("float32", ()), "x": X}),
    "two indices": (
        "t[a[i, 0], a[i, 1], j] =. x[i, j]",
        {"t": ("float32", (2, 3, 7)), "a": ("int32", (40, 2)), "x": X},
    ),
    "one axis in two indices": (
        "t[a[i, j], j] =. x[i, j]", {"t": T, "a": ("int32", (40, 7)), "x": X}
    ),
    "a condition of the row": ("t[a[i], j] =. x[i, j].when([a[i] > 0])", {"t": T, "a": A, "x": X}),
    "a condition of the element": ("t[a[i], j] =. x[i, j].when([x[i, j] > 0])", {"t": T, "a": A, "x": X}),
    "a condition without a read": ("t[a[i], j] =. x[i, j].when([a[i] < 3, a[i] >= 0])", {"t": T, "a": A, "x": X}),
    "one after another": (
        "t[a[i], j] =. x[i, j]; t[b[i], j] =. x[i, j] * 2; y[r, j] = t[r, j] + 1", {"t": T, "a": A, "b": A, "x": X}
    ),
    "a few rows": ("t[a[i], j] =. x[i, j]", {"t": T, "a": ("int32", (12,)), "x": ("float32", (12, 7))}),
    "a few elements": ("t[a[i]] =. x[i]", {"t": ("float32", (5,)), "a": ("int32", (30,)), "x": ("float32", (30,))}),
    "few repetitions of many elements": (
        "t[a[k], i] =. x[i, k]", {"t": ("float32", (5, 700)), "a": ("int32", (9,)), "x": ("float32", (700, 9))}
    ),
    "a promise that cannot hold": ("t[a[i], j] = x[i, j]", {"t": T, "a": A, "x": X}),
}  # fmt: skip
ONCE: dict[str, tuple[str, Types]] = {
    "a promise": ("t[a[i], j] = x[i, j]", {"t": ("float32", (50, 7)), "a": A, "x": X}),
    "a stride": ("t[2 * i + 1, j] =. x[i, j]", {"t": ("float32", (80, 7)), "x": X}),
    "digits of a number": ("t[7 * i + j] =. x[i, j]", {"t": ("float32", (280,)), "x": X}),
    "reversed": ("t[39 - i, j] =. x[i, j]", {"t": ("float32", (40, 7)), "x": X}),
    "one axis by the other's index": ("t[i + j, j] =. x[i, j]", {"t": ("float32", (46, 7)), "x": X}),
    "an index beside enough others": (
        "t[i, j, a[i]] =. x[i, j]", {"t": ("float32", (40, 7, 5)), "a": A, "x": X}
    ),
}  # fmt: skip


def program_of(expression: str, types: Types, donated: tuple[str, ...] = ()) -> TensorProgram:
    program = parse(expression, {name: TensorType(DType(d), shape) for name, (d, shape) in types.items()})
    return donate_targets(program, list(donated)) if donated else program


def emulate(program: TensorProgram, target: str, *, races: bool = False) -> EmulatorModule:
    hw = hardware.load(target)
    groups, ranked, _ = rank_best_partition(program, hw, 1)
    source = emit_plan(best_plans(ranked, 1)[0], program, groups, hw)
    return load_emulated(CompiledKernel(source, b"", "", ()), 1, races=races)


def drawn(program: TensorProgram, types: Types, seed: int = 1) -> dict[str, np.ndarray[Any, Any]]:
    """Return inputs whose indices repeat."""
    least = min((extent for extent in dict(program.inputs)["t"].shape if extent != 7), default=1)
    arrays = random_inputs(program, seed)
    rng = np.random.default_rng(seed)
    indices = {name: rng.integers(0, least, types[name][1]).astype(np.int32) for name in ("a", "b") if name in types}
    return arrays | indices


@pytest.mark.emulator
@pytest.mark.parametrize("target", ["nvidia-h200-sxm", "amd-mi250x"])
@pytest.mark.parametrize("name", REPEATED)
def test_the_last_write_wins(name: str, target: str) -> None:
    expression, types = REPEATED[name]
    program = program_of(expression, types)
    arrays = drawn(program, types)
    result = emulate(program, target, races=target == "nvidia-h200-sxm").run(arrays)
    agreement = agrees(program, result, evaluate(program, arrays))
    assert agreement.ok, agreement.detail


@pytest.mark.emulator
def test_the_last_write_to_a_donated_target_wins() -> None:
    expression, types = REPEATED["rows"]
    program = program_of(expression, types, ("t",))
    arrays = drawn(program, types)
    expected = evaluate(program, arrays)
    agreement = agrees(program, emulate(program, "nvidia-h200-sxm", races=True).run(arrays), expected)
    assert agreement.ok, agreement.detail


@pytest.mark.emulator
def test_an_index_out_of_range_names_the_target_and_its_dimension() -> None:
    expression, types = REPEATED["columns"]
    program = program_of(expression, types)
    arrays = drawn(program, types) | {"a": np.full(40, 5, np.int32)}
    with pytest.raises(IndexRangeError, match=r"index 5 is outside dimension 1 \(axis i\) of t, which has extent 5"):
        emulate(program, "nvidia-h200-sxm").run(arrays)


@pytest.mark.parametrize("name", REPEATED)
def test_what_may_repeat_often_has_writers(name: str) -> None:
    statements = program_of(*REPEATED[name]).statements
    ordered = order_scatters(statements)
    scatters = [s for s in statements if s.target is not None]
    assert len(ordered) - len(statements) == (0 if "few" in name else len(scatters))
    assert all(bool(ordered_axes(s)) is (s.target is not None) for s in statements)


@pytest.mark.parametrize("name", ONCE)
def test_what_cannot_repeat_stays_one_scatter(name: str) -> None:
    statements = program_of(*ONCE[name]).statements
    assert order_scatters(statements) == statements
    assert [ordered_axes(s) for s in statements] == [()]


def test_rows_share_one_writer() -> None:
    writer, _ = order_scatters(program_of(*REPEATED["rows"]).statements)
    assert writer.type == TensorType(DType.INT32, (5, 1))
    assert writer.points == 40


def test_a_condition_of_the_element_has_a_writer_for_each() -> None:
    writer, _ = order_scatters(program_of(*REPEATED["a condition of the element"]).statements)
    assert writer.type == TensorType(DType.INT32, (5, 7))


def test_positions_of_many_points_are_int64() -> None:
    types: Types = {"t": ("float32", (5,)), "a": ("int32", (1 << 16, 1 << 16)), "x": ("float32", (1 << 16, 1 << 16))}
    writer, _ = order_scatters(program_of("t[a[i, j]] =. x[i, j]", types).statements)
    assert writer.type.dtype is writer.body.dtype is DType.INT64
