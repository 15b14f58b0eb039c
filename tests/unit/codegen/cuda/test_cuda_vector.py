"""Vector loops of CUDA trees: which accesses become wide, and that the numbers are those of the loop."""

from __future__ import annotations

import re
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from reference_kernels import tensor

from roller_svc import hardware
from roller_svc.analysis.congruences import Congruence, LaneStrideAnalysis, congruence, is_multiple
from roller_svc.codegen.kernel import GroupLaunches, emit
from roller_svc.compiler.backends import load_emulated
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Const, Expr, Load, Op, OpKind, Select
from roller_svc.ir.index import add, div, le, logical_and, lt, mod, mul, num, ref
from roller_svc.ir.kernel import Buffer, CompiledKernel, KernelSource, Role
from roller_svc.ir.program import Combine, TensorType
from roller_svc.ir.schedule import Barrier, Compute, Let, Loop, LoopKind, Node, ScheduleTree, Scope, Storage
from roller_svc.toolchain import ptx

A100 = hardware.load("nvidia-a100-sxm-80gb")
F32, F16, I8 = DType.FLOAT32, DType.FLOAT16, DType.INT8
NUMPY = {F32: np.float32, F16: np.float16, I8: np.int8, DType.INT32: np.int32, DType.FLOAT64: np.float64,
         DType.BFLOAT16: ml_dtypes.bfloat16}  # fmt: skip
RNG = np.random.default_rng(11)
THREADS = 4


def source(nodes: tuple[Node, ...], inputs: dict[str, TensorType], outputs: dict[str, TensorType]) -> KernelSource:
    """One launch of one block of THREADS threads, the variable `t`."""
    tree = ScheduleTree("kernel", (Loop("t", THREADS, LoopKind.THREAD, nodes),))
    buffers: dict[str, Buffer] = {}
    for role, types in ((Role.INPUT, inputs), (Role.OUTPUT, outputs)):
        buffers |= {n: tensor(n, n.lower(), role, type_.dtype, type_.shape) for n, type_ in types.items()}
    return emit("kernel", (GroupLaunches((tree,), (*inputs.items(), *outputs.items())),), buffers, A100, "")


def result(kernel: KernelSource, **arrays: np.ndarray) -> np.ndarray:
    found = load_emulated(CompiledKernel(kernel, b"", "", ()), 0).run(arrays)
    return next(iter(found.values()))


def vector(width: int, *nodes: Node) -> Loop:
    return Loop("v", width, LoopKind.VECTOR, nodes)


def values(dtype: DType, *shape: int) -> np.ndarray:
    if not dtype.is_float:
        return RNG.integers(-100, 100, shape).astype(NUMPY[dtype])
    return RNG.standard_normal(shape).astype(NUMPY[dtype])


def wide(text: str) -> list[str]:
    """The accesses of memory that are wide: 'load uint4 of x'."""
    found = []
    for line in text.splitlines():
        if match := re.search(r"\*\((\w+(?: \w+)?) \*\)&(\w+)\[.* = \*\(const .* \*\)&(\w+)\[", line):
            store = "wide" not in match[2]
            found.append(f"{'store' if store else 'load'} {match[1]} of {match[2] if store else match[3]}")
    return found


def at(width: int) -> Expr:
    return add(mul(ref("t"), num(width)), ref("v"))


