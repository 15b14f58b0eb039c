"""Weights of com.microsoft that are quantized in blocks of 2, 4 or 8 bits. Integers are dequantized by nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roller_svc.frontend.graph_builder import Array, GraphBuilder
from roller_svc.frontend.onnx.expansions.expansion import Expansion
from roller_svc.frontend.onnx.tensors import Tensor
from roller_svc.frontend.onnx.use import FLOATS, INTEGERS, Node
from roller_svc.frontend.ops.operator import Operand
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import MIN_SCALE_RUN

_BYTES_ALLOWED = 4  # accuracy_level: rows may be rounded to bytes, as their blocks have scales


def _bits(node: Node) -> int:
    bits = node.integer("bits", 4)
    if bits not in (2, 4, 8):
        raise node.unsupported(f"bits={bits}", "2, 4 and 8 are")
    return bits


def _stored(node: Node, position: int, what: str) -> Array:
    """Return bytes of packed numbers."""
    value = node.array(position, what, INTEGERS)
    if value.dtype != np.uint8 or not value.ndim:
        raise node.unsupported(f"{what} of {value.dtype}{list(value.shape)}", "give bytes, uint8, in rows")
    return value


def _unpacked(packed: Array, bits: int) -> Array:
    """Return the numbers in bytes, the lowest bits first, along the last dimension."""
    parts = [packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(*packed.shape[:-1], -1)


def _matmul_nbits(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    """Return the product with the transpose of a matrix [N, K], which has a scale for each block of a row."""
    bits, block = _bits(node), node.integer("block_size", 0)
    rows, columns = node.integer("N", 0), node.integer("K", 0)
    may_round = node.integer("accuracy_level", 0) == _BYTES_ALLOWED
    node.check_default("weight_prepacked", 0)
    a, stored, scales = node.operand(0), _stored(node, 1, "B"), node.array(2, "scales", FLOATS)
    if block < 1 or rows < 1 or columns < 1:
        raise node.invalid(f"N={rows}, K={columns} and block_size={block} are not a matrix")
    if block * bits % 8:
        raise node.unsupported(f"block_size={block}, blocks of {block * bits} bits,", "give blocks of whole bytes")
    blocks = -(-columns // block)
    if stored.size * 8 != rows * blocks * block * bits or scales.size != rows * blocks:
        raise node.invalid(
            f"B {list(stored.shape)} and scales {list(scales.shape)} are not {rows} rows of {blocks} blocks of {block} numbers"
        )
    numbers = _unpacked(stored.reshape(rows, -1), bits)[:, :columns]
    zeros = _zeros(node, rows, blocks, bits)
    factors = scales.reshape(rows, blocks).astype(np.float32)
    of_column = np.arange(columns) // block
    if node.has(4):
        of_column = node.array(4, "g_idx", INTEGERS).reshape(-1)[:columns]
    if of_column.shape != (columns,) or of_column.min() < 0 or of_column.max() >= blocks:
        raise node.invalid(f"g_idx must have {columns} numbers below {blocks}")
    bias, dtype = node.optional(5), a.dtype
    if np.array_equal(of_column, np.arange(columns) // block) and np.array_equal(zeros, zeros.astype(np.uint8)):
        integers = _centred(numbers, zeros.astype(np.uint8))
        weight = _dequantized(builder, integers, factors, block)
        are_bytes = len(integers) == 1 or bits < DType.INT8.bits  # less their zero points
        if may_round and _takes_blocks(builder, block) and columns % block == 0 and are_bytes:
            a = _rounded_to_bytes(builder, a, block)
    else:
        dense = (numbers.astype(np.float32) - zeros[:, of_column]) * factors[:, of_column]
        weight = builder.add_constant(dense, DType.FLOAT32)
    operands = [a, weight] if bias is None else [a, weight, bias]
    return [Tensor(builder.cast(builder.call("linear", [builder.cast(each, a.dtype) for each in operands]), dtype))]


def _takes_blocks(builder: GraphBuilder, block: int) -> bool:
    """Return whether kernels scale sums of bytes over blocks of that many: an instruction's products have one scale."""
    return builder.byte_group > 0 and block % builder.byte_group == 0 and block >= MIN_SCALE_RUN


