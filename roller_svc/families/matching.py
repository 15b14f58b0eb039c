"""Kernel group, device → the units that may compute it, best first, and why matrix units may not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from roller_svc.analysis.operand import (
    STAGED_KINDS,
    Operand,
    all_operands,
    have_same_layout,
    operand_b2,
    operands,
    operands_unsupported_reason,
    value_dtype,
)
from roller_svc.analysis.sum_of_products import is_window
from roller_svc.errors import NoCandidateError
from roller_svc.families.common.cpu.dot import dot_operands
from roller_svc.families.common.gpu.attention.tile import prepare_attention_operands
from roller_svc.families.common.gpu.matrix.tile import (
    MIN_ASYNC_ARCH,
    WORD_BYTES,
    LoadClass,
    LoadKind,
    OperandLoad,
    fragment_of,
    mfma_unsupported_reason,
    plan_operand_loads,
)
from roller_svc.families.common.gpu.warpgroups.tile import STEP_BYTES, SWIZZLE_ATOMS, TRANSPOSABLE_BYTES, plan_wgmma_loads
from roller_svc.families.cpu.convolution.convolution_view import convolution_spaces
from roller_svc.families.cpu.convolution.word_view import word_spaces
from roller_svc.families.cpu.winograd.winograd_view import winograd_spaces
from roller_svc.families.gpu.streamed_rows import STREAMED_ROWS
from roller_svc.families.gpu.streamed_rows.product import find_streamed_product, streamed_view
from roller_svc.families.gpu.streamed_rows.workload import streaming_unit
from roller_svc.fusion.contraction import Contraction, as_contraction, as_scaled_contraction
from roller_svc.fusion.operand_copies import OperandCopy
from roller_svc.ir.accumulation import FP8_PROMOTION_INTERVAL, accumulator_precision
from roller_svc.ir.attention import Attention
from roller_svc.ir.constraints import OpClass, ScheduleConstraints, WinogradMode
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Load, axes_of, loads_of
from roller_svc.ir.group import AxisRole, GroupKind, KernelGroup, TileAxis, TileSpace
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec, TargetKind, UnitKind
from roller_svc.ir.program import TensorType, operators
from roller_svc.ir.rprogram import RProgram

# Units of each class of operations; None: those that the model may choose from.
_KINDS = {
    None: (UnitKind.WGMMA, UnitKind.MMA, UnitKind.MFMA),
    OpClass.MMA: (UnitKind.MMA, UnitKind.MFMA),
    OpClass.WGMMA: (UnitKind.WGMMA,),
}
SCALING_KINDS = (UnitKind.WGMMA, UnitKind.MMA, UnitKind.MFMA)  # whose kernels scale sums of blocks of k
_UNITS = {OpClass.MMA: "matrix units", OpClass.WGMMA: "matrix units of warpgroups"}


@dataclass(frozen=True, slots=True)
class Units:
    """The units that may compute a group."""

    units: tuple[ComputeUnit, ...]
    unsupported_units: tuple[str, ...] = ()  # 'unit: reason' of each matrix unit that cannot compute the contraction


def _allowed_kinds(constraints: ScheduleConstraints) -> tuple[UnitKind, ...]:
    kinds = _KINDS[constraints.op_class]
    return tuple(kind for kind in kinds if kind is not UnitKind.WGMMA) if constraints.joinable else kinds


def op_class_of(unit: ComputeUnit) -> OpClass:
    """Return the class of operations that a unit belongs to: what the option `family` asks for."""
    classes = ((kind, op_class) for op_class, kinds in _KINDS.items() if op_class is not None for kind in kinds)
    return dict(classes).get(unit.kind, OpClass.SIMT)


def units_for(group: KernelGroup, hw: HardwareSpec, constraints: ScheduleConstraints) -> Units:
    """Return the units that may compute a group.

    Raises:
        NoCandidateError: No unit of the requested class can compute the group.
    """
    plain = hw.unit_for(group.product_sum_dtype)
    if group.attention is not None:
        return _attention_units(group, group.attention, hw, constraints)
    if group.kind is not GroupKind.CONTRACTION or hw.family is TargetKind.CPU:
        if constraints.op_class is not None:
            raise NoCandidateError(f"{group.name}: {_no_family(group, hw)}", rejections={constraints.op_class.value: 1})
        streaming = _streaming_unit(group, hw)
        dots = (unit for unit in hw.units if dot_operands(unit, group) is not None)
        return Units((*dots, *((streaming,) if streaming is not None else ()), plain))
    if constraints.op_class is OpClass.SIMT:
        return _fma_unit(group, plain)
    units, unsupported = _matrix_units(group, hw, constraints)
    if constraints.op_class is None and not _requires_matrix_unit(group):
        return Units((*units, plain), unsupported)
    if not units:
        wanted = constraints.op_class or OpClass.MMA
        reasons = "; ".join(unsupported) or f"{hw.id} has no {_UNITS[wanted]}"
        hint = "leave the family out: the fastest of those that fit is taken" if constraints.op_class else None
        raise NoCandidateError(f"{group.name} cannot run on {_UNITS[wanted]}: {reasons}", rejections={wanted.value: 1}, hint=hint)
    return Units(units, unsupported)


def _streaming_unit(group: KernelGroup, hw: HardwareSpec) -> ComputeUnit | None:
    """Return the matrix unit that multiplies few rows with a matrix that streams; None where there is none."""
    product = find_streamed_product(group) if hw.family is TargetKind.CUDA else None
    return None if product is None else streaming_unit(product, hw)


def can_stream(group: KernelGroup, hw: HardwareSpec) -> bool:
    """Return whether a kernel of the group may stream a matrix."""
    return any(view is not None and _streaming_unit(view, hw) is not None for view in (group, streamed_view(group)))


def is_streamed(program: RProgram) -> bool:
    """Return whether a kernel streams a matrix."""
    return program.family == STREAMED_ROWS.name


def streamed_views(views: Iterable[tuple[ComputeUnit, KernelGroup]], hw: HardwareSpec) -> list[tuple[ComputeUnit, KernelGroup]]:
    """Return the units and tile spaces of products whose matrix streams; all if there are none."""
    known = list(views)
    return [(unit, view) for unit, view in known if _streaming_unit(view, hw) == unit] or known


def _fma_unit(group: KernelGroup, plain: ComputeUnit) -> Units:
    if what := _requires_matrix_unit(group):
        raise NoCandidateError(f"{group.name}: {what} requires matrix units", rejections={"unit kind": 1})
    return Units((plain,))


def _requires_matrix_unit(group: KernelGroup) -> str:
    """Return what of a group only kernels on matrix units do; "" if there is nothing."""
    if group.space.scale_runs is not None:
        return "a scaled sum"
    return "a dual GEMM" if group.is_dual_gemm else ""


def supports_attention(unit: ComputeUnit, hw: HardwareSpec) -> bool:
    """Return whether attention on the unit is one kernel.

    The accumulator of QK^T must have the layout of the next product's operand, which holds for 16 bits (PTX ISA,
    "Matrix Fragments for mma.m16n8k16"; AMD Instinct MI200 ISA, 16 x 16 x 16). NVIDIA's keys are copied asynchronously.
    """
    halves = unit.kind in STAGED_KINDS and unit.in_dtype in (DType.FLOAT16, DType.BFLOAT16)
    copied = hw.family is TargetKind.AMD or (hw.family is TargetKind.CUDA and hw.arch >= MIN_ASYNC_ARCH)
    return halves and copied and unit.acc_dtype is DType.FLOAT32 and not _unsupported_shape(unit)


def multiplies_scores(unit: ComputeUnit, attention: Attention, hw: HardwareSpec, constraints: ScheduleConstraints) -> bool:
    """Return whether a unit of float8 multiplies Q and K, beside that of attention's type for V.

    No sum of products is promoted, so head_dim is at most one interval.
    """
    types = {value_dtype(attention.q), value_dtype(attention.k)}
    if unit.kind is not UnitKind.WGMMA or unit.in_dtype.bytes > 1 or types != {unit.in_dtype}:
        return False
    features = math.prod(axis.extent for axis in attention.softmax_statements[0].reduced)
    return features <= FP8_PROMOTION_INTERVAL and not _unsupported_precision(unit, hw, constraints)


def _attention_units(group: KernelGroup, attention: Attention, hw: HardwareSpec, constraints: ScheduleConstraints) -> Units:
    kinds = () if constraints.op_class is OpClass.SIMT else _allowed_kinds(constraints)
    if attention.weights is not None:
        kinds = tuple(kind for kind in kinds if kind is not UnitKind.WGMMA)
    halves = [u for u in hw.units if u.in_dtype is attention.dtype and u.kind in kinds and supports_attention(u, hw)]
    scores = [u for u in hw.units if halves and u.kind in kinds and multiplies_scores(u, attention, hw, constraints)]
    found = [*scores, *halves]
    if not found:
        is_chain = attention.weights is not None
        wanted = OpClass.WGMMA if constraints.op_class is OpClass.WGMMA and not is_chain else OpClass.MMA
        what = "chained products are" if is_chain else "attention is"
        raise NoCandidateError(f"{group.name}: {what} one kernel on {_UNITS[wanted]} only", rejections={"unit kind": 1})
    return Units(tuple(sorted(found, key=lambda unit: kinds.index(unit.kind))))


def _no_family(group: KernelGroup, hw: HardwareSpec) -> str:
    return f"{hw.id} has one family of kernels" if hw.family is TargetKind.CPU else f"a {group.kind.value} has one family"


def _matrix_units(
    group: KernelGroup, hw: HardwareSpec, constraints: ScheduleConstraints
) -> tuple[tuple[ComputeUnit, ...], tuple[str, ...]]:
    """Return the fastest unit of each allowed kind, and the next one that needs fewer element-wise loads."""
    wanted = _allowed_kinds(constraints)
    fitting: dict[UnitKind, list[ComputeUnit]] = {}
    unsupported = []
    factors = operands(group)
    for unit in hw.units:
        if not unit.is_matrix or (constraints.op_class is not None and unit.kind in STAGED_KINDS and unit.kind not in wanted):
            continue
        reason = _unsupported_kind(unit, wanted) or _unsupported_group(unit, group) or _unsupported_shape(unit)
        reason = reason or operands_unsupported_reason(unit, group.product_sum_dtype, factors, allow_tf32=constraints.allow_tf32)
        reason = reason or _unsupported_precision(unit, hw, constraints)
        if reason:
            unsupported.append(f"{unit.name}: {reason}")
        else:
            fitting.setdefault(unit.kind, []).append(unit)
    chosen: list[ComputeUnit] = []
    for kind in wanted:
        # power alone makes float16 slower than bfloat16: the peaks are equal, and the first one stays first
        units = sorted(fitting.get(kind, []), key=lambda u: -(u.peak_flops_per_s or u.flops_per_s))
        element_loads = [_element_loads(unit, factors, hw) for unit in units]
        easier = [unit for unit, count in zip(units, element_loads, strict=True) if count < element_loads[0]]
        chosen += [*units[:1], *easier[:1]]
    return tuple(chosen), tuple(unsupported)


def _unsupported_kind(unit: ComputeUnit, wanted: tuple[UnitKind, ...]) -> str:
    return "" if unit.kind in wanted else f"no rules for units of kind {unit.kind.value}"


def _unsupported_group(unit: ComputeUnit, group: KernelGroup) -> str:
    if unit.kind is UnitKind.WGMMA and group.row_reduction is not None:
        return "row reductions are not supported on warpgroups"
    if (runs := group.space.scale_runs) is not None:
        if unit.kind not in SCALING_KINDS or group.row_reduction is not None:
            return f"kernels on {unit.kind.value} do not scale sums of blocks of k"
        step_bytes = STEP_BYTES if unit.kind is UnitKind.WGMMA else fragment_of(unit).step_bytes
        if runs.k % (step_bytes // unit.in_dtype.bytes):
            return f"blocks of {runs.k} along k are not whole steps of the unit"
    second = operand_b2(group)
    if second is not None and not have_same_layout(operands(group)[1], second):
        return "operands B of the dual GEMM have different layouts"
    return ""


def _unsupported_shape(unit: ComputeUnit) -> str:
    """Return why instructions of the unit do not make up fragments; '' if they do."""
    if unit.kind is UnitKind.WGMMA:  # one instruction is a whole fragment
        return ""
    fragment = fragment_of(unit)
    if unit.acc_dtype.bytes != fragment.sum_words * WORD_BYTES:
        return f"sums of {unit.acc_dtype.bytes} bytes, fragments have {fragment.sum_words * WORD_BYTES}"
    if unit.kind is UnitKind.MFMA:
        return mfma_unsupported_reason(unit)
    granules = (fragment.rows, fragment.columns, fragment.step_bytes // unit.in_dtype.bytes)
    if any(granule % size for granule, size in zip(granules, unit.shape, strict=True)):
        shape, whole = (" x ".join(map(str, sizes)) for sizes in (unit.shape, granules))
        return f"instructions of {shape} do not make up fragments of {whole}"
    return ""


def _unsupported_precision(unit: ComputeUnit, hw: HardwareSpec, constraints: ScheduleConstraints) -> str:
    """Return why the unit's accumulators are not float32, as those of float8 must be (docs/adr/0023)."""
    sums = accumulator_precision(unit, hw.arch)
    if sums is None or not sums.is_reduced_precision:
        return ""
    if unit.kind is not UnitKind.WGMMA:
        return f"its sums keep {sums.result_bits} bits, and nobody adds them up in float32"
    return "" if constraints.allow_tf32 else f"its sums keep {sums.result_bits} bits, which takes allow_tf32"


