"""Nodes of tensor cores and of sm_90 → statements of CUDA C++, which call wrappers of instructions."""

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
from roller_svc.ir.origin import named, shown
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
    NamedBarrier,
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
    """Return the statements of a node, and add the wrappers they call to `scalar.helpers`."""
    match node:
        case CpAsync():
            return [_copy(node, scalar, arch)]
        case CpAsyncCommitGroup():
            return [f"{call_wrapper('commit_copies', scalar)}();"]
        case CpAsyncWaitGroup(pending=pending):
            return [f"{call_wrapper('await_copies', scalar)}<{shown(pending)}>();"]
        case LoadMatrix():
            return [_load_matrix(node, scalar)]
        case RoundFragment():
            name = call_wrapper("round_tf32", scalar)
            words = [f"{_word(scalar, node.tensor, node.index)}[{i}]" for i in range(node.count)]
            if scalar.buffers[node.tensor].dtype.is_float:
                return [f"{word} = __uint_as_float({name}(__float_as_uint({word})));" for word in words]
            return [f"{word} = {name}({word});" for word in words]
        case Mma():
            return [_mma(node, scalar, arch)]
        case PackFragment():
            name = call_wrapper(f"pack_{SHORT[node.dtype]}", scalar)
            pair = pointer(scalar, node.first.tensor, node.first.index)
            return [f"{_element(scalar, node.tensor, node.index)} = {name}({pair}[0], {pair}[1]);"]
        case Exp2():
            value = _element(scalar, node.tensor, node.index)
            return [f"{value} = {scalar.helper('exp2_approx')}({value});"]
        case _:
            raise InvariantError(f"{type(node).__name__} is not a node of tensor cores")


