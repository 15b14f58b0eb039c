"""The JSON form of rPrograms in saved kernels."""

from __future__ import annotations

from roller_svc.ir.canonical import from_json, to_json
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import TileSpace
from roller_svc.ir.hardware import ComputeUnit, UnitKind
from roller_svc.ir.rprogram import PipelineOptions, RProgram, RTile

UNIT = ComputeUnit("fma", UnitKind.FMA, (), DType.FLOAT32, DType.FLOAT32, 1e12)
SPACE = TileSpace((), (), 1, DType.FLOAT32, "")


def test_the_fields_of_the_pipeline_stand_among_the_others() -> None:
    program = RProgram(SPACE, UNIT, RTile(()), RTile(()), pipeline=PipelineOptions(stages=3, cluster=(2, 1)))
    document = to_json(program)
    assert set(document) == {
        "space",
        "unit",
        "block",
        "thread",
        "reduce_threads",
        "split_k",
        "stages",
        "raster",
        "stream_k_blocks",
        "nontemporal",
        "persistent_blocks",
        "cluster",
        "family",
        "pingpong",
        "cluster_k",
    }
    assert (document["stages"], document["cluster"]) == (3, [2, 1])
    assert from_json(RProgram, document) == program