def _element_loads(unit: ComputeUnit, factors: tuple[Operand, Operand], hw: HardwareSpec) -> int:
    """Return how many operands must be loaded element by element."""
    return sum(feed.load.kind is LoadKind.ELEMENT for feed in plan_operand_loads(unit, factors, hw.arch))


MIN_RECOMPUTED_OPERATIONS = 4  # and look-ups of an element, from which a CPU may write an operand once
MIN_ROW_BYTES = SWIZZLE_ATOMS[-1]  # of an operand copy: shorter rows are not swizzled, and not worth a launch


def unloadable_operands(group: KernelGroup, hw: HardwareSpec, constraints: ScheduleConstraints) -> frozenset[OperandCopy]:
    """Return the copies of a contraction's operands that its preferred unit cannot load without registers of threads.

    The copies are what TMA or cp.async can load. Rows that neither could load are not copied.
    """
    if hw.family is TargetKind.CPU:
        return _recomputed_operands(group)
    if group.attention is not None:
        return _narrow_operands(group, group.attention, hw, constraints)
    if group.kind is not GroupKind.CONTRACTION or group.is_dual_gemm:
        return frozenset()
    try:
        unit = units_for(group, hw, constraints).units[0]
    except NoCandidateError:
        return frozenset()
    (m,), (n,), (k,) = (group.space.role(role) for role in (AxisRole.M, AxisRole.N, AxisRole.K))
    found: list[OperandCopy] = []
    for side, (load, is_loadable) in enumerate(_operand_loads(unit, group, hw)):
        size, axis = load.dtype.bytes, (m, n)[side]
        k_major = load.operand.k_major or (unit.is_matrix and not _may_be_mn_major(unit, size))
        row = k if k_major else axis
        if is_loadable or load.operand.gathered is not None:
            continue
        if row.extent * size >= MIN_ROW_BYTES and _has_loadable_rows(unit, row, size):
            found.append(OperandCopy(group.statements[0].output, side, load.dtype, k_major))
    return frozenset(found)