def double(load: Load) -> Expr:
    return Op(OpKind.MUL, (load, Const(2.0 if load.dtype.is_float else 2, load.dtype)), load.dtype)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("dtype", "width", "word", "count"),
    [
        (F32, 4, "uint4", 1),
        (F32, 2, "uint2", 1),
        (F32, 8, "uint4", 2),
        (F32, 6, "uint2", 3),
        (F16, 8, "uint4", 1),
        (F16, 4, "uint2", 1),
        (F16, 2, "unsigned int", 1),
        (I8, 16, "uint4", 1),
        (I8, 2, "unsigned short", 1),
        (DType.FLOAT64, 2, "uint4", 1),
        (DType.BFLOAT16, 16, "uint4", 2),
        (F32, 3, "", 0),
        (I8, 3, "", 0),
    ],
)
def test_aligned_contiguous_elements_use_wide_accesses(dtype: DType, width: int, word: str, count: int) -> None:
    type_ = TensorType(dtype, (THREADS * width,))
    node = Compute("Y", (at(width),), double(Load("X", (at(width),), dtype)))
    kernel = source((vector(width, node),), {"X": type_}, {"Y": type_})
    assert wide(kernel.text) == [f"load {word} of x"] * count + [f"store {word} of y"] * count
    x = values(dtype, *type_.shape)
    np.testing.assert_array_equal(result(kernel, X=x), x * np.asarray(2, x.dtype))


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", [F32, F16, I8])
def test_a_copy_goes_straight_through(dtype: DType) -> None:
    width = 16 // dtype.bytes
    type_ = TensorType(dtype, (THREADS * width,))
    kernel = source((vector(width, Compute("Y", (at(width),), Load("X", (at(width),), dtype))),), {"X": type_}, {"Y": type_})
    assert wide(kernel.text) == ["load uint4 of x", "store uint4 of y"]
    assert "for (" not in kernel.text
    x = values(dtype, *type_.shape)
    np.testing.assert_array_equal(result(kernel, X=x), x)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (lambda: add(at(4), num(1)), []),  # no aligned place
        (lambda: add(at(4), num(2)), ["load uint2 of x"] * 2),
        (lambda: add(mul(ref("t"), num(4)), mul(ref("v"), num(2))), []),  # no neighbours
        (lambda: div(at(4), 8), []),  # the same for all
        (lambda: mod(at(4), 8), ["load uint4 of x"]),
        (lambda: mod(at(4), 6), []),  # wraps
        (lambda: add(mul(div(at(4), 8), num(8)), mod(at(4), 8)), ["load uint4 of x"]),
    ],
)
def test_what_does_not_qualify_is_loaded_element_by_element(place: Callable[[], Expr], expected: list[str]) -> None:
    types = {"X": TensorType(F32, (32,))}
    node = Compute("Y", (at(4),), double(Load("X", (place(),), F32)))
    kernel = source((vector(4, node),), types, {"Y": TensorType(F32, (16,))})
    assert wide(kernel.text) == [*expected, "store uint4 of y"]
    x = values(F32, 32)
    index = [_number(place(), {"t": i // 4, "v": i % 4}) for i in range(16)]
    np.testing.assert_array_equal(result(kernel, X=x), x[index] * 2)


_VALUES: dict[OpKind, Callable[[int, int], int]] = {
    OpKind.ADD: lambda a, b: a + b, OpKind.MUL: lambda a, b: a * b, OpKind.MIN: min,
    OpKind.FLOORDIV: lambda a, b: a // b, OpKind.MOD: lambda a, b: a % b, OpKind.LT: lambda a, b: a < b,
    OpKind.LE: lambda a, b: a <= b, OpKind.GT: lambda a, b: a > b, OpKind.GE: lambda a, b: a >= b,
}  # fmt: skip


def _number(expr: Expr, variables: dict[str, int]) -> int:
    match expr:
        case Const(value=value):
            return int(value)
        case AxisRef(name=name):
            return variables[name]
        case Op(kind=kind, args=(x, y)):
            return int(_VALUES[kind](_number(x, variables), _number(y, variables)))
        case _:
            raise AssertionError(expr)


@pytest.mark.emulator
def test_what_lanes_share_is_loaded_once() -> None:
    types = {"X": TensorType(F32, (16,)), "B": TensorType(F32, (4,))}
    value = Op(OpKind.ADD, (Load("X", (at(4),), F32), Load("B", (div(at(4), 4),), F32)), F32)
    kernel = source((vector(4, Compute("Y", (at(4),), value)),), types, {"Y": TensorType(F32, (16,))})
    assert "const float B_once0 = b[" in kernel.text
    x, b = values(F32, 16), values(F32, 4)
    np.testing.assert_array_equal(result(kernel, X=x, B=b), x + np.repeat(b, 4))


@pytest.mark.emulator
def test_a_guard_that_lanes_share_stands_around_the_wide_load() -> None:
    """X has 8 elements of the 16: a speculated load would leave it."""
    value = Select(lt(ref("t"), num(2)), Load("X", (at(4),), F32), Const(0.0, F32), F32)
    kernel = source((vector(4, Compute("Y", (at(4),), value)),), {"X": TensorType(F32, (8,))}, {"Y": TensorType(F32, (16,))})
    assert wide(kernel.text) == ["load uint4 of x", "store uint4 of y"]
    assert "for (" not in kernel.text
    x = values(F32, 8)
    np.testing.assert_array_equal(result(kernel, X=x), np.concatenate([x, np.zeros(8)]))


@pytest.mark.emulator
def test_the_other_branch_of_a_shared_guard_is_guarded_too() -> None:
    value = Select(lt(ref("t"), num(2)), Load("X", (at(4),), F32), Load("Z", (add(at(4), num(-8)),), F32), F32)
    types = {"X": TensorType(F32, (8,)), "Z": TensorType(F32, (8,))}
    kernel = source((vector(4, Compute("Y", (at(4),), value)),), types, {"Y": TensorType(F32, (16,))})
    assert wide(kernel.text) == ["load uint4 of x", "load uint4 of z", "store uint4 of y"]
    x, z = values(F32, 8), values(F32, 8)
    np.testing.assert_array_equal(result(kernel, X=x, Z=z), np.concatenate([x, z]))


@pytest.mark.emulator
@pytest.mark.parametrize(("edge", "shared"), [(8, True), (6, False)])
def test_neighbours_are_on_one_side_of_an_aligned_edge(edge: int, *, shared: bool) -> None:
    """Y = X and behind it Z, as a concatenation reads them."""
    value = Select(lt(at(4), num(edge)), Load("X", (at(4),), F32), Load("Z", (add(at(4), num(-edge)),), F32), F32)
    types = {"X": TensorType(F32, (edge,)), "Z": TensorType(F32, (16 - edge,))}
    kernel = source((vector(4, Compute("Y", (at(4),), value)),), types, {"Y": TensorType(F32, (16,))})
    assert ("load uint4 of z" in wide(kernel.text)) == shared
    x, z = values(F32, edge), values(F32, 16 - edge)
    np.testing.assert_array_equal(result(kernel, X=x, Z=z), np.concatenate([x, z]))


@pytest.mark.emulator
def test_a_guard_that_lanes_do_not_share_stays_with_each() -> None:
    value = Select(lt(at(4), num(13)), Load("X", (at(4),), F32), Const(-1.0, F32), F32)
    kernel = source((vector(4, Compute("Y", (at(4),), value)),), {"X": TensorType(F32, (13,))}, {"Y": TensorType(F32, (16,))})
    assert wide(kernel.text) == ["store uint4 of y"]
    x = values(F32, 13)
    np.testing.assert_array_equal(result(kernel, X=x), np.concatenate([x, -np.ones(3)]))


@pytest.mark.emulator
def test_the_right_side_of_an_and_is_read_where_the_left_says_so() -> None:
    test = logical_and(le(num(0), add(at(4), num(-4))), lt(Load("X", (add(at(4), num(-4)),), F32), Const(0.0, F32)))
    assert test is not None
    value = Select(test, Const(1.0, F32), Const(0.0, F32), F32)
    kernel = source((vector(4, Compute("Y", (at(4),), value)),), {"X": TensorType(F32, (12,))}, {"Y": TensorType(F32, (16,))})
    x = values(F32, 12)
    np.testing.assert_array_equal(result(kernel, X=x), np.concatenate([np.zeros(4), x < 0]))


@pytest.mark.emulator
def test_statements_read_what_those_before_them_wrote() -> None:
    """Y[i] += X[i]; Z[i] = Y[i] * 2; all wide."""
    types = {n: TensorType(F32, (16,)) for n in "XYZ"}
    here = (at(4),)
    body = (
        Compute("Y", here, double(Load("X", here, F32))),
        Compute("Y", here, Load("X", here, F32), Combine.SUM),
        Compute("Z", here, double(Load("Y", here, F32))),
    )
    kernel = source((vector(4, *body),), {"X": types["X"]}, {"Z": types["Z"], "Y": types["Y"]})
    assert wide(kernel.text).count("load uint4 of x") == 1
    x = values(F32, 16)
    np.testing.assert_allclose(result(kernel, X=x), x * 6, rtol=1e-6)


@pytest.mark.emulator
def test_a_row_found_by_data_is_loaded_wide_once_it_is_known_to_exist() -> None:
    inputs = {"X": TensorType(F16, (5, 8)), "I": TensorType(DType.INT32, (THREADS,))}
    row = Load("I", (ref("t"),), DType.INT32)
    load = Load("X", (row, ref("v")), F16, (True, False))
    kernel = source((vector(8, Compute("Y", (ref("t"), ref("v")), load)),), inputs, {"Y": TensorType(F16, (THREADS, 8))})
    assert wide(kernel.text) == ["load uint4 of x", "store uint4 of y"]
    x, rows = values(F16, 5, 8), np.array([4, 0, 2, 2], np.int32)
    np.testing.assert_array_equal(result(kernel, X=x, I=rows), x[rows])


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize("swizzled", [False, True])
def test_shared_buffers_use_wide_accesses(dtype: DType, *, swizzled: bool) -> None:
    """Each thread writes a row of chunks and reads that of its neighbour."""
    chunk = 16 // dtype.bytes
    width = 2 * chunk
    type_ = TensorType(dtype, (THREADS, width))
    other = mod(add(ref("t"), num(1)), THREADS)
    nodes = (
        vector(width, Compute("s", (ref("t"), ref("v")), Load("X", (ref("t"), ref("v")), dtype))),
        Barrier(),
        vector(width, Compute("Y", (ref("t"), ref("v")), Load("s", (other, ref("v")), dtype))),
    )
    room = Storage("s", dtype, (THREADS, width), Scope.SHARED, nodes, pad=0 if swizzled else chunk, swizzled=swizzled)
    kernel = source((room,), {"X": type_}, {"Y": type_})
    assert (
        wide(kernel.text) == ["load uint4 of x"] * 2 + ["store uint4 of s"] * 2 + ["load uint4 of s"] * 2 + ["store uint4 of y"] * 2
    )
    x = values(dtype, THREADS, width)
    np.testing.assert_array_equal(result(kernel, X=x), np.roll(x, -1, axis=0))


@pytest.mark.emulator
def test_narrow_registers_use_whole_words() -> None:
    """X → registers → Y, two vectors a thread."""
    type_ = TensorType(F16, (2, THREADS * 8))
    load = vector(8, Compute("r", (ref("u"), ref("v")), Load("X", (ref("u"), at(8)), F16)))
    store = vector(8, Compute("Y", (ref("u"), at(8)), Load("r", (ref("u"), ref("v")), F16)))
    nodes = (Loop("u", 2, LoopKind.UNROLL, (load,)), Loop("u", 2, LoopKind.UNROLL, (store,)))
    kernel = source((Storage("r", F16, (2, 8), Scope.REGISTER, nodes),), {"X": type_}, {"Y": type_})
    assert wide(kernel.text) == ["load uint4 of x", "store uint4 of r", "load uint4 of r", "store uint4 of y"]
    x = values(F16, 2, THREADS * 8)
    np.testing.assert_array_equal(result(kernel, X=x), x)


@pytest.mark.emulator
def test_lets_inside_and_outside_of_the_loop_keep_their_alignment() -> None:
    node = Compute("Y", (ref("place"),), double(Load("X", (ref("row"), mod(ref("place"), 8)), F32)))
    inside = Let("place", add(ref("first"), ref("v")), (Let("row", div(ref("place"), 8), (node,)),))
    nodes = (Let("first", mul(ref("t"), num(4)), (vector(4, inside),)),)
    kernel = source(nodes, {"X": TensorType(F32, (2, 8))}, {"Y": TensorType(F32, (16,))})
    assert wide(kernel.text) == ["load uint4 of x", "store uint4 of y"]
    x = values(F32, 2, 8)
    np.testing.assert_array_equal(result(kernel, X=x), x.reshape(-1) * 2)


def test_the_compiler_makes_wide_instructions_of_them() -> None:
    type_ = TensorType(F16, (1, THREADS * 8))
    node = Compute("Y", (num(0), at(8)), double(Load("X", (num(0), at(8)), F16)))
    text = ptx(source((vector(8, node),), {"X": type_}, {"Y": type_}))
    assert re.search(r"ld\.global\.nc\S*\.v4", text)
    assert re.search(r"st\.global\S*\.v4", text)
    assert ".local" not in text


@pytest.mark.parametrize("seed", range(20))
def test_congruences_and_steps_hold_for_random_expressions(seed: int) -> None:
    rng = np.random.default_rng(seed)

    def expression(depth: int) -> Expr:
        kind = rng.integers(0, 7) if depth else rng.integers(0, 2)
        if depth == 4 and rng.integers(0, 3) == 0:
            order = [OpKind.LT, OpKind.LE, OpKind.GT, OpKind.GE][rng.integers(0, 4)]
            return Op(order, (expression(3), expression(2)), DType.INT8)
        if kind == 0:
            return num(int(rng.integers(0, 20)))
        if kind == 1:
            return ref(["t", "v", "u"][rng.integers(0, 3)])
        x = expression(depth - 1)
        constant = int(rng.choice([2, 3, 4, 8, 12]))
        return [
            add(x, expression(depth - 1)),
            mul(x, num(constant)),
            div(x, constant),
            mod(x, constant),
            Op(OpKind.MIN, (x, expression(depth - 1)), DType.INT32),
        ][kind - 2]

    known = {"u": Congruence(4, 2)}
    lanes = LaneStrideAnalysis("v", 4, known, frozenset())
    steps = 0
    for _ in range(300):
        expr = expression(4)
        found, step = congruence(expr, known), lanes.stride(expr)
        steps += step is not None
        for t in range(5):
            for u in (2, 6, 10):
                row = [_number(expr, {"t": t, "u": u, "v": v}) for v in range(4)]
                for value in row if expr.dtype is not DType.INT8 else ():
                    assert (value - found.remainder) % found.modulus == 0 if found.modulus else value == found.remainder
                if step is not None:
                    assert row == [row[0] + step * v for v in range(4)], expr
    assert steps > 50


def test_definitions_of_variables_cancel_in_an_offset() -> None:
    start = mul(ref("i"), num(4097))
    head = mod(add(num(8), mul(mod(start, 8), num(-1))), 8)
    offset = add(start, add(ref("head"), mul(ref("k"), num(8))))
    assert is_multiple(offset, 8, {}, {"head": head})
    assert is_multiple(offset, 4, {}, {"head": head})
    assert not is_multiple(offset, 16, {}, {"head": head})
    assert not is_multiple(offset, 8, {}, {})
    assert not is_multiple(add(offset, num(1)), 8, {}, {"head": head})


def test_bound_again_variables_have_no_definition() -> None:
    """`head` is defined by an `i` that the inner Let hides, so that nothing cancels."""
    head = mod(add(num(8), mul(mod(mul(ref("i"), num(9)), 8), num(-1))), 8)
    copy = Compute("y", (ref("i"), add(ref("head"), ref("j"))), Load("x", (ref("i"), add(ref("head"), ref("j"))), F16))

    def text(nodes: tuple[Node, ...]) -> str:
        loop: Node = Let("i", ref("t"), (Let("head", head, nodes),))
        shape = TensorType(F16, (8, 9))
        return source((loop,), {"x": shape}, {"y": shape}).text

    loop = Loop("j", 8, LoopKind.VECTOR, (copy,))
    assert "(const uint4 *)&x[" in text((loop,))
    assert "(const uint4 *)&x[" not in text((Let("i", add(ref("t"), num(1)), (loop,)),))
