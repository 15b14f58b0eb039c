"""Draw random rPrograms that satisfy the rules, good and bad ones.

Construction keeps only tiles that its heuristics and the model prefer. Random tiles show whether the model tells good
tiles from bad ones.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from roller_svc.construct.align import EPSILONS
from roller_svc.construct.construct import MAX_VISITS, rprogram_of
from roller_svc.construct.rules import Enumerated, Rules, Shape, ThreadTile
from roller_svc.construct.scale_out import split_k_choices
from roller_svc.construct.scale_up import SearchTrace, scale_up
from roller_svc.errors import NoCandidateError
from roller_svc.families import prepare
from roller_svc.families.cpu.convolution.rules import CpuConvolutionRules
from roller_svc.families.cpu.transpose.rules import TransposeRules
from roller_svc.families.family import Family
from roller_svc.families.matching import unit_views, units_for
from roller_svc.fusion.split.reduction import may_split
from roller_svc.ir.constraints import NO_CONSTRAINTS
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.rprogram import RProgram
from roller_svc.perf.footprint import Tile

TRIES = 10  # draws for each wanted rProgram: some are duplicates, some thread tiles have no block


def random_rprograms(group: KernelGroup, hw: HardwareSpec, count: int, rng: random.Random) -> tuple[RProgram, ...]:
    """Return at most `count` distinct rPrograms.

    A view of the group, a thread tile, a block tile and pipeline options are drawn in this order. Each thread tile is
    equally likely, whatever the number of its block tiles. Views without rules are skipped.
    """
    views: list[_View] = []
    for unit, view in unit_views(group, hw, units_for(group, hw, NO_CONSTRAINTS)):
        with suppress(NoCandidateError):
            family, workload = prepare(view, hw, unit)
            rules = family.rules(workload)
            if not isinstance(rules, Enumerated):
                views.append(_View(view, family, rules))
    programs: dict[RProgram, None] = {}
    for _ in range(TRIES * count if views else 0):
        if len(programs) < count:
            programs.update(dict.fromkeys(rng.choice(views).draw(rng)))
    return tuple(programs)


@dataclass(slots=True)
class _View:
    """One view of a group, with caches of its tiles."""

    group: KernelGroup
    family: Family[Any]
    rules: Rules
    _bases: tuple[ThreadTile, ...] = ()
    _blocks: dict[ThreadTile, tuple[Tile, ...]] = field(default_factory=dict)

    def draw(self, rng: random.Random) -> tuple[RProgram, ...]:
        """Draw one rProgram, or none if the drawn thread tile has no block tile."""
        self._bases = self._bases or _bases(self.rules)
        if not self._bases:
            return ()
        base = rng.choice(self._bases)
        if base not in self._blocks:
            grown = scale_up(self.rules.block_level(base, EPSILONS[-1]), _trace(self.rules), MAX_VISITS)
            self._blocks[base] = (*grown.saturated, *grown.border)
        if not self._blocks[base]:
            return ()
        block = rng.choice(self._blocks[base])
        split_k = rng.choice(self._splits(block))
        way = rng.choice(self.rules.pipeline_choices(block, base, split_k))
        if way.stream_k_blocks and self.group.forbids_split_k:
            return ()
        return (rprogram_of(self.rules.workload, Shape(block, base, split_k, way), self.family.name),)

    def _splits(self, block: Tile) -> tuple[int, ...]:
        p = self.rules.workload
        if not self.family.can_split or not may_split(self.group):
            return (1,)
        return (1, *split_k_choices(p, block))


def _trace(rules: Rules) -> SearchTrace:
    """Return a trace that nothing reads."""
    return SearchTrace(MAX_VISITS, rules.workload, "")


def _bases(rules: Rules) -> tuple[ThreadTile, ...]:
    """Return all thread tiles that fit the registers; scale-up finds only few for some families."""
    if isinstance(rules, CpuConvolutionRules):
        return tuple(ThreadTile(tile) for tile in rules.register_tiles())
    if isinstance(rules, TransposeRules):
        return tuple(ThreadTile(tile) for tile in rules.any_tiles())
    bases: list[ThreadTile] = []
    for reduce_threads in rules.reduce_thread_choices():
        grown = scale_up(rules.thread_level(reduce_threads), _trace(rules), MAX_VISITS)
        bases += [ThreadTile(tile, reduce_threads) for tile in (*grown.saturated, *grown.border)]
    return tuple(bases)
