"""Names, types, shapes and outputs: what the checker infers and what it rejects."""

from __future__ import annotations

import pytest

from roller_svc.errors import ArgumentError, ExprTypeError, InputError, ShapeError
from roller_svc.frontend.lang import parse
from roller_svc.ir.canonical import from_json, to_json
from roller_svc.ir.dtype import DType, dtype_named
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, Select, iter_subexpressions
from roller_svc.ir.program import Combine, Output, StatementKind, TensorProgram, TensorType

F64, F32, F16, BF16, F8 = DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT8_E4M3FN
I64, I32, I16, I8, U8, BOOL = DType.INT64, DType.INT32, DType.INT16, DType.INT8, DType.UINT8, DType.BOOL
SHORT = {
    "d": F64, "f": F32, "h": F16, "g": BF16, "q": F8,
    "l": I64, "i": I32, "t": I16, "b": I8, "u": U8, "z": BOOL, "w": DType.UINT32,
}  # fmt: skip
INPUTS = {name: TensorType(dtype, (4,)) for name, dtype in SHORT.items()} | {
    "A": TensorType(F32, (4, 5)),
    "B": TensorType(F32, (5, 6)),
    "s": TensorType(F32, ()),
}


def program(text: str, outputs: list[str] | None = None) -> TensorProgram:
    return parse(text, INPUTS, outputs)


def body(text: str) -> Expr:
    return program(f"y[n] = {text} where n in 4").statements[0].body


def refused(text: str) -> InputError:
    with pytest.raises(InputError) as caught:
        parse(text, INPUTS)
    return caught.value


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("1", "int32"),
        ("1.5", "float32"),
        ("n", "int32"),
        ("n.val()", "int32"),
        ("h[n] + 1", "float16"),
        ("h[n] * 1.5", "float16"),
        ("b[n] + 1", "int8"),
        ("b[n] + 1.5", "float32"),
        ("l[n] * 0.5", "float32"),
        ("1 / 2.0", "float32"),
        ("h[n] * (1.0 / 3.0)", "float32"),  # two numbers make a strong float32
        ("h[n] * const(1.5)", "float16"),
        ("h[n] * const(1.5, `float32`)", "float32"),
        ("h[n] * const(-1.5)", "float16"),
        ("h[n] + n", "float16"),
        ("f[n] + d[n]", "float64"),
        ("h[n] + g[n]", "bfloat16"),
        ("q[n] + h[n]", "float16"),
        ("b[n] + i[n]", "int32"),
        ("u[n] + b[n]", "int8"),
        ("z[n] + u[n]", "uint8"),
        ("i[n] / 2", "int32"),
        ("i[n] / 2.0", "float32"),
        ("f[n] > 1", "int8"),
        ("z[n] & f[n]", "int8"),
        ("~z[n]", "int8"),
        ("isnan(h[n])", "int8"),
        ("exp(i[n])", "float32"),
        ("exp(h[n])", "float16"),
        ("exp(1)", "float32"),
        ("abs(i[n])", "int32"),
        ("round(i[n])", "float32"),
        ("floor(h[n])", "int32"),
        ("ceil(l[n])", "int32"),
        ("rfloor(h[n])", "float16"),
        ("max(h[n], 0)", "float16"),
        ("max(i[n], 0.5)", "float32"),
        ("max(i[n], l[n], 2)", "int64"),
        ("pow(i[n], 2)", "int32"),
        ("i[n] ** 0.5", "float32"),
        ("hypot(i[n], i[n])", "float32"),
        ("remainder(h[n])", "float16"),
        ("remainder(i[n], 3)", "int32"),
        ("fma(h[n], h[n], f[n])", "float32"),
        ("clip(h[n], -1, 1)", "float16"),
        ("i[n] << 1", "int32"),
        ("bitwise_and(u[n], 15)", "uint8"),
        ("trunc_div(i[n], 2)", "int32"),
        ("i[n].call(`exp`, dtype=`float16`)", "float16"),
        ("h[n].when([n > 1], 0)", "float16"),
        ("const(1.0).when([n > 1], 0)", "float32"),
        ("const(1).when([n > 1], 0.5)", "float32"),
        ("h[n].when([n > 1], f[n])", "float32"),
        ("h[n].like(1)", "float16"),
        ("const(0, dtype=h.dtype())", "float16"),
        ("f[n].cast(h[n].dtype())", "float16"),
        ("b[n].up_cast()", "int32"),
        ("float8_e5m2(f[n])", "float8_e5m2"),
        ("f[n].to(`fp64`)", "float64"),
    ],
)
def test_types(text: str, dtype: str) -> None:
    assert body(text).dtype is dtype_named(dtype)
    assert program(f"y[n] = {text} where n in 4").statements[0].type.dtype is dtype_named(dtype)


