"""Which groups are scatters on a GPU, and how their updates meet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from roller_svc.ir.expr import AxisRef
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorExpr
from roller_svc.perf.occupancy import BlockResources, blocks_per_core
from roller_svc.perf.workload import Workload

PRIVATE_BYTES = 48 << 10  # most of a target that each block reduces in shared memory first: without an opt-in
PRIVATE_THREADS = 512  # of a block with a private target
PRIVATE_UNROLL = 4  # updates of a thread whose loads are issued together
PRIVATE_REGISTERS = 40


@dataclass(frozen=True, slots=True)
class ScatterUpdates:
    """The updates of a scatter."""

    count: int
    target_bytes: int
    element_bytes: int
    adjacent: int  # successive updates that write successive elements
    is_atomic: bool
    is_private: bool  # whether a block may reduce its updates in shared memory first
    is_native: bool  # whether shared memory reduces them without compare-and-swap

    @property
    def elements(self) -> int:
        return self.target_bytes // self.element_bytes

    def private_blocks(self, hw: HardwareSpec) -> Sequence[int]:
        """Return the numbers of blocks with a private target: those that are resident, or one for each core."""
        if not self.is_private or self.target_bytes > hw.limits.shared_bytes_per_block:
            return ()
        resident = blocks_per_core(BlockResources(PRIVATE_THREADS, PRIVATE_REGISTERS, self.target_bytes), hw)
        most = -(-self.count // (PRIVATE_THREADS * PRIVATE_UNROLL))
        return tuple(dict.fromkeys([min(most, hw.num_cores * resident), min(most, hw.num_cores)]))


def prepare(group: KernelGroup, base: Workload[None]) -> Workload[ScatterUpdates] | None:
    if not base.machine.is_gpu or group.kind is not GroupKind.SCATTER:
        return None
    return base.with_facts(_updates(group.statements[0]))


def _updates(statement: TensorExpr) -> ScatterUpdates:
    dtype, combine = statement.type.dtype, statement.combine
    last = statement.index[-1] if statement.index else None
    follows = isinstance(last, AxisRef) and last.name == statement.axes[-1].name
    return ScatterUpdates(
        count=statement.points,
        target_bytes=statement.type.bytes,
        element_bytes=dtype.bytes,
        adjacent=statement.axes[-1].extent if follows else 1,
        is_atomic=combine is not None,
        is_private=combine is not None
        and dtype.bits >= 32
        and math.prod(statement.type.shape) > 1
        and statement.type.bytes <= PRIVATE_BYTES,
        is_native=not dtype.is_float and dtype.bits == 32,
    )
