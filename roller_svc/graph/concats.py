"""Concatenations without copies: what is concatenated is written to its place in the result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from roller_svc.graph.views import view_offset_elements
from roller_svc.ir.graph import Graph, LoopNode, Node, OpNode


@dataclass(frozen=True, slots=True)
class Piece:
    """A place in another tensor."""

    host: str
    offset_bytes: int


def is_contiguous_concat(node: Node) -> bool:
    """Return whether each input of a concatenation is contiguous in its result: all dimensions before have one row."""
    if not isinstance(node, OpNode) or node.operator != "concat":
        return False
    shape = node.output_types[0].shape
    axis = dict(node.parameters).get("axis", 0)
    return isinstance(axis, int) and math.prod(shape[: axis % len(shape)]) == 1


def place_pieces(graph: Graph) -> dict[str, Piece]:
    """Return the tensors that lie in the result of a contiguous concatenation.

    Later concatenations come first. One whose inputs lie side by side in another one's result is a piece of that.
    """
    written = {
        tensor
        for node in graph.nodes
        for position, tensor in enumerate(node.outputs)
        if view_offset_elements(node) is None and not (isinstance(node, LoopNode) and position < node.carried)
    }
    outputs = {tensor for _, tensor in graph.outputs}
    pieces: dict[str, Piece] = {}
    for node in reversed(graph.nodes):
        if not is_contiguous_concat(node):
            continue
        (result,) = node.outputs
        offsets = input_offsets(node)
        whole = _as_piece(node, offsets, pieces)
        if whole is not None and result not in outputs:
            pieces[result] = whole
            continue
        for tensor, offset in zip(node.inputs, offsets, strict=True):
            is_free = tensor in written and tensor not in outputs and tensor not in pieces
            if is_free and node.inputs.count(tensor) == 1:
                pieces[tensor] = Piece(result, offset)
    return pieces


def input_offsets(node: Node) -> list[int]:
    """Return the offset in bytes of each input in the result of a contiguous concatenation."""
    offsets, end = [], 0
    for type_ in node.input_types:
        offsets.append(end)
        end += type_.bytes
    return offsets


def _as_piece(node: Node, offsets: list[int], pieces: Mapping[str, Piece]) -> Piece | None:
    """Return where the result lies if its inputs lie side by side in one host."""
    places = [pieces.get(tensor) for tensor in node.inputs]
    first = places[0]
    if first is None or any(
        place is None or place.host != first.host or place.offset_bytes - offset != first.offset_bytes - offsets[0]
        for place, offset in zip(places, offsets, strict=True)
    ):
        return None
    return Piece(first.host, first.offset_bytes - offsets[0])