@pytest.mark.parametrize("text", ["h[n] + i[n] * 0.5", "max(b[n], l[n], 3)", "u[n] < b[n]", "where(f[n], h[n], 1)"])
def test_operands_of_an_operation_have_one_type(text: str) -> None:
    for node in iter_subexpressions(body(text)):
        if isinstance(node, Op) and node.kind not in (OpKind.LAND, OpKind.LOR):
            assert len({arg.dtype for arg in node.args}) == 1
        if isinstance(node, Select):
            assert node.then.dtype is node.otherwise.dtype is node.dtype
        if isinstance(node, Const):
            assert isinstance(node.value, float) is node.dtype.is_float


def test_conversions_are_explicit_and_marked() -> None:
    n = AxisRef("n")
    load = Load("i", (n,), I32, (False,))
    assert body("i[n] + f[n]") == Op(OpKind.ADD, (Cast(load, F32, implicit=True), Load("f", (n,), F32, (False,))), F32)
    assert body("exp(i[n])") == Op(OpKind.EXP, (Cast(load, F32, implicit=True),), F32)
    assert body("i[n].cast(`float32`)") == Cast(load, F32)
    assert body("i[n].cast(`int32`)") == load
    assert body("const(1.5, `float16`)") == Cast(Const(1.5, F32), F16)
    assert body("extent(n)") == Cast(Const(4, I32), I32)


@pytest.mark.parametrize("name", ["inf", "-inf"])
def test_infinities_are_named(name: str) -> None:
    found = body(f"where(f[n] > 0, f[n], const(`{name}`))")
    assert isinstance(found, Select)
    assert found.otherwise == Const(float(name), F32)
    assert body(f"const(`{name}`, `float16`)") == Cast(Const(float(name), F32), F16)
    assert body(f"z[n] + const(`{name}`)").dtype is body("z[n] + 0.5").dtype
    assert from_json(Const, to_json(Const(float(name), F32))) == Const(float(name), F32)


def test_mixed_signs_compare_in_a_type_that_holds_both_and_conditions_are_truth_values() -> None:
    found = body("u[n] < b[n]")
    assert isinstance(found, Op)
    assert [arg.dtype for arg in found.args] == [I32, I32]
    chosen = body("f[n].when([i[n], z[n] > 0], 0)")
    assert isinstance(chosen, Select)
    assert isinstance(chosen.cond, Op)
    assert chosen.cond.kind is OpKind.LAND
    assert all(arg.dtype is I8 for arg in chosen.cond.args)


def test_remainder_of_one_argument() -> None:
    x = Load("f", (AxisRef("n"),), F32, (False,))
    assert body("remainder(f[n])") == Op(OpKind.SUB, (x, Op(OpKind.RFLOOR, (x,), F32)), F32)


def test_a_statement_may_state_its_type() -> None:
    (statement,) = program("y[]: int32 +=! b[n]").statements
    assert statement.type.dtype is I32
    assert statement.body.dtype is I8


def test_a_number_alone_is_of_the_type_that_it_is_stored_in() -> None:
    assert program("y[n]: float64 = 0.1 where n in 4").statements[0].body == Const(0.1, F64)
    assert program("y[n]: int64 = 5000000000 where n in 4").statements[0].body == Const(5000000000, I64)
    assert program("h[i[n]] = 1").statements[0].body == Const(1.0, F16)
    assert program("i[n] =. 1.5 where n in 4").statements[0].body == Const(1.5, F32)


def test_where_may_take_a_part_of_a_dimension() -> None:
    (statement,) = program("y[m] +=! A[m, k] where k in 2, m in 2 + 1").statements
    assert statement.extents == {"m": 3, "k": 2}
    assert program("y[n] = f[n] where n in f.size(0)").statements[0].type.shape == (4,)


def test_an_index_in_like_gives_an_extent_and_reads_nothing() -> None:
    (statement,) = program("y[n] = f[n].like(1)").statements
    assert statement.extents == {"n": 4}
    assert statement.reads == ()
    assert program("y[n] = const(0, f[n + 9].dtype()) where n in 4").statements[0].reads == ()


def test_outputs_are_names_written_and_never_read() -> None:
    text = "m[n] = f[n]; y[n] = m[n]; z2[n] = m[n]"
    assert [o.name for o in program(text).outputs] == ["y", "z2"]
    assert [o.name for o in program(text, ["z2", "m"]).outputs] == ["z2", "m"]