def _narrow_operands(
    group: KernelGroup, attention: Attention, hw: HardwareSpec, constraints: ScheduleConstraints
) -> frozenset[OperandCopy]:
    """Return the copies of attention's operands that are narrower in memory than those of its preferred unit."""
    if attention.weights is not None:
        return frozenset()
    try:
        unit = units_for(group, hw, constraints).units[0]
    except NoCandidateError:
        return frozenset()
    found = prepare_attention_operands(group, unit, hw.arch)
    scores, results = attention.softmax_statements[0].output, group.statements[0].output
    return frozenset(
        OperandCopy(output, side, load.dtype, load.operand.k_major, load.operand.source.tensor)
        for output, side, load in ((scores, 0, found.q), (scores, 1, found.k), (results, 1, found.v))
        if load.operand.source is not None and load.operand.memory_dtype.bytes < load.dtype.bytes
    )


def _recomputed_operands(group: KernelGroup) -> frozenset[OperandCopy]:
    """Return the copies of operands that CPUs compute while they read them, if an element takes many operations.

    Packing repeats for panels that several tasks read. Constants are packed once as they are.
    """
    statement = group.statements[0]
    contraction = as_contraction(statement, is_thin=True)
    if contraction is None or group.kind not in (GroupKind.CONTRACTION, GroupKind.NEST):
        return frozenset()
    found = []
    for side, (expr, axes) in enumerate(((contraction.a, contraction.m), (contraction.b, contraction.n))):
        is_constant = {load.tensor for load in loads_of(expr)} <= group.constants
        lookups = sum(any(map(loads_of, load.index)) for load in loads_of(expr))
        if axes and not is_constant and operators(expr) + lookups >= MIN_RECOMPUTED_OPERATIONS:
            # panels of B have its columns side by side; packing transposes rows, which a map writes as they lie
            is_row = group.kind is GroupKind.NEST or side == 0
            is_row = is_row or _is_contiguous_along_k(expr, contraction, dict(group.inputs))
            found.append(OperandCopy(statement.output, side, value_dtype(expr) or expr.dtype, k_major=is_row))
    return frozenset(found)


