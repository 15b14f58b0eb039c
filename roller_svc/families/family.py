"""A kernel family: one way to compute one kind of kernel group on one kind of compute unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

from roller_svc.analysis.operand import operands
from roller_svc.construct.construct import construct_rprograms, enumerate_rprograms
from roller_svc.construct.rules import Enumerated, Rules
from roller_svc.errors import InvariantError
from roller_svc.fusion.split.reduction import may_split, split_group
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import Construction
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorType
from roller_svc.ir.rprogram import RProgram
from roller_svc.perf.common import Costs, Launch
from roller_svc.perf.model import Model, read_launch
from roller_svc.perf.occupancy import BlockResources
from roller_svc.perf.workload import Workload, prepare_workload

F = TypeVar("F")  # facts: what rules, cost and schedule of the family agree on
Workspaces = tuple[tuple[str, TensorType], ...]


class GroupLaunch(NamedTuple):
    """One of the launches that compute a kernel group.

    `program` is None where the launch's group is ranked by itself. `workspace`: tensors that the program does not name.
    """

    group: KernelGroup
    program: RProgram | None
    workspace: Workspaces = ()


def launch_or_split(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> Iterable[GroupLaunch]:
    """One launch, or two where the reduction is split: partial results, and their combination.

    The group of partial results gets the family that takes it, which may be another one.
    """
    if program.split_k == 1 or not may_split(group):
        return (GroupLaunch(group, program),)
    halves = split_group(group, program)
    partial = replace(halves.partial_program, family="")
    return (GroupLaunch(halves.partial, partial, halves.workspaces), GroupLaunch(halves.combining, None))


class StagedOperand(NamedTuple):
    """How a kernel loads an operand. `load`: `async16`, `vector`, `tma` and the like; None where nothing is staged."""

    dtype: DType
    stored: DType
    load: str | None


def describe_operands(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> Sequence[StagedOperand]:
    """Return a contraction's operands, none of them staged for a matrix unit; nothing of other groups."""
    if group.kind is not GroupKind.CONTRACTION:
        return ()
    return tuple(StagedOperand(o.dtype, o.memory_dtype, None) for o in operands(group))


class Nearest(NamedTuple):
    """The value of a field that is nearest to the one wanted, and why it is not that one; '' where it is."""

    value: int
    reason: str = ""


Knob = Callable[[KernelGroup, Model[F], RProgram, int], Nearest]


def fixed_knob(value: int, reason: str) -> Knob[F]:
    """Return the knob of a field that the family does not vary. `reason` may name the `{unit}`."""

    def search(group: KernelGroup, model: Model[F], program: RProgram, wanted: int) -> Nearest:
        return Nearest(value, "" if wanted == value else reason.format(unit=program.unit.name))

    return search


def accept_all(workload: Workload[F], program: RProgram) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Family(Generic[F]):
    """Functions of one kernel family; no state. See docs/adding.md."""

    # folder below families/, RProgram.family, name in reports: "gpu/wgmma_contraction"
    name: str
    # the workload with the family's facts; None where the group or the unit is not its kind
    prepare: Callable[[KernelGroup, Workload[None]], Workload[F] | None]
    # alignment and capacity rules
    rules: Callable[[Workload[F]], Rules | Enumerated]
    cost: Callable[[Workload[F], Launch], Costs]
    # the rProgram as the cost function reads it
    launch: Callable[[Workload[F], RProgram], Launch] = read_launch
    # the launches of one choice
    launches: Callable[[KernelGroup, RProgram, HardwareSpec], Iterable[GroupLaunch]] = launch_or_split
    # rules of tiles as different as possible, for constraints of a caller; None: `rules`
    varied_rules: Callable[[Workload[F]], Rules] | None = None
    # whether construction may split the reduction
    can_split: bool = True
    # whether the schedule can build tiles that construction did not make
    accepts: Callable[[Workload[F], RProgram], bool] = accept_all
    # operands as the kernel that multiplies loads them, for reports
    staging: Callable[[KernelGroup, RProgram, HardwareSpec], Sequence[StagedOperand]] = describe_operands
    # by field of an RProgram: the nearest value to one that a caller demands, and why not his
    knobs: Mapping[str, Knob[F]] = field(default_factory=dict)

    def model(self, workload: Workload[F]) -> Model[F]:
        return Model(workload, self.cost, self.launch)

    def construct(self, group: KernelGroup, workload: Workload[F], limit: int, *, varied: bool = False) -> Construction:
        """Return at most `limit` aligned rPrograms, unranked. Raises NoCandidateError where no tile fits."""
        make_rules = self.varied_rules if varied and self.varied_rules is not None else self.rules
        rules = make_rules(workload)
        if isinstance(rules, Enumerated):
            return enumerate_rprograms(rules, limit, family=self.name)
        needs = self.model(workload).resources
        return construct_rprograms(group, rules, needs, limit, family=self.name, can_split=self.can_split, varied=varied)

    def predict_resources(self, group: KernelGroup, program: RProgram, hw: HardwareSpec) -> BlockResources | None:
        """Return what the model assumes that a block of the main launch takes; None where there are no blocks."""
        group = replace(group, space=program.space)
        workload = self.prepare(group, prepare_workload(group.space, hw, program.unit))
        if workload is None:
            raise InvariantError(f"{group.name} is not of the family {self.name}")
        return self.model(workload).resources(program)