@pytest.mark.parametrize("names", [["nothing"], ["f"], [], ["y", "f"]])
def test_outputs_that_are_none(names: list[str]) -> None:
    with pytest.raises(ArgumentError) as caught:
        program("y[n] = f[n]", names)
    assert caught.value.code == "unknown-output"


def test_a_scatter_makes_a_new_version_of_its_target() -> None:
    found = program("f[i[n]] +=. h[n].when([n > 0]); y[n] = f[n]; f[l[n]] = 0", ["f", "y"])
    first, reads, second = found.statements
    assert (first.kind, first.combine, first.target) == (StatementKind.SCATTER, Combine.SUM, "f")
    assert (first.name, first.output, first.bounds_checked, first.type) == ("f", "f__1", (True,), TensorType(F32, (4,)))
    assert isinstance(first.predicate, Op)
    assert first.body.dtype is F16
    assert [load.tensor for load in reads.reads] == ["f__1"]
    assert (second.target, second.output, second.predicate) == ("f__1", "f__2", None)
    assert found.outputs == (Output("f", "f__2"), Output("y", "y"))


def test_a_version_takes_no_name_of_the_program() -> None:
    assert program("f__1[n] = h[n]; f[i[n]] =. f__1[n]").statements[1].output == "f__2"


def test_a_written_tensor_may_be_scattered_into() -> None:
    found = program("m[n] = 0.0 where n in 9; m[i[n]] +=. f[n]")
    assert [o.tensor for o in found.outputs] == ["m__1"]


def test_in_range_indices_from_data_are_not_checked() -> None:
    assert not program("y[n] = f[max(min(i[n], 3), 0)]").has_runtime_checks
    assert not program("y[n] = f[i[n] % 4]").has_runtime_checks
    assert program("y[n] = f[i[n] % 5]").has_runtime_checks


@pytest.mark.parametrize(
    ("text", "code", "column"),
    [
        ("y[n] = ff[n]", "unknown-name", 8),
        ("y[n] = f + 1", "tensor-without-index", 8),
        ("y[n] = A[n]", "wrong-rank", 8),
        ("y[n] = f[]", "wrong-rank", 8),
        ("y[n] = s[n]", "wrong-rank", 8),
        ("y[n, n] = f[n]", "duplicate-axis", 6),
        ("y[n] = A[n, k]", "free-axis", 13),
        ("y[n] = f[n] where n in 4, k in 2", "free-axis", 27),
        ("y[n, m] = f[n]", "axis-without-extent", 6),
        ("y[n] = f[n + 0]", "axis-without-extent", 3),
        ("y[n] = f[n] + B[n, 0]", "extent-conflict", 15),
        ("y[n] = f[n] where n in 0", "bad-extent", 24),
        ("y[n] = f[n] where n in 4.0", "bad-extent", 24),
        ("y[n] = f[n] where n in four", "bad-extent", 24),
        ("y[n] = f[n] where n in 4, n in 4", "duplicate-axis", 27),
        ("y[n] = y[n]", "read-before-write", 8),
        ("y[n] = t2[n]; t2[n] = f[n]", "read-before-write", 8),
        ("y[n] = f[n]; y[n] = f[n]", "written-twice", 14),
        ("f[n] = h[n]", "input-written", 1),
        ("y[n + 1] = f[n]", "scatter-target", 1),
        ("y[i[n]] =. f[n]", "scatter-target", 1),
        ("f[i[n]] &= h[n]", "unknown-reduction", 1),
        ("y[n] = f[f[n]]", "index-not-integer", 10),
        ("y[n] = f[i[n] / 2.0]", "index-not-integer", 10),
        ("y[n] = f[n / i[n]] where n in 4", "index-divisor", 10),
        ("y[n] = f[n % -3] where n in 4", "index-divisor", 10),
        ("y[n] = f[n] // 2", "float-floor-division", 8),
        ("y[n] = bitwise_and(f[n], 1)", "type-error", 8),
        ("y[n] = f[n] << 1", "type-error", 8),
        ("y[n] = f[n] + f[n].dtype()", "type-error", 15),
        ("y[n] = i[n] / 0", "division-by-zero", 15),
        ("y[n] = i[n] % (2 - 2)", "division-by-zero", 15),
        ("y[n] = trunc_div(i[n], 0)", "division-by-zero", 24),
        ("y[n] = f[n] / 0", "division-by-zero", 15),
        ("y[n] = b[n] + 128", "literal-out-of-range", 15),
        ("y[n] = u[n] + -1", "literal-out-of-range", 15),
        ("y[n] = h[n] * 1e5", "literal-out-of-range", 15),
        ("y[n] = i[n] + 2147483648", "literal-out-of-range", 15),
        ("y[n] = const(300, `int8`) + b[n]", "literal-out-of-range", 14),
        ("y[n] = const(`inf`, `int8`) + b[n]", "literal-out-of-range", 14),
        ("y[n] = const(`inf`, `float8_e5m2`) * f[n]", "literal-out-of-range", 14),
        ("y[n] = const(`nan`) * f[n]", "type-error", 14),
        ("y[n] = `inf` * f[n]", "syntax-error", 8),
        ("y[n] = f[n].when([n > 1])", "missing-else", 8),
        ("y[n] = f.val(1) * f[n]", "wrong-arguments", 8),
        ("y[n] = extent(f) * f[n]", "tensor-without-index", 8),
        ("y[a, c] = 1.0 where a in 16777216, c in 16777217", "too-large", 1),
    ],
)
def test_errors_have_their_position(text: str, code: str, column: int) -> None:
    error = refused(text)
    assert (error.code, error.line, error.column) == (code, 1, column)