def _rounded_to_bytes(builder: GraphBuilder, x: Operand, block: int) -> Operand:
    """Return what bytes represent of rows: each block of a row is divided by a scale, which makes its greatest number 127.

    A block with an infinity or NaN has this as its scale, so that its sums are NaN. The result is float32, in which a
    product of bytes is scaled.
    """
    wide = builder.cast(x, DType.FLOAT32)
    blocks = builder.call("reshape", [wide], shape=(*x.shape[:-1], x.shape[-1] // block, block))
    greatest = builder.call("reduce_max", [builder.call("abs", [blocks])], axis=-1)
    scale = builder.call("div", [greatest, builder.fill(DType.INT8.integer_range[1], DType.FLOAT32)])
    integers = builder.call("quantize_linear", [wide, scale], axis=-1, block=block, dtype=DType.INT8.value)
    return builder.call("dequantize_linear", [integers, scale], axis=-1, block=block)


def _dequantized(builder: GraphBuilder, integers: Sequence[Array], scales: Array, block: int) -> Operand:
    """Return the floats of integers [rows, columns], perhaps with zero points, and a scale for each block of a row."""
    first, *zeros = (builder.add_constant(each, DType(each.dtype.name)) for each in integers)
    scale = builder.add_constant(scales, DType.FLOAT32)
    return builder.call("dequantize_linear", [first, scale, *zeros], axis=1, block=block)


def _centred(numbers: Array, zeros: Array) -> list[Array]:
    """Return the differences from the zero point if it is one and int8 holds them, else numbers and zero points."""
    zero = int(zeros.reshape(-1)[0])
    fits = int(numbers.max()) - zero < 1 << 7 and zero <= 1 << 7
    return [(numbers.astype(np.int16) - zero).astype(np.int8)] if fits and (zeros == zero).all() else [numbers, zeros]


def _zeros(node: Node, rows: int, blocks: int, bits: int) -> Array:
    """Return the zero point of each block, as floats."""
    if not node.has(3):
        return np.full((rows, blocks), 1 << (bits - 1), np.float32)
    given = node.array(3, "zero_points", FLOATS + "u")
    if given.dtype != np.uint8:
        packed = given.size == rows * blocks
        numbers = given.reshape(rows, -1) if packed else given
    else:
        packed = given.size == rows * -(-blocks * bits // 8)
        numbers = _unpacked(given.reshape(rows, -1), bits) if packed else given
    if not packed:
        raise node.invalid(f"zero_points {list(given.shape)} are not {rows} rows of {blocks}")
    return numbers[:, :blocks].astype(np.float32)


def _gather_block_quantized(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    """Return rows of a table, which has a scale for each block along an axis."""
    bits, block, indices = _bits(node), node.integer("block_size", 128), node.operand(1)
    stored, scales = _stored(node, 0, "data"), node.array(2, "scales", FLOATS)
    zeros = _stored(node, 3, "zero_points") if node.has(3) else None
    if block < 1:
        raise node.invalid(f"block_size is {block}")
    numbers = _unpacked(stored, bits)
    rank = numbers.ndim
    gathered, axis = (node.integer(name, default) for name, default in (("gather_axis", 0), ("quantize_axis", 1)))
    if not (-rank <= gathered < rank and -rank <= axis < rank):
        raise node.invalid(f"gather_axis={gathered} and quantize_axis={axis} of {rank} dimensions")
    axis %= rank
    of_place = np.arange(numbers.shape[axis]) // block
    shape = (*numbers.shape[:axis], int(of_place[-1]) + 1, *numbers.shape[axis + 1 :])
    zero: Array = np.array(1 << (bits - 1), np.uint8)
    if zeros is not None:
        zero = _unpacked(zeros, bits)[..., : shape[-1]]
    if scales.shape != shape or (zeros is not None and zero.shape != shape):
        raise node.invalid(f"scales {list(scales.shape)} are not {list(shape)}, or the zero points do not fit")
    if gathered % rank != axis:
        return [Tensor(_gathered(builder, (numbers, zero, scales), indices, (gathered % rank, axis), block, node.operand(2).dtype))]
    zero = np.take(np.broadcast_to(zero, shape), of_place, axis).astype(np.float32)
    dense = (numbers - zero) * np.take(scales.astype(np.float32), of_place, axis)
    table = builder.cast(builder.add_constant(dense, DType.FLOAT32), node.operand(2).dtype)
    return [Tensor(builder.call("gather", [table, indices], axis=gathered, negative=True))]


def _gathered(
    builder: GraphBuilder, arrays: tuple[Array, Array, Array], indices: Operand, axes: tuple[int, int], block: int, dtype: DType
) -> Operand:
    """Return dequantized numbers, whose integers, zero points and scales are gathered: a table of floats is larger."""
    numbers, zero, scales = arrays
    gathered, axis = axes
    integers = _centred(numbers, np.broadcast_to(zero, scales.shape))
    tables = [builder.add_constant(np.ascontiguousarray(each), DType(each.dtype.name)) for each in integers]
    tables.insert(1, builder.add_constant(scales.astype(np.float32), DType.FLOAT32))
    rows = [builder.call("gather", [table, indices], axis=gathered, negative=True) for table in tables]
    moved = axis + len(indices.shape) - 1 if axis > gathered else axis
    return builder.cast(builder.call("dequantize_linear", rows, axis=moved, block=block), dtype)


BLOCKS: dict[str, Expansion] = {"GatherBlockQuantized": _gather_block_quantized, "MatMulNBits": _matmul_nbits}
