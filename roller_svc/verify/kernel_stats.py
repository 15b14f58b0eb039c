"""Plan of a program → what each of its kernels computes and how, in plain words that can be counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from roller_svc.analysis.operand import STAGED_KINDS, all_operands, operands
from roller_svc.families.common.gpu.attention.tile import attended
from roller_svc.families.common.gpu.matrix.tile import LoadClass, LoadKind, feeds
from roller_svc.families.common.gpu.warpgroups.tile import WgmmaOperand, wgmma_tile
from roller_svc.families.gpu.wgmma_attention.workload import attention_group_tile, grouped_attention
from roller_svc.fusion.split.reduction import split_group
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import COMPARISONS, Cast, Const, Expr, Load, Op, OpKind, axes_of, walk
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.hardware import Arch, Family, HardwareSpec, UnitKind
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import RProgram

Json = dict[str, Any]

TILES = ("lanes", "split_k", "stream_k", "stages", "raster", "blocks", "cluster_m", "cluster_n")
EPILOGUE_FEATURES = ("none", "bias", "residual", "activation", "scale", "cast", "row reduction", "several outputs")
_ARITHMETIC = COMPARISONS | {
    OpKind.ADD, OpKind.SUB, OpKind.MUL, OpKind.DIV, OpKind.FLOORDIV, OpKind.MOD, OpKind.NEG, OpKind.LAND, OpKind.LOR,
    OpKind.LNOT,
}  # fmt: skip


def summarize_kernels(groups: Sequence[KernelGroup], plan: Plan, hw: HardwareSpec) -> tuple[Json, ...]:
    """One entry a kernel group, in their order: JSON values only."""
    return tuple(_summarize_kernel(group, c.program, hw) for group, c in zip(groups, plan.choices, strict=True))


def count_features(kernels: Iterable[Mapping[str, Any]]) -> Json:
    """How many kernels have what: for each property its values and their numbers; `load` counts operands."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in ("kind", "family", "unit", "types", *TILES)}
    counts |= {"load": Counter(), "epilogue": Counter()}
    for kernel in kernels:
        for name in ("kind", "family", "unit", *TILES):
            counts[name][str(kernel[name])] += 1
        operand_facts = kernel["operands"]
        if operand_facts:
            counts["types"][" x ".join(operand["dtype"] for operand in operand_facts)] += 1
        counts["load"].update(operand["load"] for operand in operand_facts if operand["load"] is not None)
        counts["epilogue"].update(kernel["epilogue"])
    return {name: dict(sorted(values.items())) for name, values in counts.items()}


def epilogue(group: KernelGroup) -> tuple[str, ...]:
    """What a contraction's results go through before they are stored: some of EPILOGUES.

    bias: reads a tensor that lacks some of the output's axes; residual: one that has all; activation: applies a
    function; scale: multiplies by a constant beside no function; cast: to another type.
    """
    features: set[str] = set()
    output_axes = {axis.name for axis in group.outer if axis.extent > 1}
    group_outputs = {statement.output for statement in group.statements}
    for statement in group.statements[group.space.sums :]:
        nodes = list(walk(statement.body))
        reads = [
            axes_of(node) & output_axes for node in nodes if isinstance(node, Load) and node.tensor not in group_outputs
        ]
        features |= {"residual" if axes == output_axes else "bias" for axes in reads}
        if any(isinstance(node, Op) and node.kind not in _ARITHMETIC for node in nodes):
            features.add("activation")
        elif any(_scales(node) for node in nodes):
            features.add("scale")
        if any(isinstance(node, Cast) and not node.implicit for node in nodes):
            features.add("cast")
    if group.row_reduction is not None:
        features.add("row reduction")
    if len(group.stored) > 1:
        features.add("several outputs")
    return tuple(word for word in EPILOGUE_FEATURES if word in features) or ("none",)


def _scales(node: Expr) -> bool:
    if not isinstance(node, Op) or node.kind not in (OpKind.MUL, OpKind.DIV):
        return False
    return any(isinstance(arg.arg if isinstance(arg, Cast) else arg, Const) for arg in node.args)


def _summarize_kernel(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> Json:
    is_contraction = group.kind is GroupKind.CONTRACTION
    return {
        "kind": group.kind.value,
        "family": _family(program, hw),
        "unit": program.unit.name,
        "operands": _operands(group, program, hw.arch)
        if is_contraction
        else _attention_operands(group, program, hw.arch),
        **{name: getattr(program, name) for name in TILES},
        "epilogue": list(epilogue(group)) if is_contraction or group.attention is not None else [],
    }


def _family(program: RProgram, hw: HardwareSpec) -> str:
    if hw.family is Family.CPU:
        return "cpu"
    if program.unit.takes_fragments:
        return "mma"
    return "wgmma" if program.unit.kind is UnitKind.WGMMA else "simt"


def _operands(group: KernelGroup, program: RProgram, arch: Arch) -> list[Json]:
    """Both factors as the kernel that multiplies meets them: of a split reduction, one part. The right one of a second
    sum is staged as that of the first."""
    if program.unit.kind not in STAGED_KINDS:
        return [{"dtype": o.dtype.value, "stored": o.stored.value, "load": None} for o in operands(group)]
    if program.split_k > 1:
        halves = split_group(group, program)
        group, program = halves.partial, halves.partial_program
    factors = operands(group)
    staged = [(feed.dtype, _load(feed.load, feed.dtype)) for feed in feeds(program.unit, factors, arch)]
    if program.unit.kind is UnitKind.WGMMA:
        tile = wgmma_tile(program, all_operands(group), arch)
        staged = [(o.dtype, _wgmma_load(o)) for o in (tile.a, tile.b)]
    found = [
        {"dtype": dtype.value, "stored": factor.stored.value, "load": load}
        for factor, (dtype, load) in zip(factors, staged, strict=True)
    ]
    return [*found, *found[1:]] if group.is_paired else found


def _attention_operands(group: KernelGroup, program: RProgram, arch: Arch) -> list[Json]:
    """Queries, keys and values of attention; nothing of other groups."""
    if group.attention is None:
        return []
    attention = attended(group, program.unit, arch)
    qkv = (attention.q, attention.k, attention.v)
    loads = [_load(f.load, f.dtype) for f in qkv]
    if program.unit.kind is UnitKind.WGMMA:
        tile = attention_group_tile(program, grouped_attention(group, program.unit, arch))
        loads = [_wgmma_load(o) for o in (tile.q, tile.k, tile.v)]
    return [
        {"dtype": f.dtype.value, "stored": f.operand.stored.value, "load": load}
        for f, load in zip(qkv, loads, strict=True)
    ]


def _load(load: LoadClass, dtype: DType) -> str:
    """async4, async8, async16: cp.async of so many bytes; vector, element: through registers."""
    if load.kind is LoadKind.ASYNC:
        return f"async{load.elements * dtype.bytes}"
    return str(load.kind.value)


def _wgmma_load(operand: WgmmaOperand) -> str:
    """The same, and tma, im2col: bulk copies."""
    feed = operand.feed
    return _load(feed, operand.dtype) if isinstance(feed, LoadClass) else str(operand.load.value)