@pytest.mark.parametrize(("guard", "is_scan"), [("o <= j", True), ("o <= 2 * j", False)])
def test_a_scan_has_as_many_points_as_results(guard: str, is_scan: bool) -> None:
    text = f"y[j] +=! v[o].when([{guard}], 0.0) where j in {1 << 26}"
    inputs = {"v": TensorType(F32, (1 << 26,))}
    if is_scan:
        assert parse(text, inputs).statements[0].combine is Combine.SUM
        return
    with pytest.raises(ShapeError) as error:
        parse(text, inputs)
    assert error.value.code == "too-large"


def test_numbers_just_inside_their_type() -> None:
    for text in (
        "b[n] + 127",
        "b[n] - -128",
        "u[n] + 255",
        "h[n] * 65504",
        "l[n] + 9223372036854775807",
        "f[n] * 3e38",
    ):
        body(text)


def test_more_dimensions_than_16() -> None:
    names = ", ".join(f"a{i}" for i in range(17))
    where = ", ".join(f"a{i} in 1" for i in range(17))
    assert refused(f"y[{names}] = 1.0 where {where}").code == "too-many-dimensions"
    with pytest.raises(ShapeError):
        parse("y[] = 1.0", {"x": TensorType(F32, (1,) * 17)})


@pytest.mark.parametrize("shape", [(0,), (-1,), (2**30, 2**30), (4, 0)])
def test_shapes_of_inputs(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError):
        parse("y[] = 1.0", {"x": TensorType(F32, shape)})


@pytest.mark.parametrize("name", ["", "1x", "a b", "é", "where", "in", "x;y"])
def test_names_of_inputs(name: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse("y[] = 1.0", {name: TensorType(F32, (4,))})
    assert caught.value.code == "bad-name"


def test_errors_name_the_nearest_tensor_or_what_there_is() -> None:
    inputs = {"weights": TensorType(F32, (4,)), "bias": TensorType(F32, (4,))}
    with pytest.raises(ExprTypeError) as caught:
        parse("y[n] = weihgts[n]", inputs)
    assert caught.value.hint == "did you mean `weights`?"
    with pytest.raises(ExprTypeError) as caught:
        parse("y[n] = zzzzzz[n]", inputs)
    assert caught.value.hint == 'tensors: bias, weights; or declare an input: inputs={"zzzzzz": ("float32", (64, 64))}'


@pytest.mark.parametrize(
    ("code", "is_checked"),
    [
        ("bitwise_and(i[n], 3)", False),
        ("u[n] % 4", False),
        ("clip(i[n], 0, 3)", False),
        ("bitwise_and(i[n], 3).cast(`int8`)", False),
        ("bitwise_and(i[n], 7)", True),
        ("i[n] % 4 - 1", True),
        ("bitwise_and(i[n], 3) + 2147483646 + 2147483646", True),
        ("f[n].cast(`int32`)", True),
    ],
)
def test_index_from_an_earlier_statement_is_checked_unless_its_arithmetic_bounds_it(code: str, is_checked: bool) -> None:
    found = program(f"c[n] = {code}; y[n] = f[c[n]]", ["y"])
    (load,) = (load for load in found.statements[1].reads if load.tensor == "f")
    assert load.bounds_checked == (is_checked,)
