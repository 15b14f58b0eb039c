"""Kernels of models as rTasks of one kernel: what a cached kernel stores for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from roller_svc.codegen.cuda.ring import PageUse
from roller_svc.codegen.kernel import Tasks
from roller_svc.compiler.artifact import load_plan
from roller_svc.compiler.explain import parse_request
from roller_svc.compiler.lower_and_emit import emit_plan_tasks, find_page_uses, find_plan_refusal
from roller_svc.errors import InvariantError, require
from roller_svc.families.matching import can_stream
from roller_svc.hardware.catalog import load
from roller_svc.ir import canonical
from roller_svc.ir.canonical import OMIT_DEFAULT
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.report import BuildRequest, CandidateResult
from roller_svc.runtime.saved.serialization import KernelBundle

KEY = "tasks"  # in the bundle's values beside its plan
UNKNOWN = "its kernel was stored without its groups"
SPILLS = "its kernel spills registers, and so would the kernel of all"


@dataclass(frozen=True, slots=True)
class StoredTasks:
    """The groups that make rTasks of a kernel's plan, or why it cannot have them."""

    groups: tuple[KernelGroup, ...] = ()
    refused: Annotated[str | None, OMIT_DEFAULT] = None
    streams: Annotated[tuple[PageUse | None, ...], OMIT_DEFAULT] = ()  # of each launch; empty: none can stream


def store_tasks(bundle: KernelBundle, built: CandidateResult, program: TensorProgram, hw: HardwareSpec) -> KernelBundle:
    """Return the bundle of a candidate with what makes rTasks of it later."""
    refused = find_plan_refusal(built.plan, program, built.groups, hw)
    uses = () if refused else find_page_uses(built.plan, program, built.groups, hw)
    stored = StoredTasks(() if refused else built.groups, refused, uses)
    return replace(bundle, extra={**bundle.extra, KEY: canonical.to_json(stored)})


def find_bundle_refusal(bundle: KernelBundle) -> str | None:
    """Return why the launches of a kernel cannot be rTasks; None if they can."""
    stored = bundle.extra.get(KEY)
    if not isinstance(stored, dict):
        return UNKNOWN
    if any(used.spill_bytes for used in bundle.compiled.resources):
        return SPILLS
    refused = stored.get("refused")  # the groups, which take longer to read, are not needed
    return None if refused is None else str(refused)


def may_stream(bundle: KernelBundle, hw: HardwareSpec) -> bool:
    """Return whether a kernel of the bundle's groups may stream a matrix; True if its groups are not known."""
    stored = canonical.from_json(StoredTasks, bundle.extra[KEY]) if KEY in bundle.extra else StoredTasks()
    return not stored.groups or any(can_stream(group, hw) for group in stored.groups)


def find_bundle_page_uses(bundle: KernelBundle) -> tuple[PageUse | None, ...]:
    """Return how each launch of a kernel can use the pages of a ring; empty if no launch can."""
    stored = bundle.extra.get(KEY)
    if not isinstance(stored, dict) or not stored.get("streams"):
        return ()
    return canonical.from_json(StoredTasks, stored).streams


def load_tasks(bundle: KernelBundle, request: BuildRequest, first_check: int) -> tuple[Tasks, ...]:
    """Return the launches of a kernel as rTasks, without those that prepack. `first_check`: number of their first check.

    Raises InvariantError for a kernel that has no rTasks, and for rTasks that are not those of its launches.
    """
    stored = canonical.from_json(StoredTasks, bundle.extra.get(KEY))
    plan, hw = require(load_plan(bundle), "plan of a kernel"), request.hardware or load(request.target)
    tasks, _ = emit_plan_tasks(plan, parse_request(request)[0], stored.groups, hw, first_check)
    launches = [launch for launch in bundle.compiled.source.launches if not launch.is_prepack]
    expected = [(launch.args, launch.grid, launch.block) for launch in launches]
    given = [
        (tuple(each.symbol for each in task.args), (task.function.tasks, 1, 1), (task.function.threads, 1, 1)) for task in tasks
    ]
    if given != expected:
        raise InvariantError(f"the rTasks of {bundle.compiled.source.name} are {given}, expected {expected}")
    return tasks
