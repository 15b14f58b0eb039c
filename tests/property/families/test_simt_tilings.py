"""Random tiles, buffers and layouts of contractions on scalar lanes: the emulated kernel agrees with the reference,
whatever the order of its threads, and does not race."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roller_svc import hardware
from roller_svc.codegen.kernel import GroupLaunches, emit, tensors_in_memory
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.lower_and_emit import lower
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.rank import rank
from roller_svc.frontend.lang import parse
from roller_svc.fusion.partition import stored_types
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import AxisRole, KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import CompiledKernel, KernelSource
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.rprogram import PipelineOptions, RProgram, RTile
from roller_svc.semantics.inputs import random_inputs
from roller_svc.verify.run_and_verify import verify_results

pytestmark = pytest.mark.emulator

TARGETS = ("nvidia-a100-sxm-80gb", "nvidia-t4")
Signature = dict[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Tiling:
    """Of a block along m, n, k and of a thread along m, n."""

    block: tuple[int, int, int]
    thread: tuple[int, int]
    stages: int = 1
    raster: int = 1


threads = st.sampled_from([(4, 8), (8, 4), (2, 16), (1, 32), (8, 8), (4, 16)])
tilings = st.builds(
    lambda count, thread, k, stages, raster: Tiling((count[0] * thread[0], count[1] * thread[1], k), thread, stages, raster),
    threads,
    st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 6, 8])),
    st.sampled_from([8, 16]),
    st.integers(1, 4),
    st.integers(1, 3),
)
extent = st.one_of(st.integers(4, 40), st.sampled_from([16, 32, 48, 64]))
dtypes = st.sampled_from(["float32", "float64", "int32", "int64", "float16", "bfloat16", "int8", "uint8"])


@st.composite
def products(draw: st.DrawFn) -> tuple[str, Signature]:
    """Matrix products of every layout and type, batched, with residual and bias, one factor computed."""
    m, n, k, b = draw(extent), draw(extent), draw(extent), draw(st.integers(1, 2))
    dtype = draw(dtypes)
    left, right = draw(st.sampled_from(["b,m,k", "b,k,m", "m,k"])), draw(st.sampled_from(["b,k,n", "b,n,k", "k,n"]))
    sizes = {"b": b, "m": m, "n": n, "k": k}
    inputs: Signature = {
        name: (dtype, tuple(sizes[axis] for axis in index.split(","))) for name, index in (("A", left), ("B", right))
    }
    a = draw(st.sampled_from(["A", "exp(A)"])) if dtype in ("float32", "float64") else "A"
    factor = a.replace("A", f"A[{left}]")
    cast = draw(st.booleans()) and dtype in ("int8", "uint8")
    body = f"{factor} * B[{right}]" if not cast else f"int32({factor}) * int32(B[{right}])"
    expression = f"C[b,m,n] +=! {body} where b in {b}"
    if draw(st.booleans()) and dtype.startswith("float"):
        expression += "; Y[b,m,n] = max(C[b,m,n] + bias[n] + R[b,m,n], 0)"
        inputs |= {"bias": (dtype, (n,)), "R": (dtype, (b, m, n))}
    return expression, inputs


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[str, Signature]:
    """Two spatial dimensions, channels first or last, strided, dilated, padded."""
    n, c, f = draw(st.integers(1, 2)), draw(st.sampled_from([3, 5, 8, 16])), draw(st.integers(4, 24))
    size, kernel = draw(st.integers(7, 16)), draw(st.integers(1, 3))
    stride, dilation, pad = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(0, 1))
    out = (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
    y, x = (f"{o}*{stride}+{r}*{dilation}-{pad}" for o, r in (("h", "r"), ("w", "s")))
    guard = f".when([{y}>=0, {y}<{size}, {x}>=0, {x}<{size}], 0.0)" if pad else ""
    tail = f" where h in {out}, w in {out}, r in {kernel}, s in {kernel}"
    if draw(st.booleans()):
        shapes: Signature = {"X": ("float32", (n, c, size, size)), "W": ("float32", (f, c, kernel, kernel))}
        return f"Y[n,f,h,w] +=! X[n,c,{y},{x}]{guard} * W[f,c,r,s]{tail}", shapes
    shapes = {"X": ("float32", (n, size, size, c)), "W": ("float32", (kernel, kernel, c, f))}
    return f"Y[n,h,w,f] +=! X[n,{y},{x},c]{guard} * W[r,s,c,f]{tail}", shapes


def tiled(group: KernelGroup, hw: HardwareSpec, tiling: Tiling) -> RProgram:
    """The group's rProgram on scalar lanes with that tiling in place of its own."""
    found = rank(group, hw, hw.unit_for(group.space.compute_dtype), 1)[0][0].program
    roles = (AxisRole.M, AxisRole.N, AxisRole.K)

    def tile(extents: tuple[int, ...]) -> RTile:
        known = dict(zip(roles, extents, strict=True))
        return RTile(tuple((axis.name, known.get(axis.role, 1)) for axis in group.space.axes))

    return replace(
        found,
        block=tile(tiling.block),
        thread=tile((*tiling.thread, 1)),
        split_k=1,
        pipeline=PipelineOptions(tiling.stages, tiling.raster),
    )


def generated(program: TensorProgram, hw: HardwareSpec, tiling: Tiling) -> KernelSource | None:
    """None where the program is no single contraction: one whose extents leave nothing to stage."""
    groups = partition(program, hw)
    if len(groups) > 1 or groups[0].operands is None:
        return None
    (group,) = groups
    trees = lower(group, tiled(group, hw, tiling), hw)
    types = stored_types(program)
    views = (*group.inputs, *group.stored)
    buffers = tensors_in_memory(program, types, [(t, types[t]) for t, _ in views if t in types])
    return emit("kernel", (GroupLaunches(trees, views),), buffers, hw, "")


def check(case: tuple[str, Signature], tiling: Tiling, target: str) -> None:
    expression, signature = case
    program = parse(expression, {name: TensorType(DType(d), shape) for name, (d, shape) in signature.items()})
    source = generated(program, hardware.load(target), tiling)
    if source is None:
        return
    arrays = random_inputs(program, seed=1)
    found = load_emulated(CompiledKernel(source, b"", "", ()), seed=3, races=True).run(dict(arrays))
    verdict = verify_results(program, arrays, found, allow_tf32=False)
    assert verdict.ok, f"{expression} {signature} {tiling}: {verdict}\n{source.text}"


@given(products(), tilings, st.sampled_from(TARGETS))
@settings(max_examples=8)
def test_products(case: tuple[str, Signature], tiling: Tiling, target: str) -> None:
    check(case, tiling, target)


@pytest.mark.slow
@given(convolutions(), tilings, st.sampled_from(TARGETS))
@settings(max_examples=8)
def test_convolutions(case: tuple[str, Signature], tiling: Tiling, target: str) -> None:
    check(case, tiling, target)


@pytest.mark.slow
@given(st.one_of(products(), convolutions()), tilings, st.sampled_from(TARGETS))
@settings(max_examples=150)
def test_many(case: tuple[str, Signature], tiling: Tiling, target: str) -> None:
    check(case, tiling, target)
