"""Nodes that sm_90 adds → lines of CUDA C++: barriers, bulk copies and warpgroup products are calls of wrappers."""

from __future__ import annotations

import math

from roller_svc.codegen.cuda_matrix import called, pointer
from roller_svc.codegen.hopper_instructions import wgmma_wrapper
from roller_svc.codegen.scalar import Scalar
from roller_svc.errors import InvariantError
from roller_svc.ir.expr import Expr
from roller_svc.ir.hopper_nodes import (
    ArriveBarrier,
    AwaitBarrier,
    AwaitBulk,
    AwaitWarpgroup,
    BulkLoad,
    BulkStore,
    ClusterBarrier,
    CommitBulk,
    CommitWarpgroup,
    FenceAsync,
    FenceBarriers,
    FenceWarpgroup,
    HopperNode,
    InitBarrier,
    RegisterMatrix,
    SetRegisters,
    SharedMatrix,
    StoreMatrix,
    WarpBarrier,
    WarpgroupMma,
)

DESCRIPTOR_UNIT_BYTES = 16  # of the address in a matrix descriptor (PTX ISA, "Matrix Descriptor Format")

_PLAIN = {
    FenceBarriers: "fence_barrier_init", CommitBulk: "bulk_commit", FenceAsync: "fence_async",
    FenceWarpgroup: "wgmma_fence", CommitWarpgroup: "wgmma_commit", ClusterBarrier: "cluster_sync",
}  # fmt: skip


def hopper_line(node: HopperNode, scalar: Scalar) -> str:
    """The statement that a node is; the wrapper it calls is noted in `scalar.helpers`."""
    if (name := _PLAIN.get(type(node))) is not None:
        return f"{called(name, scalar)}();"
    match node:
        case InitBarrier(barrier=barrier, index=index, arrivals=arrivals):
            return f"{called('barrier_init', scalar)}({pointer(scalar, barrier, index)}, {arrivals});"
        case ArriveBarrier():
            return _arrive(node, scalar)
        case AwaitBarrier(barrier=barrier, index=index, parity=parity):
            return f"{called('barrier_wait', scalar)}({pointer(scalar, barrier, index)}, {scalar.index(parity)});"
        case BulkLoad():
            return _bulk_load(node, scalar)
        case BulkStore(map=name, coordinates=coordinates, tensor=tensor, index=index):
            places = ", ".join(scalar.index(c) for c in coordinates)
            store = called(f"tma_store_{len(coordinates)}d", scalar)
            return f"{store}(&{scalar.names.of(name)}, {pointer(scalar, tensor, index)}, {places});"
        case StoreMatrix(tensor=tensor, at=at, count=count, source=source, index=index):
            words = f"(const unsigned int *){pointer(scalar, source, index)}"
            return f"{called(f'store_matrix_{count}', scalar)}({pointer(scalar, tensor, at)}, {words});"
        case AwaitBulk(pending=pending, read=read):
            return f"{called('bulk_wait_read' if read else 'bulk_wait', scalar)}<{pending}>();"
        case WarpgroupMma():
            return _product(node, scalar)
        case AwaitWarpgroup():
            return _await_products(node, scalar)
        case SetRegisters(count=count, increase=increase):
            return f"{called('registers_increase' if increase else 'registers_decrease', scalar)}<{count}>();"
        case WarpBarrier():
            return "__syncwarp();"
        case _:
            raise InvariantError(f"{type(node).__name__} has no statement")


def _await_products(node: AwaitWarpgroup, scalar: Scalar) -> str:
    wait = f"{called('wgmma_wait', scalar)}<{node.pending}>();"
    if node.sums is None:
        return wait
    place = scalar.places[node.sums]
    fragments, words = place.shape[0], math.prod(place.shape[1:])
    hold = called(f"hold_results_{words}{'' if place.dtype.is_float else '_s32'}", scalar)
    return " ".join((wait, *(f"{hold}({place.identifier} + {number * words});" for number in range(fragments))))


def _arrive(node: ArriveBarrier, scalar: Scalar) -> str:
    barrier = pointer(scalar, node.barrier, node.index)
    if node.rank is not None:
        return f"{called('barrier_arrive_remote', scalar)}({barrier}, {scalar.index(node.rank)});"
    if node.bytes is not None:
        return f"{called('barrier_expect', scalar)}({barrier}, {node.bytes});"
    return f"{called('barrier_arrive', scalar)}({barrier});"


def _bulk_load(node: BulkLoad, scalar: Scalar) -> str:
    rank = len(node.coordinates)
    mode = "im2col_" if node.offsets else ""
    cast = "multicast" if node.mask is not None else ""
    name = called(f"tma_load_{mode}{rank}d{'_' if cast else ''}{cast}", scalar)
    barrier = pointer(scalar, node.barrier, node.barrier_index)
    room = _plain_pointer(scalar, node.tensor, node.index)
    places = [scalar.index(c) for c in node.coordinates]
    offsets = [f"(unsigned short)({scalar.index(o)})" for o in node.offsets]
    mask = [f"(unsigned short)({scalar.index(node.mask)})"] if node.mask is not None else []
    return f"{name}({', '.join([room, f'&{scalar.names.of(node.map)}', barrier, *places, *offsets, *mask])});"


def _product(node: WarpgroupMma, scalar: Scalar) -> str:
    a, b = node.a, node.b
    sides = ["r" if isinstance(side, RegisterMatrix) else "k" if side.along_k else "m" for side in (a, b)]
    name = called(wgmma_wrapper(node.columns, a.dtype, b.dtype, *sides), scalar)
    place = scalar.places[node.tensor]
    first = scalar.address(place, node.index)
    results = place.identifier if first == "0" else f"{place.identifier} + {first}"
    operands = ", ".join(_operand(side, scalar) for side in (a, b))
    return f"{name}({results}, {operands}, {scalar.index(node.accumulate)});"


def _operand(side: SharedMatrix | RegisterMatrix, scalar: Scalar) -> str:
    """The words of what is in registers, a descriptor of what is in shared memory."""
    if isinstance(side, RegisterMatrix):
        return pointer(scalar, side.tensor, side.index)
    name = called(f"matrix_descriptor_{side.swizzle_bytes}", scalar)
    room = _plain_pointer(scalar, side.tensor, side.index)
    advance = f" + {side.advance_bytes // DESCRIPTOR_UNIT_BYTES}" if side.advance_bytes else ""
    return f"{name}({room}, {side.leading_bytes}, {side.stride_bytes}){advance}"


def _plain_pointer(scalar: Scalar, tensor: str, index: tuple[Expr, ...]) -> str:
    """Where an element would lie if no chunks were permuted: bulk copies and products permute by themselves."""
    place = scalar.places[tensor]
    terms = [
        text if stride == 1 else f"{text} * {stride}"
        for i, stride in zip(index, place.strides, strict=True)
        if (text := scalar.index(i)) != "0"
    ]
    return " + ".join([place.identifier, *terms])
