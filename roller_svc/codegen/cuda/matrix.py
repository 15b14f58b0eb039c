"""Nodes that sm_90 adds → lines of CUDA C++: barriers, bulk copies and warpgroup products are calls of wrappers.

Nodes of tensor cores → lines of CUDA C++: copies, fragments and multiplications are calls of named wrappers.
"""

from __future__ import annotations

import math

from roller_svc.codegen.cuda.hopper_instructions import wgmma_wrapper
from roller_svc.codegen.cuda.instructions import AMPERE, instruction, mma_wrapper
from roller_svc.codegen.dialect import SHORT
from roller_svc.codegen.scalar import Scalar
from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr
from roller_svc.ir.hardware import Arch
from roller_svc.ir.schedule import (
    CpAsync,
    CpAsyncCommitGroup,
    CpAsyncWaitGroup,
    Exp2,
    LoadMatrix,
    Mma,
    PackFragment,
    RoundFragment,
)
from roller_svc.ir.schedule_hopper import (
    ClusterBarrier,
    FenceMbarrierInit,
    FenceProxyAsync,
    HopperNode,
    MbarrierArrive,
    MbarrierInit,
    MbarrierWait,
    RegisterMatrix,
    SetMaxNReg,
    SharedMatrix,
    StoreMatrix,
    TmaLoad,
    TmaStore,
    TmaStoreCommitGroup,
    TmaStoreWaitGroup,
    WarpBarrier,
    WarpgroupMma,
    WgmmaCommitGroup,
    WgmmaFence,
    WgmmaWaitGroup,
)

MatrixNode = CpAsync | CpAsyncCommitGroup | CpAsyncWaitGroup | LoadMatrix | RoundFragment | PackFragment | Exp2 | Mma


def matrix_lines(node: MatrixNode, scalar: Scalar, arch: Arch) -> list[str]:
    """What a node prints; the wrappers it calls are noted in `scalar.helpers`."""
    match node:
        case CpAsync():
            return [_copy(node, scalar, arch)]
        case CpAsyncCommitGroup():
            return [f"{called('commit_copies', scalar)}();"]
        case CpAsyncWaitGroup(pending=pending):
            return [f"{called('await_copies', scalar)}<{pending}>();"]
        case LoadMatrix():
            return [_load_matrix(node, scalar)]
        case RoundFragment():
            name = called("round_tf32", scalar)
            words = [f"{_word(scalar, node.tensor, node.index)}[{i}]" for i in range(node.count)]
            if scalar.places[node.tensor].dtype.is_float:
                return [f"{word} = __uint_as_float({name}(__float_as_uint({word})));" for word in words]
            return [f"{word} = {name}({word});" for word in words]
        case Mma():
            name = called(mma_wrapper(node.a_dtype, node.b_dtype, arch), scalar)
            operands = ((node.tensor, node.index), (node.a, node.a_index), (node.b, node.b_index))
            return [f"{name}({', '.join(_word(scalar, tensor, index) for tensor, index in operands)});"]
        case PackFragment():
            name = called(f"pack_{SHORT[node.dtype]}", scalar)
            pair = pointer(scalar, node.first.tensor, node.first.index)
            return [f"{_element(scalar, node.tensor, node.index)} = {name}({pair}[0], {pair}[1]);"]
        case Exp2():
            value = _element(scalar, node.tensor, node.index)
            return [f"{value} = {called('exp2_approx', scalar)}({value});"]
        case _:
            raise InvariantError(f"{type(node).__name__} is no node of tensor cores")


def _copy(node: CpAsync, scalar: Scalar, arch: Arch) -> str:
    if arch < AMPERE:
        raise InvariantError(f"{arch} has no asynchronous copies")
    source = scalar.places[node.source.tensor]
    name = called(f"copy_async_{node.elements * source.dtype.bytes}", scalar)
    target = pointer(scalar, node.tensor, node.index)
    if node.guard is None:
        return f"{name}({target}, {pointer(scalar, node.source.tensor, node.source.index)}, true);"
    # beyond the edge the address may lie outside: the first element's stands in for one that is not read
    guard = scalar.value(node.guard)
    address = scalar.address(source, node.source.index)
    return f"{name}({target}, {source.identifier} + ({guard} ? {address} : 0), {guard});"


def _load_matrix(node: LoadMatrix, scalar: Scalar) -> str:
    words = _word(scalar, node.tensor, node.index)
    if node.transposed and scalar.places[node.source].dtype.bits == DType.UINT32.bits:
        return f"*{words} = __float_as_uint(*{pointer(scalar, node.source, node.source_index)});"
    suffix = "_transposed" if node.transposed else ""
    name = called(f"load_matrix_{node.count}{suffix}", scalar)
    return f"{name}({words}, {pointer(scalar, node.source, node.source_index)});"


def _word(scalar: Scalar, tensor: str, index: tuple[Expr, ...]) -> str:
    """Pointer to the first word of a fragment, whose last dimension the index leaves out."""
    place = scalar.places[tensor]
    terms = zip(index, place.strides, strict=False)
    offset = " + ".join(f"{scalar.index(i)} * {stride}" for i, stride in terms)
    return f"({place.identifier} + {offset})" if offset else place.identifier


