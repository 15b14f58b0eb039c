"""Summarise the kernels of a plan as JSON features, and count features over many kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from roller_svc.families import family_of
from roller_svc.families.matching import op_class_of
from roller_svc.ir.constraints import tile_value
from roller_svc.ir.expr import COMPARISONS, Cast, Const, Expr, Load, Op, OpKind, axes_of, iter_subexpressions
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import RProgram

Json = dict[str, Any]

TILES = (
    "lanes", "split_k", "stream_k", "stages", "raster", "blocks", "cluster_m", "cluster_n", "cluster_k", "pingpong",
)  # fmt: skip
EPILOGUE_FEATURES = ("none", "bias", "residual", "activation", "scale", "cast", "row reduction", "several outputs")
_ARITHMETIC = COMPARISONS | {
    OpKind.ADD, OpKind.SUB, OpKind.MUL, OpKind.DIV, OpKind.FLOORDIV, OpKind.MOD, OpKind.NEG, OpKind.LAND, OpKind.LOR,
    OpKind.LNOT,
}  # fmt: skip


def summarize_kernels(groups: Sequence[KernelGroup], plan: Plan, hw: HardwareSpec) -> tuple[Json, ...]:
    """Return a JSON summary of each kernel group, in their order."""
    return tuple(_summarize_kernel(group, c.program, hw) for group, c in zip(groups, plan.choices, strict=True))


def count_features(kernels: Iterable[Mapping[str, Any]]) -> Json:
    """Count the kernels with each value of each property; `load` counts operands."""
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
    """Return the EPILOGUE_FEATURES of a contraction.

    bias: reads a tensor without some of the output's axes; residual: reads one with all axes; activation: applies a
    function; scale: multiplies by a constant and applies no function; cast: converts the type explicitly.
    """
    features: set[str] = set()
    output_axes = {axis.name for axis in group.outer if axis.extent > 1}
    group_outputs = {statement.output for statement in group.statements}
    for statement in group.statements[group.space.num_accumulators :]:
        nodes = list(iter_subexpressions(statement.body))
        reads = [axes_of(node) & output_axes for node in nodes if isinstance(node, Load) and node.tensor not in group_outputs]
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
        "operands": [
            {"dtype": o.dtype.value, "stored": o.stored.value, "load": o.load}
            for o in family_of(group, program, hw).staging(group, program, hw)
        ],
        **{name: tile_value(program, name) for name in TILES},
        "epilogue": list(epilogue(group)) if is_contraction or group.attention is not None else [],
    }


def _family(program: RProgram, hw: HardwareSpec) -> str:
    """Return the kind of unit that computes the kernel: `cpu`, or a value of `OpClass`."""
    return "cpu" if hw.family is TargetKind.CPU else op_class_of(program.unit).value
