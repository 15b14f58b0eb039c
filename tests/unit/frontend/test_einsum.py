"""einsum against numpy: the same equations are accepted, with the same results."""

from __future__ import annotations

import numpy as np
import pytest

from roller_svc.errors import InputError
from roller_svc.frontend.lang import einsum, parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import StatementKind, TensorType
from roller_svc.semantics.interpreter import reference

EQUATIONS = [
    ("mk,kn->mn", [(3, 4), (4, 5)]),
    ("mk,kn", [(3, 4), (4, 5)]),
    ("ij->ji", [(3, 4)]),
    ("ba", [(3, 4)]),
    ("ii", [(4, 4)]),
    ("ii->i", [(4, 4)]),
    ("ij->", [(3, 4)]),
    ("ij->j", [(3, 4)]),
    ("i,j->ij", [(3,), (4,)]),
    ("i,i", [(3,), (3,)]),
    (",ij", [(), (3, 4)]),
    ("->", [()]),
    ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)]),
    ("bij,bjk->bik", [(2, 3, 4), (2, 4, 5)]),
    ("aab,bc->c", [(3, 3, 4), (4, 2)]),
    ("...ij,...jk->...ik", [(2, 3, 4), (2, 4, 5)]),
    ("...ij,...jk", [(6, 2, 3, 4), (2, 4, 5)]),
    ("...ij,...jk->...ik", [(1, 3, 4), (2, 4, 5)]),
    ("...ij,jk->...ik", [(6, 2, 3, 4), (4, 5)]),
    ("i...->...", [(3, 4, 5)]),
    ("i...", [(3, 4, 5)]),
    ("...i->i...", [(3, 4, 5)]),
    ("...", [(3, 4)]),
    ("...,...", [(3, 4), (4,)]),
    ("ij,jk->ik", [(3, 1), (4, 5)]),
    ("ij,ij->ij", [(3, 1), (1, 4)]),
    ("Aa,aA->A", [(3, 4), (4, 3)]),
    (" ij , jk -> ik ", [(3, 4), (4, 5)]),
    ("ijk,ikl,il->jl", [(2, 3, 4), (2, 4, 3), (2, 3)]),
]


def types(shapes: list[tuple[int, ...]]) -> dict[str, TensorType]:
    return {f"x{i}": TensorType(DType.FLOAT64, shape) for i, shape in enumerate(shapes)}


@pytest.mark.parametrize(("equation", "shapes"), EQUATIONS)
def test_numbers_are_numpys(equation: str, shapes: list[tuple[int, ...]]) -> None:
    rng = np.random.default_rng(1)
    arrays = {name: rng.uniform(-1, 1, t.shape) for name, t in types(shapes).items()}
    expected = np.einsum(equation, *arrays.values())
    for text in (f'einsum("{equation}")', f"einsum('{equation}');", einsum(equation, types(shapes))):
        program = parse(text, types(shapes))
        (output,) = program.outputs
        found = reference(program, arrays)[output.name]
        assert output.name == "output0"
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_nothing_reduced_is_a_map() -> None:
    assert parse('einsum("ij->ji")', types([(3, 4)])).statements[0].kind is StatementKind.MAP
    assert parse('einsum("ij->i")', types([(3, 4)])).statements[0].kind is StatementKind.REDUCE


def test_names_do_not_collide() -> None:
    inputs = {"output0": TensorType(DType.FLOAT32, (3, 4)), "i": TensorType(DType.FLOAT32, (4, 5))}
    program = parse('einsum("ij,jk->ik")', inputs)
    assert program.outputs[0].name == "output1"
    assert {a.name for a in program.statements[0].axes} == {"i_", "j", "k"}


def test_operands_and_output_may_be_named() -> None:
    inputs = types([(3, 4), (4, 5)])
    program = parse('C = einsum("ij,jk->ki", x0, x1)', inputs)
    assert (program.outputs[0].name, program.types["C"].shape) == ("C", (5, 3))
    assert parse('einsum("ij->j", x1)', inputs).types["output0"].shape == (5,)


@pytest.mark.parametrize(
    ("equation", "shapes", "code"),
    [
        ("ij,jk->ik", [(3, 4), (5, 6)], "extent-conflict"),
        ("ij->ik", [(3, 4)], "free-axis"),
        ("ij->ii", [(3, 4)], "duplicate-axis"),
        ("ijk->i", [(3, 4)], "wrong-rank"),
        ("ij", [(3, 4, 5)], "wrong-rank"),
        ("ij,jk", [(3, 4)], "bad-einsum"),
        ("i1->i", [(3, 4)], "bad-einsum"),
        ("i...j...->i", [(3, 4)], "bad-einsum"),
        ("i.j->i", [(3, 4)], "bad-einsum"),
        ("...i->i", [(3, 4)], "bad-einsum"),
        ("i->i...", [(3,)], "bad-einsum"),
        ("ij->i->j", [(3, 4)], "bad-einsum"),
        ("ii", [(3, 4)], "extent-conflict"),
        ("ï->ï", [(3,)], "bad-einsum"),
    ],
)
def test_invalid_cases_are_rejected(equation: str, shapes: list[tuple[int, ...]], code: str) -> None:
    text = f'einsum("{equation}")'
    with pytest.raises(InputError) as caught:
        parse(text, types(shapes))
    assert (caught.value.code, caught.value.line) == (code, 1)
    assert 9 <= (caught.value.column or 0) <= len(text)
    with pytest.raises(InputError):
        einsum(equation, types(shapes))


@pytest.mark.parametrize("text", ["einsum(", "einsum()", "einsum('ij', q)", "einsum('ij') + 1", 'einsum("ij->ji'])
def test_malformed_calls(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(text, types([(3, 4)]))
    assert caught.value.column is not None
