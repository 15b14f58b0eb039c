"""ROLLER's rules for scatters on a GPU: those of single points, and blocks with a private target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roller_svc.construct.rules import ThreadTile
from roller_svc.families.common.gpu.serial_rules import SerialRules
from roller_svc.families.gpu.scatter.workload import ScatterUpdates
from roller_svc.ir.rprogram import DEFAULT_PIPELINE, PipelineOptions
from roller_svc.perf.footprint import Tile


@dataclass(frozen=True, slots=True)
class ScatterRules(SerialRules):
    updates: ScatterUpdates

    def pipeline_choices(self, block: Tile, base: ThreadTile, split_k: int) -> Sequence[PipelineOptions]:
        """Return atomics on the result, and on private targets of several numbers of blocks."""
        private = self.updates.private_blocks(self.workload.machine.hw)
        return (DEFAULT_PIPELINE, *(PipelineOptions(persistent_blocks=blocks) for blocks in private))