def _mma(node: Mma, scalar: Scalar, arch: Arch) -> str:
    name = call_wrapper(mma_wrapper(node.a_dtype, node.b_dtype, arch), scalar)
    sums = _word(scalar, node.tensor, node.index)
    if node.a_below is None:
        return f"{name}({sums}, {_word(scalar, node.a, node.a_index)}, {_word(scalar, node.b, node.b_index)});"
    above, below = (_words(scalar, node.a, index) for index in (node.a_index, node.a_below))
    a_words = scalar.names.of(".fragment")
    words = ", ".join(f"{rows}[{word}]" for word in range(MMA_WORDS // 2) for rows in (above, below))
    call = f"{name}({sums}, {a_words}, {_words(scalar, node.b, node.b_index)});"
    return f"{{ const unsigned int {a_words}[{MMA_WORDS}] = {{{words}}}; {call} }}"


def _words(scalar: Scalar, tensor: str, index: tuple[Expr, ...]) -> str:
    """Return a pointer to the first word of an operand's fragment, which may be registers of narrower elements."""
    pointer_text = _word(scalar, tensor, index)
    is_narrow = scalar.buffers[tensor].dtype.bits < DType.UINT32.bits
    return f"((const unsigned int *){pointer_text})" if is_narrow else pointer_text


def _copy(node: CpAsync, scalar: Scalar, arch: Arch) -> str:
    if arch < AMPERE:
        raise InvariantError(f"{arch} has no asynchronous copies")
    source = scalar.buffers[node.source.tensor]
    name = call_wrapper(f"copy_async_{node.elements * source.dtype.bytes}", scalar)
    target = pointer(scalar, node.tensor, node.index)
    if any(node.source.bounds_checked):
        return _gather(node, scalar, f"{name}({target}, ")
    if node.guard is None:
        return f"{name}({target}, {pointer(scalar, node.source.tensor, node.source.index)}, true);"
    # the address may be out of bounds where the guard fails: use that of the first element, which is not read
    guard = scalar.value(node.guard)
    address = scalar.address(source, node.source.index)
    return f"{name}({target}, {source.identifier} + ({guard} ? {address} : 0), {guard});"


def _gather(node: CpAsync, scalar: Scalar, call: str) -> str:
    """Return a copy from a position that is data: one out of range is recorded, and zeros are written."""
    source, load = scalar.buffers[node.source.tensor], node.source
    tests = [] if node.guard is None else [scalar.value(node.guard)]
    tests += [
        scalar.in_range(load.tensor, d, source.shape[d], load.index[d])
        for d, is_checked in enumerate(load.bounds_checked)
        if is_checked
    ]
    inside = scalar.names.of(".inside")
    address = scalar.address(source, load.index)
    copy = f"{call}{source.identifier} + ({inside} ? {address} : 0), {inside});"
    return f"{{ const bool {inside} = {' && '.join(tests)}; {copy} }}"


def _load_matrix(node: LoadMatrix, scalar: Scalar) -> str:
    words = _word(scalar, node.tensor, node.index)
    if node.transposed and scalar.buffers[node.source].dtype.bits == DType.UINT32.bits:
        return f"*{words} = __float_as_uint(*{pointer(scalar, node.source, node.source_index)});"
    suffix = "_transposed" if node.transposed else ""
    name = call_wrapper(f"load_matrix_{node.count}{suffix}", scalar)
    return f"{name}({words}, {pointer(scalar, node.source, node.source_index)});"


def _word(scalar: Scalar, tensor: str, index: tuple[Expr, ...]) -> str:
    """Return a pointer to the first word of a fragment; the index omits the last dimension."""
    buffer = scalar.buffers[tensor]
    terms = zip(index, buffer.strides, strict=False)
    offset = " + ".join(f"{scalar.index(i)} * {shown(stride)}" for i, stride in terms)
    return f"({buffer.identifier} + {offset})" if offset else buffer.identifier


def _element(scalar: Scalar, tensor: str, index: tuple[Expr, ...]) -> str:
    buffer = scalar.buffers[tensor]
    return f"{buffer.identifier}[{scalar.address(buffer, index)}]"


def pointer(scalar: Scalar, tensor: str, index: tuple[Expr, ...]) -> str:
    """Return the address of an element, in parentheses."""
    buffer = scalar.buffers[tensor]
    return f"({buffer.identifier} + {scalar.address(buffer, index)})"


def call_wrapper(name: str, scalar: Scalar) -> str:
    """Return the name of a wrapper, and emit it with the wrappers and helpers it needs."""
    wrapper = instruction(name)
    if wrapper is None:
        raise InvariantError(f"unknown instruction {name}")
    for needed in wrapper.needs:
        if instruction(needed) is None:
            scalar.helper(needed)
        else:
            call_wrapper(needed, scalar)
    scalar.helpers[name] = None
    return name


MMA_WORDS = 4  # of a lane's A (PTX ISA, "Matrix Fragments for mma.m16n8k16")
DESCRIPTOR_UNIT_BYTES = 16  # of the address in a matrix descriptor (PTX ISA, "Matrix Descriptor Format")
# Names of numbers from no tile: registers of a thread, and fields of a descriptor in bytes.
REGISTERS, LEADING, STRIDE, ADVANCE = "registers", "leading_bytes", "stride_bytes", "advance_bytes"

_PLAIN = {
    FenceMbarrierInit: "fence_barrier_init", TmaStoreCommitGroup: "bulk_commit", FenceProxyAsync: "fence_async",
    WgmmaFence: "wgmma_fence", WgmmaCommitGroup: "wgmma_commit",
}  # fmt: skip


def hopper_statement(node: HopperNode, scalar: Scalar) -> str:
    """Return the statement of a node, and add the wrapper it calls to `scalar.helpers`."""
    if (name := _PLAIN.get(type(node))) is not None:
        return f"{call_wrapper(name, scalar)}();"
    match node:
        case MbarrierInit(barrier=barrier, index=index, arrivals=arrivals):
            return f"{call_wrapper('barrier_init', scalar)}({pointer(scalar, barrier, index)}, {shown(arrivals)});"
        case MbarrierArrive():
            return _arrive(node, scalar)
        case MbarrierWait(barrier=barrier, index=index, parity=parity):
            return f"{call_wrapper('barrier_wait', scalar)}({pointer(scalar, barrier, index)}, {scalar.index(parity)});"
        case TmaLoad():
            return _tma_load(node, scalar)
        case TmaStore(tensor_map=name, coordinates=coordinates, tensor=tensor, index=index):
            places = ", ".join(scalar.index(c) for c in coordinates)
            store = call_wrapper(f"tma_store_{len(coordinates)}d", scalar)
            return f"{store}(&{scalar.names.of(name)}, {pointer(scalar, tensor, index)}, {places});"
        case StoreMatrix(tensor=tensor, index=at, count=count, source=source, source_index=index):
            words = f"(const unsigned int *){pointer(scalar, source, index)}"
            return f"{call_wrapper(f'store_matrix_{count}', scalar)}({pointer(scalar, tensor, at)}, {words});"
        case TmaStoreWaitGroup(pending=pending, read=read):
            return f"{call_wrapper('bulk_wait_read' if read else 'bulk_wait', scalar)}<{pending}>();"
        case WarpgroupMma():
            return _wgmma(node, scalar)
        case WgmmaWaitGroup():
            return _wgmma_wait(node, scalar)
        case SetMaxNReg(count=count, increase=increase):
            change = call_wrapper("registers_increase" if increase else "registers_decrease", scalar)
            return f"{change}<{shown(named(count, REGISTERS))}>();"
        case WarpBarrier():
            return "__syncwarp();"
        case NamedBarrier(number=number, threads=threads):
            return f"{call_wrapper('named_barrier', scalar)}({number}, {shown(threads)});"
        case ClusterBarrier():
            return f"{call_wrapper('cluster_sync', scalar)}();"
        case _:
            raise InvariantError(f"{type(node).__name__} has no statement")


def _wgmma_wait(node: WgmmaWaitGroup, scalar: Scalar) -> str:
    wait = f"{call_wrapper('wgmma_wait', scalar)}<{node.pending}>();"
    if node.accumulator is None:
        return wait
    buffer = scalar.buffers[node.accumulator]
    fragments, words = buffer.shape[0], math.prod(buffer.shape[1:])
    hold = call_wrapper(f"hold_results_{words}{'' if buffer.dtype.is_float else '_s32'}", scalar)
    return " ".join((wait, *(f"{hold}({buffer.identifier} + {shown(number * words)});" for number in range(fragments))))


def _arrive(node: MbarrierArrive, scalar: Scalar) -> str:
    barrier = pointer(scalar, node.barrier, node.index)
    if node.rank is not None:
        return f"{call_wrapper('barrier_arrive_remote', scalar)}({barrier}, {scalar.index(node.rank)});"
    if node.expect_tx_bytes is not None:
        return f"{call_wrapper('barrier_expect', scalar)}({barrier}, {shown(node.expect_tx_bytes)});"
    return f"{call_wrapper('barrier_arrive', scalar)}({barrier});"


def _tma_load(node: TmaLoad, scalar: Scalar) -> str:
    rank = len(node.coordinates)
    mode = "im2col_" if node.offsets else ""
    cast = "multicast" if node.multicast_mask is not None else ""
    name = call_wrapper(f"tma_load_{mode}{rank}d{'_' if cast else ''}{cast}", scalar)
    barrier = pointer(scalar, node.barrier, node.barrier_index)
    target = _plain_pointer(scalar, node.tensor, node.index)
    coordinates = [scalar.index(c) for c in node.coordinates]
    offsets = [f"(unsigned short)({scalar.index(o)})" for o in node.offsets]
    mask = [f"(unsigned short)({scalar.index(node.multicast_mask)})"] if node.multicast_mask is not None else []
    args = [target, f"&{scalar.names.of(node.tensor_map)}", barrier, *coordinates, *offsets, *mask]
    return f"{name}({', '.join(args)});"


def _wgmma(node: WarpgroupMma, scalar: Scalar) -> str:
    a, b = node.a, node.b
    layouts = ["r" if isinstance(side, RegisterMatrix) else "k" if side.k_major else "m" for side in (a, b)]
    name = call_wrapper(wgmma_wrapper(node.columns, a.dtype, b.dtype, *layouts), scalar)
    buffer = scalar.buffers[node.tensor]
    first = scalar.address(buffer, node.index)
    results = buffer.identifier if first == "0" else f"{buffer.identifier} + {first}"
    operands = ", ".join(_operand(side, scalar) for side in (a, b))
    return f"{name}({results}, {operands}, {scalar.index(node.accumulate)});"


def _operand(side: SharedMatrix | RegisterMatrix, scalar: Scalar) -> str:
    """Return the words of an operand in registers, or the descriptor of one in shared memory."""
    if isinstance(side, RegisterMatrix):
        return pointer(scalar, side.tensor, side.index)
    name = call_wrapper(f"matrix_descriptor_{side.swizzle_bytes}", scalar)
    address = _plain_pointer(scalar, side.tensor, side.index)
    advance = f" + {shown(named(side.advance_bytes, ADVANCE) // DESCRIPTOR_UNIT_BYTES)}" if side.advance_bytes else ""
    leading, stride = shown(named(side.leading_bytes, LEADING)), shown(named(side.stride_bytes, STRIDE))
    return f"{name}({address}, {leading}, {stride}){advance}"


def _plain_pointer(scalar: Scalar, tensor: str, index: tuple[Expr, ...]) -> str:
    """Return the address of an element without swizzle: TMA and wgmma apply it themselves."""
    buffer = scalar.buffers[tensor]
    terms = [
        text if stride == 1 else f"{text} * {shown(stride)}"
        for i, stride in zip(index, buffer.strides, strict=True)
        if (text := scalar.index(i)) != "0"
    ]
    return " + ".join([buffer.identifier, *terms])
