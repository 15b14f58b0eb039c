"""Nodes of tensor cores → lines of CUDA C++: copies, fragments and multiplications are calls of named wrappers."""

from __future__ import annotations

from roller_svc.codegen.dialect import SHORT
from roller_svc.codegen.instructions import AMPERE, instruction, mma_wrapper
from roller_svc.codegen.scalar import Scalar
from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr
from roller_svc.ir.hardware import Arch
from roller_svc.ir.schedule import (
    AwaitCopies,
    CommitCopies,
    Copy,
    Exp2,
    LoadMatrix,
    Mma,
    PackFragment,
    RoundFragment,
)

MatrixNode = Copy | CommitCopies | AwaitCopies | LoadMatrix | RoundFragment | PackFragment | Exp2 | Mma


def matrix_lines(node: MatrixNode, scalar: Scalar, arch: Arch) -> list[str]:
    """What a node prints; the wrappers it calls are noted in `scalar.helpers`."""
    match node:
        case Copy():
            return [_copy(node, scalar, arch)]
        case CommitCopies():
            return [f"{called('commit_copies', scalar)}();"]
        case AwaitCopies(pending=pending):
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


def _copy(node: Copy, scalar: Scalar, arch: Arch) -> str:
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
        return f"*{words} = __float_as_uint(*{pointer(scalar, node.source, node.at)});"
    suffix = "_transposed" if node.transposed else ""
    name = called(f"load_matrix_{node.count}{suffix}", scalar)
    return f"{name}({words}, {pointer(scalar, node.source, node.at)});"


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
