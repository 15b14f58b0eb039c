"""Partition: inlined producers, epilogues, rows, fused axes, split reductions."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from roller_svc import hardware
from roller_svc.analysis.online_reduction import online_reductions
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import partition, traits
from roller_svc.compiler.plans import rank_best_partition
from roller_svc.compiler.rank import rank
from roller_svc.families.matching import units_for
from roller_svc.frontend.lang import parse
from roller_svc.fusion.partition import finds_other_contractions, normalize_statements, partition_statements, stored_types
from roller_svc.fusion.split.reduction import may_split, split_group
from roller_svc.ir.constraints import ScheduleConstraints
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import AxisRole, GroupKind, KernelGroup
from roller_svc.ir.program import StatementKind, TensorProgram, TensorType
from roller_svc.ir.report import Plan
from roller_svc.perf.footprint import footprint
from roller_svc.runtime.cpu import CpuModule
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate
from roller_svc.toolchain import compile_source

H200 = hardware.load("nvidia-h200-sxm")


def program(expression: str, **shapes: tuple[int, ...]) -> TensorProgram:
    return parse(expression, {name: TensorType(DType.FLOAT32, shape) for name, shape in shapes.items()})


def groups(expression: str, **shapes: tuple[int, ...]) -> tuple[KernelGroup, ...]:
    return partition(program(expression, **shapes), H200)


def extents(group: KernelGroup, role: AxisRole) -> list[int]:
    return [axis.extent for axis in group.space.role(role)]


def test_bias_and_activation_are_the_epilogue_of_a_matmul() -> None:
    (group,) = groups("C[m,n] +=! A[m,k]*B[k,n]; D[m,n] = gelu(C[m,n] + b[n])", A=(64, 32), B=(32, 48), b=(48,))
    assert group.kind is GroupKind.CONTRACTION
    assert [s.name for s in group.statements] == ["C", "D"]
    assert group.register_tensors == {"C"}
    assert [name for name, _ in group.stored] == ["D"]


def test_an_epilogue_reduces_rows_of_what_a_map_makes_of_products() -> None:
    half = {name: TensorType(DType.FLOAT16, (64, 64)) for name in "AB"}
    text = "C[m,n]: float32 +=! -(A[m,k]*B[n,k]); r[m] >=! C[m,n]"
    (group,) = partition(parse(text, half, ("r",)), H200)
    assert group.kind is GroupKind.CONTRACTION
    assert [s.name for s in group.statements] == ["C.term0", "C", "r"]
    first, *_ = partition(parse(f"{text}; E[m,n] = C[m,n] - r[m]", half, ("E",)), H200)
    assert [s.name for s in first.statements] == ["C.term0", "C"]  # a later kernel reads C again


def test_the_order_of_statements_does_not_decide_what_an_epilogue_computes() -> None:
    products, rows, columns = "C[m,n] +=! A[m,k]*B[n,k]", "r[m] +=! A[m,k]*A[m,k]; s[m] = sqrt(r[m])", "t[n] +=! B[n,k]*B[n,k]"
    for order in ((products, rows, columns), (rows, products, columns), (rows, columns, products)):
        *_, last = groups("; ".join((*order, "D[m,n] = C[m,n] / (s[m] * t[n])")), A=(64, 32), B=(48, 32))
        assert last.kind is GroupKind.CONTRACTION
        assert [s.output for s in last.statements] == ["C", "D"]


def test_an_element_wise_producer_becomes_part_of_the_load() -> None:
    (group,) = groups("S[m,k] = A[m,k] * s[k]; C[m,n] +=! S[m,k]*B[k,n]", A=(64, 32), s=(32,), B=(32, 48))
    assert group.kind is GroupKind.CONTRACTION
    assert {name for name, _ in group.inputs} == {"A", "s", "B"}


def test_convolution_is_an_implicit_gemm_whose_n_is_contiguous_in_the_output() -> None:
    (group,) = groups("Y[n,f,y,x] +=! X[n,c,y+i,x+j]*W[f,c,i,j] where y in 14, x in 14", X=(2, 8, 16, 16), W=(32, 8, 3, 3))
    assert group.kind is GroupKind.CONTRACTION
    assert extents(group, AxisRole.M) == [32]
    assert extents(group, AxisRole.N) == [2 * 14 * 14]
    assert extents(group, AxisRole.K) == [8 * 3 * 3]


def test_softmax_is_one_kernel_over_its_rows() -> None:
    (group,) = groups(
        "m[a,b] >=! x[a,b,c]; s[a,b] +=! exp(x[a,b,c]-m[a,b]); y[a,b,c] = exp(x[a,b,c]-m[a,b])/s[a,b]", x=(8, 64, 100)
    )
    assert [s.name for s in group.statements] == ["m", "s", "y"]
    assert [a.extent for a in group.outer] == [8 * 64]  # the two row axes act as one
    assert group.register_tensors == {"m", "s"}


def test_few_long_rows_are_spread_over_the_device_one_statement_at_a_time() -> None:
    found = groups("m[a] >=! x[a,c]; s[a] +=! exp(x[a,c]*m[a])", x=(1, 1 << 20))
    assert len(found) == 2


@pytest.mark.parametrize(
    "text",
    [
        "m[a] >=! x[a,c]; s[a] +=! exp(x[a,c]-m[a])",
        "s[a] +=! x[a,c]; q[a] +=! (x[a,c]-s[a]/1048576.0)*(x[a,c]-s[a]/1048576.0)",
        "m[a] <=! x[a,c]; i[a] >=! c.when([m[a] == x[a,c]], -1)",
    ],
)
def test_two_reductions_that_share_a_pass_are_split_together(text: str) -> None:
    (group,) = groups(text, x=(2, 1 << 20))
    assert may_split(group)
    (found,), _ = rank(group, H200, H200.unit_for(DType.FLOAT32), 1)
    assert found.program.split_k > 1
    halves = split_group(group, found.program)
    assert [s.kind for s in halves.partial.statements] == [StatementKind.REDUCE] * 2
    assert len(online_reductions(halves.partial.statements)) == 1
    assert len(halves.workspaces) == 2


def test_axes_that_always_stand_together_are_one() -> None:
    (group,) = groups("y[a,b,c] = x[a,b,c] * 2.0", x=(3, 5, 7))
    assert [a.extent for a in group.outer] == [105]
    (transposed,) = groups("y[c,a,b] = x[a,b,c] * 2.0", x=(3, 5, 7))
    assert sorted(a.extent for a in transposed.outer) == [7, 15]


def test_axes_with_a_guard_stay_apart() -> None:
    (group,) = groups("y[a,b] = x[a,b].when([a >= b], 0.0)", x=(8, 8))
    assert [a.extent for a in group.outer] == [8, 8]


def test_ragged_rows_are_flat_where_most_tensors_are() -> None:
    """On a GPU, whose threads take whole vectors; what has only one of the axes divides."""
    (group,) = groups("y[a,b] = x[a,b] * s[a]", x=(20, 6), s=(20,))
    assert [a.extent for a in group.outer] == [120]
    (even,) = groups("y[a,b] = x[a,b] * s[a]", x=(20, 8), s=(20,))
    assert [a.extent for a in even.outer] == [20, 8]
    (crossed,) = groups("y[a,b] = x[a,b] * z[b,a]", x=(20, 6), z=(6, 20))
    assert [a.extent for a in crossed.outer] == [20, 6]
    (on_cpu,) = partition(program("y[a,b] = x[a,b] * s[a]", x=(20, 6), s=(20,)), hardware.load("cpu-x86-avx2"))
    assert [a.extent for a in on_cpu.outer] == [20, 6]


def test_an_expensive_producer_that_many_read_is_stored() -> None:
    first, second = groups("e[a,k] = exp(x[a,k]); y[a,b] >=! e[a,k] + z[b,k]", x=(64, 64), z=(64, 64))
    assert [name for name, _ in first.stored] == ["e"]
    assert "e" in dict(second.inputs)


def test_an_expensive_value_of_each_row_is_computed_in_a_nest_of_its_own_on_cpus() -> None:
    cheap = program("s[i] = x[i] + b[i]; y[i,j] = exp(s[i] * a[i,j])", x=(64,), b=(64,), a=(64, 16))
    expensive = program("s[i] = exp(x[i] + b[i]); y[i,j] = exp(s[i] * a[i,j])", x=(64,), b=(64,), a=(64, 16))
    cpu = hardware.load("cpu-x86-avx512")
    assert [len(partition(p, cpu)) for p in (cheap, expensive)] == [1, 2]
    assert len(partition(expensive, H200)) == 1


def test_an_intermediate_of_a_narrow_float_keeps_its_digits() -> None:
    half = TensorType(DType.FLOAT16, (64, 64))
    made = parse("C[m,n] +=! A[m,k]*B[k,n]; s[n] +=! C[m,n]; y[m,n] = C[m,n] / s[n]", {"A": half, "B": half})
    assert stored_types(made)["C"].dtype is DType.FLOAT32
    assert stored_types(made)["y"].dtype is DType.FLOAT16


def test_a_quotient_of_a_product_is_a_contraction_too() -> None:
    (group,) = groups("y[m,d] +=! e[m,k] * v[k,d] / z[m]", e=(64, 32), v=(32, 48), z=(64,))
    assert group.kind is GroupKind.CONTRACTION
    assert {name for name, _ in group.inputs} == {"e", "v", "z"}


def test_a_matrix_vector_product_is_no_contraction() -> None:
    (group,) = groups("y[m] +=! A[m,k] * x[k]", A=(64, 64), x=(64,))
    assert group.kind is GroupKind.NEST


@pytest.mark.parametrize("split", [2, 3, 7])
@pytest.mark.parametrize(
    "expression",
    [
        "C[m,n] +=! A[m,k]*B[k,n]; D[m,n] = max(C[m,n], 0)",
        "C[n] +=! B[k,n]",
        "C[n] >=! B[k,n]",
        "C[] *=! B[k,n]",
        "C[m,n] <=! A[m,k] + B[k,n]",
        "C[m,n] +=! A[m,k]*B[k,n]/7.0",
        "C[m,n] +=! A[m,k]*E[j,n]",
        "C[m,n] +=! E[j,m]*B[k,n]",
        "C[m,n] +=! A[m,k]*F[n]",
        "C[m,n] +=! A[m,k]*(E[j,n] + 1.0)",
    ],
)
def test_a_split_reduction_gives_the_same(expression: str, split: int) -> None:
    shapes = {"A": (20, 61), "B": (61, 40), "E": (84, 40), "F": (33,)}
    made = program(expression, **{name: s for name, s in shapes.items() if f"{name}[" in expression})
    local = hardware.load("local")
    found, ranked, _ = rank_best_partition(made, local, 10)
    assert all(may_split(group) for group in found)
    # tiles of a convolution, which splits nothing, have another space
    chosen = (
        next(c for c in candidates if c.program.space == group.space) for group, candidates in zip(found, ranked, strict=True)
    )
    forced = Plan(tuple(replace(c, program=replace(c.program, split_k=split)) for c in chosen))
    source = emit_plan(forced, made, found, local)
    assert all(f"{name}(" in source.text for name in ("kernel0_partial", "kernel0_combine"))
    arrays = random_inputs(made, seed=split)
    got = CpuModule(compile_source(source)).run(arrays)
    assert agrees(made, got, evaluate(made, arrays)).ok


@pytest.mark.parametrize("index", ["j, n", "n, j"])
def test_parts_of_an_axis_of_one_operand_are_a_batch(index: str) -> None:
    """The parts have the tiles of the whole: roles of their own would have none."""
    shape = tuple({"j": 768, "n": 256}[name] for name in index.split(", "))
    types = {"a": TensorType(DType.FLOAT16, (256, 1280)), "b": TensorType(DType.FLOAT16, shape)}
    (group,) = partition(parse(f"c[m, n]: float32 +=! a[m, k] * b[{index}]", types), H200)
    for unit in units_for(group, H200, ScheduleConstraints()).units:
        (found, *_), _ = rank(group, H200, unit, 1)
        split = replace(found.program, split_k=5)
        for halves in (split_group(group, split), split_group(group, replace(split, split_k=3))):
            assert extents(halves.partial, AxisRole.BATCH) == [halves.workspaces[0][1].shape[0]]
            assert [extents(halves.partial, role) for role in (AxisRole.M, AxisRole.N)] == [[256], [256]]


@pytest.mark.parametrize(("body", "stated"), [("float32", "float64"), ("int8", "int32"), ("int32", "float32")])
def test_partial_results_keep_the_digits_of_the_stated_type(body: str, stated: str) -> None:
    x = np.full((1, 1100), 0.7 if body == "float32" else 101, body)
    made = parse(f"y[a]: {stated} +=! x[a,k]", {"x": TensorType(DType(body), (1, 1100))})
    local = hardware.load("local")
    found, ranked, _ = rank_best_partition(made, local, 1)
    forced = Plan(tuple(replace(c[0], program=replace(c[0].program, split_k=4)) for c in ranked))
    got = CpuModule(compile_source(emit_plan(forced, made, found, local))).run({"x": x})
    assert agrees(made, got, evaluate(made, {"x": x})).ok


def test_a_split_integer_product_still_wraps() -> None:
    x = np.full((1, 64), 3, np.int8)
    made = parse("y[a] *=! x[a,k]", {"x": TensorType(DType.INT8, (1, 64))})
    local = hardware.load("local")
    found, ranked, _ = rank_best_partition(made, local, 1)
    forced = Plan(tuple(replace(c[0], program=replace(c[0].program, split_k=4)) for c in ranked))
    got = CpuModule(compile_source(emit_plan(forced, made, found, local))).run({"x": x})
    assert got["y"][0] == np.array(pow(3, 64, 256), np.uint8).view(np.int8)


def test_a_scatter_costs_the_copy_of_its_target() -> None:
    types = {
        "d": TensorType(DType.FLOAT32, (1 << 20, 16)), "i": TensorType(DType.INT32, (4,)),
        "u": TensorType(DType.FLOAT32, (4, 16)),
    }  # fmt: skip
    made = parse("d[i[n], c] =. u[n, c]", types)
    ((group,), ranked, _) = rank_best_partition(made, H200, 1)
    assert group.space.copied_bytes == 64 << 20
    assert ranked[0][0].estimate.seconds >= 2 * (64 << 20) / H200.dram.bandwidth_bytes_per_s
    assert ranked[0][0].estimate.bound == "copy"


@pytest.mark.parametrize("target", ["nvidia-h200-sxm", "nvidia-v100-sxm2", "cpu-x86-avx2"])
def test_maps_over_one_tensor_share_a_pass(target: str) -> None:
    casts = program(
        "a[i,j] = x[i,j].cast(`float16`); b[i,j] = x[i,j].cast(`int32`); c[p,q] = x[p,q] * w[q]", x=(64, 1000), w=(1000,)
    )
    (group,) = partition(casts, hardware.load(target))
    assert [s.output for s in group.statements] == ["a", "b", "c"]
    assert [name for name, _ in group.stored] == ["a", "b", "c"]


@pytest.mark.parametrize("target", ["nvidia-h200-sxm", "cpu-x86-avx2"])
@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("a[i] = x[i,0] + 1.0; b[i] = x[i,1] * 2.0; c[i] = exp(x[i,2])", (4096, 3)),
        ("a[i] = x[2*i] where i in 500; b[i] = x[2*i+1] where i in 500", (1001,)),
        ("a[i] +=! x[i,j,0]; b[i] +=! x[i,j,1]", (33, 70, 2)),
    ],
)
def test_results_of_columns_share_a_pass(target: str, text: str, shape: tuple[int, ...]) -> None:
    (group,) = partition(program(text, x=shape), hardware.load(target))
    (read,) = {access for access in group.space.accesses if not access.is_output}
    whole = {a.name: a.extent for axis in group.space.axes for a in axis.members}
    assert abs(read.tile_elements(whole) - math.prod(shape)) <= 1


def test_results_of_distant_columns_stay_apart() -> None:
    assert len(groups("a[i] = x[i,0] + 1.0; b[i] = x[i,32] * 2.0", x=(64, 64))) == 2


def test_a_rotated_row_is_read_once_where_a_tile_has_it_whole() -> None:
    (group,) = groups("y[i,j] = x[i,j] + x[i,(j + 64) % 128]", x=(4096, 128))
    assert group.space.compulsory_bytes == 2 * 4096 * 128 * 4
    half, whole = (footprint(group.space, (32, 32)).transferred_bytes((1, columns)) for columns in (64, 128))
    assert (half, whole) == ((64 + 64 + 64) * 4, (128 + 128) * 4)


@pytest.mark.parametrize(
    "second",
    [
        "z[j,i] = x[i,j] + 1.0",  # another order
        "z[i,j] = x[j,i] + 1.0 where i in 64, j in 64",  # other elements
        "z[i,j] = x[i,j] + 1.0 where i in 32",  # fewer rows
        "z[i] +=! x[i,j]",  # a reduction
    ],
)
def test_maps_over_other_elements_stay_apart(second: str) -> None:
    assert len(groups(f"y[i,j] = x[i,j] * 2.0; {second}", x=(64, 64))) == 2


def test_transposes_of_one_tensor_stay_apart() -> None:
    assert len(groups("y[j,i] = x[i,j] * 2.0; z[j,i] = x[i,j] + 1.0", x=(4096, 4096))) == 2


@pytest.mark.parametrize(
    ("expression", "shapes", "is_packed", "is_thin"),
    [
        ("y[m, n] +=! a[m, k] * w[n, k]", {"a": (1, 256), "w": (512, 256)}, True, False),
        ("y[m, n] +=! a[m, k] * w[n, k]", {"a": (5, 256), "w": (512, 256)}, False, True),
        ("y[m, n] +=! a[m, k] * w[n, k]", {"a": (64, 256), "w": (512, 256)}, False, False),
        ("y[m] = a[m, 0] + w[m, 0]", {"a": (64, 1), "w": (64, 1)}, False, False),
    ],
)
def test_options_that_find_no_other_contractions_make_equal_partitions(
    expression: str, shapes: dict[str, tuple[int, ...]], is_packed: bool, is_thin: bool
) -> None:
    plain = traits(hardware.load("cpu-x86-avx512"))
    parsed = replace(program(expression, **shapes), constants=("w",))
    statements = normalize_statements(parsed, plain)
    packed, thin = replace(plain, packed_constants=frozenset({"w"})), replace(plain, has_thin_nests=True)
    for options, finds in ((packed, is_packed), (thin, is_thin)):
        assert finds_other_contractions(parsed, statements, options, plain) == finds
        partitions = [partition_statements(parsed, statements, each) for each in (options, plain)]
        assert (partitions[0] != partitions[1]) == finds