def _is_contiguous_along_k(operand: Expr, contraction: Contraction, types: Mapping[str, TensorType]) -> bool:
    """Return whether the largest tensor of an operand is contiguous along k, in elements or in words of them."""
    reduced = {a.name for a in contraction.k}
    largest = max(loads_of(operand), key=lambda load: types[load.tensor].bytes)
    used = next((axes_of(index) for index in reversed(largest.index) if axes_of(index)), frozenset[str]())
    return bool(used) and used <= reduced


def _operand_loads(unit: ComputeUnit, group: KernelGroup, hw: HardwareSpec) -> tuple[tuple[OperandLoad, bool], ...]:
    """Return the loads by threads of A and B, and whether the operand needs no such loads, or asynchronous ones."""
    factors = operands(group)
    if not unit.is_matrix:
        plain = (OperandLoad(o, o.dtype, LoadClass(LoadKind.ELEMENT, 1)) for o in factors)
        return tuple((load, load.operand.source is not None) for load in plain)
    if unit.kind is UnitKind.WGMMA:
        loads = plan_wgmma_loads(group.space, unit, all_operands(group), hw.arch)
        orders = [loads.k_order(atom // loads.a.dtype.bytes) for atom in SWIZZLE_ATOMS]
        return tuple((feed.by_threads, feed.tma is not None and any(map(feed.tma.supports, orders))) for feed in (loads.a, loads.b))
    has_async = hw.family is TargetKind.CUDA and hw.arch >= MIN_ASYNC_ARCH
    return tuple(
        (load, load.is_async or (not has_async and load.load.kind is LoadKind.VECTOR and _is_unconverted(load)))
        for load in plan_operand_loads(unit, factors, hw.arch)
    )


def _is_unconverted(load: OperandLoad) -> bool:
    return load.operand.memory_dtype.bytes == load.dtype.bytes


def _may_be_mn_major(unit: ComputeUnit, size: int) -> bool:
    """Return whether the unit reads operands of that element size along m or n from shared memory."""
    if unit.kind is UnitKind.MFMA:
        return False
    return size == TRANSPOSABLE_BYTES or (unit.kind is UnitKind.MMA and size > 1)


def _has_loadable_rows(unit: ComputeUnit, row: TileAxis, size: int) -> bool:
    """Return whether rows of a copy can be loaded: TMA pads them, other copies move whole words within the extent."""
    return unit.kind is UnitKind.WGMMA or row.extent * size % WORD_BYTES == 0


def copied_bytes(group: KernelGroup, copy: OperandCopy) -> int:
    """Return the least bytes of an operand copy: its points, or the elements of the tensor under a window."""
    if copy.tensor:
        return dict(group.inputs)[copy.tensor].elements * copy.dtype.bytes
    statement = group.statements[0]
    is_scaled = group.space.scale_runs is not None
    contraction = (as_scaled_contraction if is_scaled else as_contraction)(statement, is_thin=True)
    if contraction is None:
        return 0
    expr = (contraction.a, contraction.b)[copy.side]
    loads, types, reduced = loads_of(expr), dict(group.inputs), {a.name for a in contraction.k}
    if any(is_window(index, reduced) for load in loads for index in load.index):
        return max(types[load.tensor].elements for load in loads) * copy.dtype.bytes
    return math.prod(a.extent for a in statement.axes if a.name in axes_of(expr)) * copy.dtype.bytes


def unit_views(
    group: KernelGroup, hw: HardwareSpec, units: Units, winograd: WinogradMode = WinogradMode.AUTO
) -> Iterator[tuple[ComputeUnit, KernelGroup]]:
    """Yield each unit with the views that it computes: dot products are packed contractions, or convolutions of words."""
    for unit in units.units:
        if unit.kind is UnitKind.WGMMA:
            yield unit, group
            if (transposed := transposed_view(group)) is not None:
                yield unit, transposed
        else:
            for view in _dot_views(group, unit) if unit.kind is UnitKind.DOT else group_views(group, hw, winograd):
                yield unit, view
        if hw.family is not TargetKind.CPU and unit.is_matrix and group.space.k_bounds is not None:
            yield unit, unbounded_view(group)
        if unit.kind is UnitKind.MMA and (streamed := _streamed_view(group, unit, hw)) is not None:
            yield unit, streamed


def has_view(group: KernelGroup, program: RProgram, hw: HardwareSpec, winograd: WinogradMode = WinogradMode.AUTO) -> bool:
    """Return whether the tile space of an rProgram is that of a view of the group on its unit."""
    if program.space == group.space:
        return True
    views = unit_views(group, hw, Units((program.unit,)), winograd)
    return any(view.space == program.space for _, view in views)


def _dot_views(group: KernelGroup, unit: ComputeUnit) -> tuple[KernelGroup, ...]:
    """Return the group, and its views as a convolution of words that the unit multiplies."""
    spaces = word_spaces(group, unit, convolution_spaces(group, unit.shape[-1]))
    return (group, *(replace(group, space=space) for space in spaces))


def _streamed_view(group: KernelGroup, unit: ComputeUnit, hw: HardwareSpec) -> KernelGroup | None:
    """Return a contraction of few rows as a nest whose matrix streams to the unit; None where it does not."""
    view = streamed_view(group)
    return view if view is not None and _streaming_unit(view, hw) == unit else None


def unbounded_view(group: KernelGroup) -> KernelGroup:
    """Return a product under a guard along k with all k-tiles, so that blocks may share them evenly."""
    return replace(group, space=replace(group.space, k_bounds=None))


MAX_TRANSPOSED_ROWS = 32  # half of the rows of a wgmma


def transposed_view(group: KernelGroup) -> KernelGroup | None:
    """Return a product of few rows with columns of B as rows of the unit; None where its rows fill the unit's.

    Only unpacked operands gain: reads of padded rows from shared memory limit these products, and DRAM limits others.
    """
    if group.kind is not GroupKind.CONTRACTION or group.is_dual_gemm or group.row_reduction is not None:
        return None
    if group.operands is None or isinstance(group.operands.b, Load):
        return None
    (m,), (n,), (k,) = (group.space.role(role) for role in (AxisRole.M, AxisRole.N, AxisRole.K))
    if max(len(axis.members) for axis in (m, n, k)) > 1 or m.extent > MAX_TRANSPOSED_ROWS or n.extent <= m.extent:
        return None
    return replace(group, space=transpose_space(group.space))


def transpose_space(space: TileSpace) -> TileSpace:
    """Return the space of a contraction with M and N, and with them its operands, in each other's place."""
    (m,), (n,) = (space.role(role) for role in (AxisRole.M, AxisRole.N))
    axes = {m.name: replace(n, role=AxisRole.M), n.name: replace(m, role=AxisRole.N)}
    other = {"a": "b", "b": "a"}
    accesses = tuple(replace(access, operand=other.get(access.operand, "")) for access in space.accesses)
    return replace(
        space,
        axes=tuple(axes.get(axis.name, axis) for axis in space.axes),
        accesses=accesses,
        vector_axis=m.name,
        scale_runs=None if space.scale_runs is None else space.scale_runs.transposed,
        transposed=not space.transposed,
    )


def group_views(group: KernelGroup, hw: HardwareSpec, winograd: WinogradMode = WinogradMode.AUTO) -> tuple[KernelGroup, ...]:
    """Return the group, and on a CPU its views as a convolution, those of Winograd's algorithm last."""
    if hw.family is not TargetKind.CPU:
        return (group,)
    lanes = hw.unit_for(group.space.compute_dtype).shape[-1]
    direct = convolution_spaces(group, lanes)
    fast = tuple(replace(group, space=space) for space in winograd_spaces(group, direct, winograd, lanes))
    if fast and winograd is WinogradMode.ALWAYS:
        return fast
    return (group, *(replace(group, space=space) for space in direct), *fast)
