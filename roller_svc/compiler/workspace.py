"""Rank candidates whose workspaces fit a limit."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from roller_svc.compiler.lower_and_emit import lower_launches
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import RankedPartition, RankedPartitions, best_plans, rank_partitions
from roller_svc.errors import NoCandidateError
from roller_svc.families import stored_tensors
from roller_svc.ir.constraints import ScheduleConstraints
from roller_svc.ir.estimate import Candidate
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.kernel import ALIGNMENT_BYTES
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.rprogram import RProgram


def rank_within(
    cache: PartitionCache, hw: HardwareSpec, top_k: int, constraints: ScheduleConstraints, most_bytes: int | None
) -> RankedPartitions:
    """Rank the candidates of all fusion alternatives whose workspaces fit a limit; all of them without one."""
    if most_bytes is None:
        return rank_partitions(cache, hw, top_k, constraints)
    return limit_workspace(rank_partitions(cache, hw, sys.maxsize, constraints), cache.program, hw, most_bytes)


def limit_workspace(partitions: RankedPartitions, program: TensorProgram, hw: HardwareSpec, most_bytes: int) -> RankedPartitions:
    """Return the partitions with the candidates of which any combination fits, the best predicted plan first.

    Raises NoCandidateError if no plan fits.
    """
    needs = [_Needs.of(ranked, program, hw) for ranked in partitions]
    least_bytes = min(each.least_bytes for each in needs)
    if least_bytes > most_bytes:
        raise NoCandidateError(
            f"no plan fits max_workspace_bytes={most_bytes}: the least workspace of a plan is {least_bytes} bytes",
            rejections={"max_workspace_bytes": sum(len(own) for each in needs for own in each.own_bytes)},
            hint=f"give max_workspace_bytes={least_bytes} or more, or leave it out",
        )
    fitting = [each.within(most_bytes) for each in needs if each.least_bytes <= most_bytes]
    return tuple(sorted(fitting, key=lambda ranked: best_plans(ranked.candidates, 1)[0].ranking_seconds))


@dataclass(frozen=True, slots=True)
class _Needs:
    """The workspace of a partition's candidates."""

    ranked: RankedPartition
    shared_bytes: int  # tensors between the groups, in every plan
    own_bytes: tuple[tuple[int, ...], ...]  # of each group's candidates

    @classmethod
    def of(cls, ranked: RankedPartition, program: TensorProgram, hw: HardwareSpec) -> _Needs:
        outside = {name for name, _ in program.inputs} | {output.tensor for output in program.outputs}
        shared = {name: type_ for group in ranked.groups for name, type_ in group.stored if name not in outside}
        known = outside | shared.keys()
        own = (
            tuple(_total_bytes(_workspaces(group, each.program, program, hw), known) for each in candidates)
            for group, candidates in zip(ranked.groups, ranked.candidates, strict=True)
        )
        return cls(ranked, _total_bytes(shared, outside), tuple(own))

    @property
    def least_bytes(self) -> int:
        return self.shared_bytes + sum(map(min, self.own_bytes))

    def within(self, most_bytes: int) -> RankedPartition:
        """Return the partition with the candidates of which any combination fits.

        The group that takes longest in a call chooses first, and gets what the others leave. Those that run once are last.
        """
        candidates = self.ranked.candidates
        slack = most_bytes - self.least_bytes
        best = [own[0] for own in candidates]
        longest_first = sorted(range(len(best)), key=lambda g: (best[g].runs_once, -best[g].ranking_seconds))
        allowed = [min(own) for own in self.own_bytes]
        for g in longest_first:
            chosen = next(size for size in self.own_bytes[g] if size <= allowed[g] + slack)
            slack -= chosen - allowed[g]
            allowed[g] = chosen
        allowed[longest_first[0]] += slack
        return self.ranked._replace(candidates=tuple(map(_at_most, candidates, self.own_bytes, allowed)))


def _at_most(candidates: tuple[Candidate, ...], own_bytes: tuple[int, ...], allowed: int) -> tuple[Candidate, ...]:
    return tuple(each for each, size in zip(candidates, own_bytes, strict=True) if size <= allowed)


def _workspaces(group: KernelGroup, tiles: RProgram, program: TensorProgram, hw: HardwareSpec) -> Mapping[str, TensorType]:
    """Return the tensors that the launches of a group write and read in memory."""
    if hw.family is TargetKind.CPU and group.constants:  # lowering finds what is prepacked
        return {name: type_ for part, more in lower_launches(group, tiles, program, hw) for name, type_ in (*part.views, *more)}
    return stored_tensors(group, tiles, hw)


def _total_bytes(tensors: Mapping[str, TensorType], known: set[str]) -> int:
    """Return the size of an allocation for the tensors that are not known."""
    sizes = (type_.bytes for name, type_ in tensors.items() if name not in known)
    return sum(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes)
