"""ATen operators that are layers: products, convolutions, pools, normalisations, attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from roller_svc.frontend.ops.operator import Operand
from roller_svc.frontend.torch.call import AtenCall, Converter
from roller_svc.frontend.torch.tensors import Empty
from roller_svc.ir.dtype import DType

Results = Sequence[Operand | Empty | None]


def _linear(call: AtenCall) -> Operand:
    bias = call.optional("bias")
    return call.run("linear", call.operand("input"), call.operand("weight"), *([] if bias is None else [bias]))


def _matmul(call: AtenCall) -> Operand:
    first, second = (call.operand(name) for name in list(call.arguments)[:2])
    weight = call.transposed_source(second)
    return call.run("matmul", first, second) if weight is None else call.run("matmul", first, weight, transpose_b=True)


def _addmm(call: AtenCall) -> Operand:
    """Convert `beta * self + alpha * mat1 @ mat2`. A transposed weight is read as it is, without a copy."""
    second = call.operand("mat2")
    weight = call.transposed_source(second)
    return call.run(
        "gemm",
        call.operand("mat1"),
        second if weight is None else weight,
        call.operand("self"),
        transpose_b=weight is not None,
        alpha=float(call.number("alpha")),
        beta=float(call.number("beta")),
    )


def _baddbmm(call: AtenCall) -> Operand:
    product = call.run("matmul", call.operand("batch1"), call.operand("batch2"))
    terms = [(call.operand("self"), call.number("beta")), (product, call.number("alpha"))]
    scaled = [x if k == 1 else call.run("mul", x, call.scalar(k, call.dtype)) for x, k in terms if k != 0]
    return call.expand(call.run("add", *scaled), call.shape)


def _grouped_product(call: AtenCall, weight_name: str) -> Operand:
    """Convert a product whose rows are in groups: each group ends at its offset, and has a matrix of its own."""
    x, weight, ends = call.x, call.operand(weight_name), call.value("offs")
    if call.has("bias") and call.value("bias") is not None:
        raise call.unsupported("a bias")
    if not isinstance(ends, Operand):
        return call.cast(call.run("matmul", x, weight))
    if (x.rank, weight.rank) != (2, 3):
        raise call.unsupported(f"a grouped product of {x.rank} and {weight.rank} dimensions")
    rows, groups = x.shape[0], weight.shape[0]
    places = call.reshape(call.builder.count(rows), (rows, 1))
    passed = call.run("greater_equal", places, call.cast(ends, DType.INT64))  # [rows, groups]
    group = call.run("reduce_sum", call.cast(passed, DType.INT64), axis=(1,))
    inside = call.run("clip", group, most=groups - 1)
    product = call.cast(call.run("grouped_matmul", x, weight, inside))
    is_in_one = call.reshape(call.run("less", group, call.scalar(groups, DType.INT64)), (rows, 1))
    return call.run("where", is_in_one, product, call.scalar(0, call.dtype))


def _spatial(call: AtenCall, weight: Operand) -> int:
    if not 3 <= weight.rank <= 5:
        raise call.unsupported(f"a weight of {weight.rank} dimensions")
    return weight.rank - 2


def _batched(call: AtenCall, x: Operand, spatial: int) -> tuple[Operand, bool]:
    """Return a tensor with a batch dimension, and whether it had none."""
    if x.rank == spatial + 2:
        return x, False
    return call.run("unsqueeze", x, axis=(0,)), True


def _conv(call: AtenCall, *, transposed: bool = False) -> Operand:
    weight, bias = call.operand("weight"), call.optional("bias")
    spatial = _spatial(call, weight)
    x, single = _batched(call, call.operand("input"), spatial)
    padding = call.value("padding")
    y = call.run(
        f"conv_transpose{spatial}d" if transposed else f"conv{spatial}d",
        x,
        weight,
        *([] if bias is None else [bias]),
        stride=call.integers("stride"),
        padding=padding if isinstance(padding, str) else call.integers("padding"),
        dilation=call.integers("dilation"),
        groups=call.integer("groups"),
        **({"output_padding": call.integers("output_padding")} if transposed else {}),
    )
    return call.run("squeeze", y, axis=(0,)) if single else y


def _convolution(call: AtenCall) -> Operand:
    call.value("output_padding")  # of transposed convolutions
    return _conv(call, transposed=call.flag("transposed"))


def _pool(call: AtenCall, operator: str, spatial: int) -> Operand:
    x, single = _batched(call, call.operand("self"), spatial)
    parameters: dict[str, object] = {"kernel": call.integers("kernel_size"), "padding": call.integers("padding"),
                                     "ceil_mode": call.flag("ceil_mode")}  # fmt: skip
    if stride := call.value("stride"):
        parameters["stride"] = tuple(stride)
    if operator != "avg_pool":
        parameters["dilation"] = call.integers("dilation")
    else:
        parameters["count_include_pad"] = call.flag("count_include_pad")
    y = call.run(f"{operator}{spatial}d", x, **parameters)
    return call.run("squeeze", y, axis=(0,)) if single else y


def _max_pool_with_indices(call: AtenCall, spatial: int) -> Results:
    """Convert the values and the place of each in its plane, as far as they are read."""
    values = _pool(call, "max_pool", spatial)
    if 1 not in call.needed:
        return [values, None]
    x = call.operand("self")
    places = _pool(call, "max_pool_indices", spatial)
    return [values, call.run("mod", places, call.scalar(math.prod(x.shape[-spatial:]), DType.INT64))]


def _adaptive_pool(call: AtenCall, kind: str, spatial: int) -> Operand:
    """Convert an adaptive pool: windows of one extent where that divides, else products with averaging matrices."""
    x, single = _batched(call, call.operand("self"), spatial)
    sizes, wanted = x.shape[2:], call.shape[-spatial:]
    if set(wanted) == {1}:
        y = call.run(f"global_{kind}_pool{spatial}d", x)
    elif all(size % out == 0 for size, out in zip(sizes, wanted, strict=True)):
        kernel = tuple(size // out for size, out in zip(sizes, wanted, strict=True))
        y = x if set(kernel) == {1} else call.run(f"{kind}_pool{spatial}d", x, kernel=kernel, stride=kernel)
    elif kind == "max":
        raise call.unsupported(f"a maximum over windows of several extents (from {list(sizes)} to {list(wanted)})")
    else:
        y = _average_unequal_windows(call, x, wanted)
    return call.run("squeeze", y, axis=(0,)) if single else y


def _average_unequal_windows(call: AtenCall, x: Operand, wanted: Sequence[int]) -> Operand:
    for axis, out in enumerate(wanted, 2):
        size = x.shape[axis]
        averages = np.zeros((out, size))
        for i in range(out):
            start, stop = i * size // out, -(-(i + 1) * size // out)
            averages[i, start:stop] = 1 / (stop - start)
        matrix = call.constant(averages, x.dtype)
        order = [*(d for d in range(x.rank) if d != axis), axis]
        last = axis == x.rank - 1
        y = call.run("linear", x if last else call.run("transpose", x, permutation=order), matrix)
        x = y if last else call.run("transpose", y, permutation=[order.index(d) for d in range(x.rank)])
    return x


def _col2im(call: AtenCall) -> Operand:
    x, single = _batched(call, call.operand("self"), 1)
    y = call.run(
        "col2im",
        x,
        image=call.integers("output_size"),
        kernel=call.integers("kernel_size"),
        stride=call.integers("stride"),
        padding=call.integers("padding"),
        dilation=call.integers("dilation"),
    )
    return call.run("squeeze", y, axis=(0,)) if single else y


_MODES, _PADDINGS = ("linear", "nearest", "cubic"), ("zeros", "border", "reflection")


def _grid_sample(call: AtenCall) -> Operand:
    mode, padding = call.integer("interpolation_mode"), call.integer("padding_mode")
    if (_MODES[mode], _PADDINGS[padding]) == ("cubic", "border"):
        # torch clamps each neighbour, the operator the position.
        raise call.unsupported("bicubic interpolation with padding_mode='border'")
    return call.run(
        "grid_sample",
        call.operand("input"),
        call.operand("grid"),
        mode=_MODES[mode],
        padding=_PADDINGS[padding],
        align_corners=call.flag("align_corners"),
    )


def _softmax(call: AtenCall, operator: str) -> Operand:
    x, axis = call.x, call.integer("dim")
    if x.rank == 0:
        raise call.unsupported("a scalar")
    return call.run(operator, call.cast(x), axis=axis)


def _safe_softmax(call: AtenCall) -> Operand:
    """Convert a softmax that is 0 where every element is minus infinity."""
    y = _softmax(call, "softmax")
    masked = call.run("equal", call.x, call.scalar(-math.inf, call.x.dtype))
    return call.run("where", masked, call.scalar(0.0, y.dtype), y)


def _affine(call: AtenCall, shape: Sequence[int], dtype: DType) -> list[Operand]:
    """Return weight and bias as far as they are given. A bias alone has a weight of ones."""
    weight, bias = call.optional("weight"), call.optional("bias")
    if weight is None and bias is None:
        return []
    weight = call.constant(np.ones(shape), dtype) if weight is None else weight
    return [weight] if bias is None else [weight, bias]


def _layer_norm(call: AtenCall) -> Operand:
    x, over = call.operand("input"), call.integers("normalized_shape")
    affine = _affine(call, over, x.dtype)
    return call.run("layer_norm", x, *affine, axis=x.rank - len(over), epsilon=float(call.number("eps")))


def _rms_norm(call: AtenCall) -> Operand:
    x, over, weight = call.operand("input"), call.integers("normalized_shape"), call.optional("weight")
    epsilon = call.value("eps")
    if epsilon is None:
        epsilon = _epsilon_of(call, x.dtype.compute)
    operands = [x] if weight is None else [x, weight]
    return call.run("rms_norm", *operands, axis=x.rank - len(over), epsilon=float(epsilon))


def _epsilon_of(call: AtenCall, dtype: DType) -> float:
    """Return the least number that makes a difference to 1."""
    if dtype is DType.FLOAT32 or dtype is DType.FLOAT64:
        return float(np.finfo(dtype.value).eps)
    raise call.unsupported(f"a norm of {dtype.value}")


def _batch_norm(call: AtenCall) -> Operand:
    x = call.operand("input")
    mean, variance = call.operand("running_mean"), call.operand("running_var")
    return call.cast(_normalized(call, x, mean, variance))


def _normalized(call: AtenCall, x: Operand, mean: Operand, variance: Operand) -> Operand:
    """Return a batch norm by these statistics. Weight and bias that are not given change nothing."""
    affine = _affine(call, mean.shape, mean.dtype) or [call.constant(np.ones(mean.shape), mean.dtype)]
    if len(affine) == 1:
        affine.append(call.constant(np.zeros(mean.shape), mean.dtype))
    return call.run("batch_norm", x, *affine, mean, variance, epsilon=float(call.number("eps")))


def _batch_statistics_norm(call: AtenCall) -> Operand:
    """Convert a batch norm by the statistics of its own batch, as an instance norm becomes one."""
    x = call.operand("input")
    call.value("training")  # statistics are of the batch in both cases, as there are no others
    axes = tuple(d for d in range(x.rank) if d != 1)
    mean = call.run("reduce_mean", x, axis=axes, keepdims=True)
    squares = call.run("square", call.run("sub", x, mean))
    variance = call.run("reduce_mean", squares, axis=axes)
    return _normalized(call, x, call.reshape(mean, x.shape[1:2]), variance)


def _instance_norm(call: AtenCall) -> Operand:
    if not call.flag("use_input_stats"):
        return _batch_norm(call)
    if call.value("running_mean") is not None:
        raise call.unsupported("an update of running means, as in training,")
    call.value("running_var")
    x = call.operand("input")
    affine = _affine(call, x.shape[1:2], x.dtype)
    return call.run("group_norm", x, *affine, groups=x.shape[1], epsilon=float(call.number("eps")))


def _group_norm(call: AtenCall) -> Operand:
    x = call.operand("input")
    groups = call.integer("num_groups") if "num_groups" in call.arguments else call.integer("group")
    affine = _affine(call, x.shape[1:2], x.dtype)
    return call.run("group_norm", x, *affine, groups=groups, epsilon=float(call.number("eps")))


def _attention(call: AtenCall) -> Operand:
    """Convert attention to products and a softmax, so that the graph's passes see them.

    Rows whose keys are all masked are 0, as in torch.
    """
    q, k, v = call.operand("query"), call.operand("key"), call.operand("value")
    if call.number("dropout_p") != 0:
        raise call.unsupported(f"dropout_p={call.number('dropout_p')}, which drops elements at random,")
    scale = call.value("scale")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    mask = call.optional("attn_mask")
    groups = 1
    if "enable_gqa" in call.arguments and call.flag("enable_gqa") and q.shape[-3] != k.shape[-3]:
        groups = q.shape[-3] // k.shape[-3]
    queries, keys = q.shape[-2], k.shape[-2]
    if groups > 1:  # heads that share keys are further queries
        q = call.reshape(q, (*k.shape[:-2], groups * queries, q.shape[-1]))
    scores = call.run("matmul", q, k, transpose_b=True)
    whole = (*call.shape[:-2], queries, keys)
    if groups > 1:
        scores = call.reshape(scores, whole)
    scores = call.run("mul", scores, call.scalar(scale, scores.dtype))
    if call.flag("is_causal"):
        mask = call.constant(np.tri(queries, keys, dtype=np.bool_), DType.BOOL)
    weights = _masked_softmax(call, scores, mask)
    if groups > 1:
        weights = call.reshape(weights, (*v.shape[:-2], groups * queries, keys))
    y = call.run("matmul", weights, v)
    return call.reshape(y, call.shape)


def _masked_softmax(call: AtenCall, scores: Operand, mask: Operand | None) -> Operand:
    if mask is None:
        return call.run("softmax", scores)
    value, zero = call.known(mask), call.scalar(0.0, scores.dtype)
    if mask.dtype is DType.BOOL:
        low = call.scalar(-math.inf, scores.dtype)
        if value is not None and value.any(-1).all():
            return call.run("softmax", call.run("where", mask, scores, low))
        # A finite number keeps rows without a key from becoming NaN.
        low = call.scalar(_LOWEST[scores.dtype], scores.dtype)
        return call.run("where", mask, call.run("softmax", call.run("where", mask, scores, low)), zero)
    scores = call.run("add", scores, call.cast(mask, scores.dtype))
    weights = call.run("softmax", scores)
    if value is not None and np.isfinite(value.astype(np.float64)).all():
        return weights
    masked = call.run("equal", scores, call.scalar(-math.inf, scores.dtype))
    return call.run("where", masked, zero, weights)


_LOWEST = {DType.FLOAT64: -1e308, DType.FLOAT32: -3e38, DType.BFLOAT16: -3e38, DType.FLOAT16: -6e4}


def _einsum(call: AtenCall) -> Operand:
    operands = [call.cast(operand) for operand in call.operands("tensors")]
    return call.run("einsum", *operands, equation=call.text("equation").replace(" ", ""))


def _trilinear(call: AtenCall) -> Operand:
    """Convert a sum of products of three tensors, each with further dimensions, as an einsum."""
    names, operands = "abcdefghijklmnop", [call.operand(f"i{i}") for i in (1, 2, 3)]
    expanded = [call.integers(f"expand{i}") for i in (1, 2, 3)]
    rank = operands[0].rank + len(expanded[0])
    labels = ["".join(names[d] for d in range(rank) if d not in dims) for dims in expanded]
    result = "".join(names[d] for d in range(rank) if d not in call.integers("sumdim"))
    return call.run("einsum", *operands, equation=f"{','.join(labels)}->{result}")


_DISTANCES = {1.0: "reduce_l1", 2.0: "reduce_l2"}


def _distances(call: AtenCall) -> Operand:
    """Convert the distances of all pairs of rows."""
    first, second, p = call.operand("x1"), call.operand("x2"), float(call.number("p"))
    if p not in _DISTANCES:
        raise call.unsupported(f"a distance of order {p}")
    rows, columns = call.run("unsqueeze", first, axis=(-2,)), call.run("unsqueeze", second, axis=(-3,))
    return call.run(_DISTANCES[p], call.run("sub", rows, columns), axis=(-1,))


TABLE: dict[str, Converter] = {
    "aten._cdist_forward.default": _distances,
    "aten._trilinear.default": _trilinear,
    "aten.linear.default": _linear,
    **{f"aten.{name}.default": _matmul for name in ("matmul", "mm", "bmm", "mv", "dot")},
    "aten._grouped_mm.default": partial(_grouped_product, weight_name="mat2"),
    "transformers.grouped_mm_fallback.default": partial(_grouped_product, weight_name="weight"),
    "aten.addmm.default": _addmm,
    "aten.baddbmm.default": _baddbmm,
    "aten.einsum.default": _einsum,
    **{f"aten.conv{spatial}d.{form}": _conv for spatial in (1, 2, 3) for form in ("default", "padding")},
    "aten.conv_transpose1d.default": partial(_conv, transposed=True),
    "aten.conv_transpose2d.input": partial(_conv, transposed=True),
    "aten.conv_transpose3d.input": partial(_conv, transposed=True),
    "aten.convolution.default": _convolution,
    **{f"aten.max_pool{spatial}d.default": partial(_pool, operator="max_pool", spatial=spatial) for spatial in (1, 2, 3)},
    **{f"aten.max_pool{spatial}d_with_indices.default": partial(_max_pool_with_indices, spatial=spatial) for spatial in (2, 3)},
    "aten.col2im.default": _col2im,
    **{f"aten.grid_sampler_{spatial}d.default": _grid_sample for spatial in (2, 3)},
    **{f"aten.avg_pool{spatial}d.default": partial(_pool, operator="avg_pool", spatial=spatial) for spatial in (1, 2, 3)},
    **{
        f"aten.{prefix}adaptive_avg_pool{spatial}d.default": partial(_adaptive_pool, kind="avg", spatial=spatial)
        for spatial in (1, 2, 3)
        for prefix in ("", "_")
        if spatial > 1 or not prefix
    },
    **{f"aten.adaptive_max_pool{spatial}d.default": partial(_adaptive_pool, kind="max", spatial=spatial) for spatial in (1, 2, 3)},
    **{f"aten.{name}": partial(_softmax, operator="softmax") for name in ("softmax.int", "_softmax.default")},
    **{f"aten.{name}": partial(_softmax, operator="log_softmax") for name in ("log_softmax.int", "_log_softmax.default")},
    "aten._safe_softmax.default": _safe_softmax,
    "aten.layer_norm.default": _layer_norm,
    "aten.native_layer_norm.default": _layer_norm,
    "aten.rms_norm.default": _rms_norm,
    "aten._fused_rms_norm.default": _rms_norm,
    "aten._native_batch_norm_legit_no_training.default": _batch_norm,
    "aten._native_batch_norm_legit.no_stats": _batch_statistics_norm,
    "aten.instance_norm.default": _instance_norm,
    "aten.group_norm.default": _group_norm,
    "aten.native_group_norm.default": _group_norm,
    "aten.scaled_dot_product_attention.default": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
}
