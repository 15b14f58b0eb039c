"""An example of each operator: a call whose operands are named with their types.

Operators that are not listed are elementwise, and take matrices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from roller_svc.frontend.ops.calls import expand
from roller_svc.frontend.ops.operator import Operator
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType

_CALLS = (
    "C = matmul(A: float32[8, 5, 4], B: float32[4, 3])",
    'y = linear(x: float32[16, 4], w: float32[3, 4], b: float32[3], activation="gelu")',
    "y = gemm(A: float32[4, 5], B: float32[4, 3], c: float32[3], alpha=0.5, transpose_a=true)",
    "Y = grouped_matmul(X: float32[6, 8], W: float32[3, 8, 4], ids: int32[6])",
    "Y = determinant(X: float32[8, 3, 3])",
    "Y = conv1d(X: float32[1, 3, 8], W: float32[4, 3, 3], stride=2, padding=1)",
    "Y = conv2d(X: float32[1, 3, 8, 8], W: float32[4, 3, 3, 3], stride=2, padding=1)",
    "Y = conv3d(X: float32[1, 3, 8, 8, 8], W: float32[4, 3, 3, 3, 3], stride=2, padding=1)",
    "Y = depthwise_conv2d(X: float32[1, 8, 14, 14], W: float32[8, 1, 3, 3])",
    "Y = conv_transpose1d(X: float32[1, 3, 8], W: float32[3, 4, 2], stride=2)",
    "Y = conv_transpose2d(X: float32[1, 3, 8, 8], W: float32[3, 4, 2, 2], stride=2)",
    "Y = conv_transpose3d(X: float32[1, 3, 8, 8, 8], W: float32[3, 4, 2, 2, 2], stride=2)",
    "Y = max_pool1d(X: float32[1, 3, 8], kernel=3, stride=2, padding=1)",
    "Y = max_pool2d(X: float32[1, 3, 8, 8], kernel=3, stride=2, padding=1)",
    "Y = max_pool3d(X: float32[1, 3, 8, 8, 8], kernel=3, stride=2, padding=1)",
    "Y = max_pool_indices1d(X: float32[1, 3, 8], kernel=2)",
    "Y = max_pool_indices2d(X: float32[1, 3, 8, 8], kernel=2)",
    "Y = max_pool_indices3d(X: float32[1, 3, 8, 8, 8], kernel=2)",
    "Y = lp_pool1d(X: float32[1, 3, 8], kernel=2, p=3)",
    "Y = lp_pool2d(X: float32[1, 3, 8, 8], kernel=2, p=3)",
    "Y = lp_pool3d(X: float32[1, 3, 8, 8, 8], kernel=2, p=3)",
    "Y = global_lp_pool1d(X: float32[2, 8, 7])",
    "Y = global_lp_pool2d(X: float32[2, 8, 7, 7])",
    "Y = global_lp_pool3d(X: float32[2, 8, 7, 7, 7])",
    "Y = avg_pool1d(X: float32[1, 3, 8], kernel=2)",
    "Y = avg_pool2d(X: float32[1, 3, 8, 8], kernel=2)",
    "Y = avg_pool3d(X: float32[1, 3, 8, 8, 8], kernel=2)",
    "Y = global_avg_pool1d(X: float32[2, 8, 7])",
    "Y = global_avg_pool2d(X: float32[2, 8, 7, 7])",
    "Y = global_avg_pool3d(X: float32[2, 8, 7, 7, 7])",
    "Y = global_max_pool1d(X: float32[1, 3, 8])",
    "Y = global_max_pool2d(X: float32[1, 3, 8, 8])",
    "Y = global_max_pool3d(X: float32[1, 3, 8, 8, 8])",
    "Y = softmax(X: float32[8, 1000])",
    "Y = log_softmax(X: float32[8, 1000])",
    "Y = layer_norm(X: float32[8, 768], w: float32[768], b: float32[768])",
    "Y = lp_norm(X: float32[32, 128])",
    "Y = rms_norm(X: float32[8, 768], w: float32[768], epsilon=1e-6)",
    "Y = batch_norm(X: float32[2, 8, 7, 7], s: float32[8], b: float32[8], m: float32[8], v: float32[8])",
    "Y = group_norm(X: float32[2, 8, 7, 7], w: float32[8], b: float32[8], groups=4)",
    "Y = local_response_norm(X: float32[1, 8, 4, 4], size=3)",
    "Y = attention(Q: float16[1, 8, 64, 32], K: float16[1, 2, 64, 32], V: float16[1, 2, 64, 32], causal=true)",
    "Y = paged_attention(Q: float16[8, 32, 128], K: float16[512, 16, 8, 128], V: float16[512, 16, 8, 128], "
    "pages: int32[8, 64], lengths: int32[8])",
    "Y = rope(X: float16[64, 32, 128], cos: float32[4096, 64], sin: float32[4096, 64], positions: int32[64])",
    "Y = reduce_mean(X: float32[8, 4, 4], axis=[1, 2])",
    "Y = reduce_log_sum_exp(X: float32[8, 4], axis=1)",
    "Y = argmax(X: float32[8, 4])",
    "Y = silu_mul(gate: float32[8, 4], up: float32[8, 4])",
    'Z = div(X: int32[8], Y: int32[8], rounding="floor")',
    "Y = gelu(X: float32[8])",
    "Y = isinf(X: float32[8], negative=false)",
    "Y = clip(X: float32[8], least=0, most=6)",
    "Y = cast(X: float32[8], dtype=float16)",
    "Z = where(c: bool[8, 1], X: float32[4], Y: float32[])",
    "Y = leaky_relu(X: float32[8], alpha=0.2)",
    "Y = transpose(X: float32[2, 3, 4], permutation=[0, 2, 1])",
    "Y = reshape(X: float32[6, 4], shape=[8, -1])",
    "Y = squeeze(X: float32[1, 4], axis=0)",
    "Y = unsqueeze(X: float32[4], axis=0)",
    "Y = broadcast_to(X: float32[3, 1], shape=[2, 3, 4])",
    "Z = concat(X: float32[2, 3], Y: float32[2, 5], axis=1)",
    "Y = pad(X: float32[8, 8], pads=[0, 1, 0, 1])",
    "Y = slice(X: float32[8, 8], starts=[0], stops=[8], axes=[1], steps=[2])",
    "Y = trilu(X: float32[4, 16, 16], diagonal=-1)",
    "Y = flip(X: float32[8, 8], axis=1)",
    "Y = gather(X: float32[8, 16], ids: int64[5], axis=1)",
    "Y = embedding(table: float32[1000, 64], ids: int64[32])",
    "Y = gather_elements(X: float32[8, 16], ids: int64[8, 4], axis=1)",
    "Y = gather_nd(X: float32[8, 9, 16], ids: int64[32, 2])",
    "Y = reverse_sequence(X: float32[10, 4, 16], n: int64[4])",
    "Y = one_hot(ids: int64[32], depth=10)",
    "Y = cache_update(cache: float32[2, 4, 16, 8], update: float32[2, 4, 1, 8], starts: int64[2])",
    "Y = scatter_elements(X: float32[8, 16], ids: int64[2, 16], U: float32[2, 16])",
    'Y = scatter_nd(X: float32[8, 16], ids: int64[3, 1], U: float32[3, 16], reduction="add")',
    "I = top_k_indices(X: float32[32, 100], k=2)",
    "V = top_k_values(X: float32[32, 100], k=1)",
    "Y = cumsum(X: float32[32, 100], axis=1)",
    "h = linear_recurrence(a: float32[100, 32], x: float32[100, 32], h0: float32[32], axis=0)",
    "Y = segmented_cumsum(x: float32[32, 100], starts: bool[100])",
    "Y = tile(X: float32[4, 3], repeats=[1, 2])",
    "Y = depth_to_space(X: float32[1, 12, 4, 4], block=2)",
    "Y = space_to_depth(X: float32[1, 3, 8, 8], block=2)",
    "Y = col2im(X: float32[1, 12, 9], image=[4, 4], kernel=[2, 2])",
    "Y = quantize_linear(X: float32[8, 16], scale: float32[16], zero: uint8[16])",
    "Y = dequantize_linear(X: int8[8, 64], scale: float16[8, 2], block=32)",
    "Y = requantize(acc: int32[8, 16], scale: float32[], zero: int8[])",
    "Y = resample_nearest(X: float32[1, 3, 8, 8], axes=[2, 3], extents=[16, 12], "
    "numerators=[1, 4], offsets=[0, 1], denominators=[2, 6])",
    "Y = resample(X: float32[1, 3, 8, 8], w: float32[2, 16], numerator=2, offset=-1, denominator=4)",
    "Y = grid_sample(X: float32[1, 3, 8, 8], grid: float32[1, 5, 6, 2], mode=nearest, padding=border)",
    "Y = roi_align(X: float32[1, 3, 8, 8], rois: float32[4, 4], batch: int64[4], height=2, width=2, samples=2)",
    "Y = deform_conv2d(X: float32[1, 3, 8, 8], w: float32[4, 3, 3, 3], offset: float32[1, 18, 6, 6])",
    "Y = logical_and(A: bool[2, 3], B: bool[2, 3])",
    "Y = logical_or(A: bool[2, 3], B: bool[2, 3])",
    "Y = logical_xor(A: bool[2, 3], B: bool[2, 3])",
    "Y = bitwise_and(A: int32[2, 3], B: int32[2, 3])",
    "Y = bitwise_or(A: int32[2, 3], B: int32[2, 3])",
    "Y = bitwise_xor(A: int32[2, 3], B: int32[2, 3])",
    "Y = shift_left(A: int32[2, 3], B: int32[2, 3])",
    "Y = shift_right(A: int32[2, 3], B: int32[2, 3])",
    "Y = logical_not(A: bool[2, 3])",
    "Y = bitwise_not(A: int32[2, 3])",
    "Y = reduce_all(X: bool[2, 3])",
    "Y = reduce_any(X: bool[2, 3])",
)
_OPERAND = re.compile(r"(\w+): (\w+)\[([\d, ]*)\]")


@dataclass(frozen=True, slots=True)
class Example:
    """A call and the types of its operands."""

    inputs: Mapping[str, TensorType]
    call: str

    @property
    def statements(self) -> str:
        """Return what the call stands for in the language."""
        return expand(self.call, self.inputs).text


def example_of(operator: Operator) -> Example:
    """Return the example of an operator."""
    names = ("A", "B", "C")[: 2 if operator.more else operator.min_operands]
    elementwise = f"Y = {operator.name}({', '.join(f'{name}: float32[2, 3]' for name in names)})"
    call = next((each for each in _CALLS if f" {operator.name}(" in each), elementwise)
    types = {
        name: TensorType(DType(dtype), tuple(int(extent) for extent in extents.split(",") if extent))
        for name, dtype, extents in _OPERAND.findall(call)
    }
    return Example(types, _OPERAND.sub(r"\1", call))
