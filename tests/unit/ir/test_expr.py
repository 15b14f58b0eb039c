"""Axes and loads of expressions, which a node remembers, against walks over all nodes."""

import copy
import pickle
from dataclasses import replace

import pytest

from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Load, Op, OpKind, Select, axes_of, iter_subexpressions, loads_of, substitute

F32, I32 = DType.FLOAT32, DType.INT32
TABLE = Load("T", (AxisRef("i"),), I32)
SUM = Op(OpKind.ADD, (Load("A", (AxisRef("m"), TABLE), F32), Cast(Load("B", (AxisRef("k"),), DType.INT8), F32)), F32)
EXPRESSIONS = (Const(1.0, F32), AxisRef("m"), TABLE, SUM, Select(Op(OpKind.LT, (AxisRef("k"), Const(3, I32)), I32), SUM, SUM, F32))


def check(expr):
    nodes = list(iter_subexpressions(expr))
    assert axes_of(expr) == {node.name for node in nodes if isinstance(node, AxisRef)}
    assert loads_of(expr) == tuple(node for node in nodes if isinstance(node, Load))


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_axes_and_loads_equal_those_of_all_nodes(expr):
    for _ in range(2):
        check(expr)


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_copies_and_pickles_are_equal_and_have_the_same_axes_and_loads(expr):
    check(expr)
    for other in (copy.copy(expr), copy.deepcopy(expr), pickle.loads(pickle.dumps(expr))):
        assert other == expr
        assert hash(other) == hash(expr)
        check(other)


def test_changed_node_does_not_remember_what_it_was_made_of():
    check(SUM)
    for changed in (
        replace(SUM, args=(SUM.args[1], Const(0.0, F32))),
        replace(TABLE, tensor="U", index=(AxisRef("j"),)),
        substitute(SUM, {"m": AxisRef("n")}),
    ):
        check(changed)
    assert axes_of(substitute(SUM, {"m": AxisRef("n")})) == {"n", "i", "k"}


def test_zeros_of_either_sign_are_two_numbers():
    zero, negative = Const(0.0, F32), Const(-0.0, F32)
    assert zero == Const(0.0, F32) != negative == Const(-0.0, F32)
    assert len({zero, negative, Const(0.0, F32), Const(0.0, DType.FLOAT64), Const(0, I32)}) == 4
    assert Op(OpKind.MUL, (SUM, zero), F32) != Op(OpKind.MUL, (SUM, negative), F32)
    nan = Const(float("nan"), F32)
    assert replace(nan) == nan
    assert zero != 0.0