def _element(scalar: Scalar, tensor: str, index: tuple[Expr, ...]) -> str:
    place = scalar.places[tensor]
    return f"{place.identifier}[{scalar.address(place, index)}]"


def pointer(scalar: Scalar, tensor: str, index: tuple[Expr, ...]) -> str:
    """The address of an element, in parentheses."""
    place = scalar.places[tensor]
    return f"({place.identifier} + {scalar.address(place, index)})"


def called(name: str, scalar: Scalar) -> str:
    """The name of a wrapper, which is printed above the kernel from now on, and before it what it needs."""
    found = instruction(name)
    if found is None:
        raise InvariantError(f"no instruction {name}")
    for needed in found.needs:
        called(needed, scalar)
    scalar.helpers[name] = None
    return name


DESCRIPTOR_UNIT_BYTES = 16  # of the address in a matrix descriptor (PTX ISA, "Matrix Descriptor Format")

_PLAIN = {
    FenceMbarrierInit: "fence_barrier_init", TmaStoreCommitGroup: "bulk_commit", FenceProxyAsync: "fence_async",
    WgmmaFence: "wgmma_fence", WgmmaCommitGroup: "wgmma_commit", ClusterBarrier: "cluster_sync",
}  # fmt: skip


def hopper_line(node: HopperNode, scalar: Scalar) -> str:
    """The statement that a node is; the wrapper it calls is noted in `scalar.helpers`."""
    if (name := _PLAIN.get(type(node))) is not None:
        return f"{called(name, scalar)}();"
    match node:
        case MbarrierInit(barrier=barrier, index=index, arrivals=arrivals):
            return f"{called('barrier_init', scalar)}({pointer(scalar, barrier, index)}, {arrivals});"
        case MbarrierArrive():
            return _arrive(node, scalar)
        case MbarrierWait(barrier=barrier, index=index, parity=parity):
            return f"{called('barrier_wait', scalar)}({pointer(scalar, barrier, index)}, {scalar.index(parity)});"
        case TmaLoad():
            return _bulk_load(node, scalar)
        case TmaStore(tensor_map=name, coordinates=coordinates, tensor=tensor, index=index):
            places = ", ".join(scalar.index(c) for c in coordinates)
            store = called(f"tma_store_{len(coordinates)}d", scalar)
            return f"{store}(&{scalar.names.of(name)}, {pointer(scalar, tensor, index)}, {places});"
        case StoreMatrix(tensor=tensor, index=at, count=count, source=source, source_index=index):
            words = f"(const unsigned int *){pointer(scalar, source, index)}"
            return f"{called(f'store_matrix_{count}', scalar)}({pointer(scalar, tensor, at)}, {words});"
        case TmaStoreWaitGroup(pending=pending, read=read):
            return f"{called('bulk_wait_read' if read else 'bulk_wait', scalar)}<{pending}>();"
        case WarpgroupMma():
            return _product(node, scalar)
        case WgmmaWaitGroup():
            return _await_products(node, scalar)
        case SetMaxNReg(count=count, increase=increase):
            return f"{called('registers_increase' if increase else 'registers_decrease', scalar)}<{count}>();"
        case WarpBarrier():
            return "__syncwarp();"
        case _:
            raise InvariantError(f"{type(node).__name__} has no statement")


def _await_products(node: WgmmaWaitGroup, scalar: Scalar) -> str:
    wait = f"{called('wgmma_wait', scalar)}<{node.pending}>();"
    if node.accumulator is None:
        return wait
    place = scalar.places[node.accumulator]
    fragments, words = place.shape[0], math.prod(place.shape[1:])
    hold = called(f"hold_results_{words}{'' if place.dtype.is_float else '_s32'}", scalar)
    return " ".join((wait, *(f"{hold}({place.identifier} + {number * words});" for number in range(fragments))))


def _arrive(node: MbarrierArrive, scalar: Scalar) -> str:
    barrier = pointer(scalar, node.barrier, node.index)
    if node.rank is not None:
        return f"{called('barrier_arrive_remote', scalar)}({barrier}, {scalar.index(node.rank)});"
    if node.expect_tx_bytes is not None:
        return f"{called('barrier_expect', scalar)}({barrier}, {node.expect_tx_bytes});"
    return f"{called('barrier_arrive', scalar)}({barrier});"


def _bulk_load(node: TmaLoad, scalar: Scalar) -> str:
    rank = len(node.coordinates)
    mode = "im2col_" if node.offsets else ""
    cast = "multicast" if node.multicast_mask is not None else ""
    name = called(f"tma_load_{mode}{rank}d{'_' if cast else ''}{cast}", scalar)
    barrier = pointer(scalar, node.barrier, node.barrier_index)
    room = _plain_pointer(scalar, node.tensor, node.index)
    places = [scalar.index(c) for c in node.coordinates]
    offsets = [f"(unsigned short)({scalar.index(o)})" for o in node.offsets]
    mask = [f"(unsigned short)({scalar.index(node.multicast_mask)})"] if node.multicast_mask is not None else []
    return f"{name}({', '.join([room, f'&{scalar.names.of(node.tensor_map)}', barrier, *places, *offsets, *mask])});"


def _product(node: WarpgroupMma, scalar: Scalar) -> str:
    a, b = node.a, node.b
    sides = ["r" if isinstance(side, RegisterMatrix) else "k" if side.k_major else "m" for side in (a, b)]
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
