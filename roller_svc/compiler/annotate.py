"""Say where the numbers and the parts of a kernel's source come from.

The generator prints the plan of a kernel again, with tiles that know their names (`ir/origin.py`). What it marks holds
for the source only if the text without marks is that source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from roller_svc.compiler.as_schedule import ConstructedPlan
from roller_svc.compiler.explain import parse_request
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.request import read_request, resolve_spec
from roller_svc.errors import InputError, InvariantError
from roller_svc.ir import canonical
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.origin import MarkedText, Number, TextPart, marking, named, read_marks
from roller_svc.ir.report import BuildRequest, Plan
from roller_svc.ir.rprogram import PipelineOptions, RProgram, RTile

BY_HAND = "a schedule by hand has no tiles"
NO_REQUEST = "the kernel does not say how it was built"
OTHER_TEXT = "this version writes another text for the tiles of the kernel"
NOT_WRITTEN = "the tiles of the kernel cannot be written again"


@dataclass(frozen=True, slots=True)
class Annotations:
    """The parts of a source, and its numbers that come from a tile, a stage or a layout."""

    parts: tuple[TextPart, ...] = ()
    numbers: tuple[Number, ...] = ()
    note: str = ""  # why there are none


@dataclass(frozen=True, slots=True)
class WrittenKernel:
    """The source of a saved kernel, and what it was written from."""

    source: str
    name: str
    plan: Mapping[str, Any] | None
    request: Mapping[str, Any] | None  # a body of kernels:compile
    programmatic: bool = False  # as a kernel of a model: launches may start before those before them end


def annotate(kernel: WrittenKernel) -> Annotations:
    """Return where the numbers and the parts of a kernel's source come from."""
    if kernel.request is None:
        return Annotations(note=NO_REQUEST)
    try:
        request = _read(kernel.request)
        if request.schedule is not None:
            return Annotations(note=BY_HAND)
        constructed = _read_plan(kernel, request)
    except (InputError, InvariantError):  # what another version has saved
        return Annotations(note=OTHER_TEXT)
    try:
        marked = _write_again(constructed)
    except InvariantError as error:
        return Annotations(note=f"{NOT_WRITTEN}: {error}")
    if marked.text != kernel.source:
        return Annotations(note=OTHER_TEXT)
    return Annotations(marked.parts, marked.numbers)


def _read_plan(kernel: WrittenKernel, request: BuildRequest) -> ConstructedPlan:
    """Return the plan of a kernel with the groups that it computes. Raises InputError, InvariantError."""
    forms, hw = parse_request(request), resolve_spec(request)
    plan = canonical.from_json(Plan, kernel.plan)
    groups = PartitionCache.of_forms(forms).partition_of_plan(plan, hw, request.constraints)
    program = replace(forms[0], name=kernel.name, programmatic=kernel.programmatic)
    return ConstructedPlan(program, plan, groups, hw)


def _write_again(made: ConstructedPlan) -> MarkedText:
    """Print the source of a plan with marks, and take them out."""
    with marking() as marks:
        choices = tuple(replace(choice, program=name_tiles(choice.program, made.hardware)) for choice in made.plan.choices)
        text = emit_plan(replace(made.plan, choices=choices), made.program, made.groups, made.hardware).text
    return read_marks(text, marks)


def _read(body: Mapping[str, Any]) -> BuildRequest:
    device = {name: body[name] for name in ("target", "hardware") if name in body}
    return read_request(body["expression"], body["inputs"], outputs=body.get("outputs"), **device, **body["options"])


def name_tiles(program: RProgram, hw: HardwareSpec) -> RProgram:
    """Return an rProgram whose extents know their names: `shared.m` of a tile, `m` of the whole axis, `stages`."""
    axes = tuple(
        replace(axis, members=tuple(replace(each, extent=named(each.extent, each.name)) for each in axis.members))
        for axis in program.space.axes
    )
    block, thread = (
        RTile(tuple((name, named(extent, f"{level}.{name}")) for name, extent in tile.extents))
        for level, tile in zip(hw.tile_levels, (program.block, program.thread), strict=True)
    )
    return replace(
        program,
        space=replace(program.space, axes=axes),
        block=block,
        thread=thread,
        reduce_threads=named(program.reduce_threads, "lanes"),
        split_k=named(program.split_k, "split_k"),
        pipeline=_name_pipeline(program.pipeline),
    )


def _name_pipeline(pipeline: PipelineOptions) -> PipelineOptions:
    rows, columns = pipeline.cluster
    return replace(
        pipeline,
        stages=named(pipeline.stages, "stages"),
        raster=named(pipeline.raster, "raster"),
        stream_k_blocks=named(pipeline.stream_k_blocks, "stream_k"),
        persistent_blocks=named(pipeline.persistent_blocks, "blocks"),
        cluster=(named(rows, "cluster_m"), named(columns, "cluster_n")),
        cluster_k=named(pipeline.cluster_k, "cluster_k"),
    )
