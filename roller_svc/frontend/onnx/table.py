"""NODES: converters of ONNX nodes to calls of named operators."""

from __future__ import annotations

import math
from functools import partial

from onnx import TensorProto

from roller_svc.frontend.onnx.rows import Read, Reader, call, flag, integer, integers, named, number, required, text
from roller_svc.frontend.onnx.use import Node, Use
from roller_svc.frontend.ops.elementwise import becomes_infinite
from roller_svc.ir.dtype import DType, dtype_named, promote

EINSUM = "einsum"

# TensorProto.DataType → element type.
DATA_TYPES = {
    1: DType.FLOAT32, 2: DType.UINT8, 3: DType.INT8, 4: DType.UINT16, 5: DType.INT16, 6: DType.INT32, 7: DType.INT64,
    9: DType.BOOL, 10: DType.FLOAT16, 11: DType.FLOAT64, 12: DType.UINT32, 13: DType.UINT64, 16: DType.BFLOAT16,
    17: DType.FLOAT8_E4M3FN, 19: DType.FLOAT8_E5M2,
}  # fmt: skip
# TensorProto.DataType of 4 bits → type of the bytes that hold them.
FOUR_BITS = {21: DType.UINT8, 22: DType.INT8}
SHIFTS = {"LEFT": "shift_left", "RIGHT": "shift_right"}
# Element type → TensorProto.DataType, for types that sums accumulate in.
_STASHED = {DType.FLOAT32: 1, DType.FLOAT64: 11}
_DEPTH_ORDERS = {"DCR": "blocks_first", "CRD": "channels_first"}
_SAME = {"SAME_UPPER": "same", "SAME_LOWER": "same_lower", "VALID": "valid"}
_SAMPLING_MODES = {"bilinear": "linear", "bicubic": "cubic"}


def data_type_name(data_type: int) -> str:
    """Return the name of an element type, or the number of one that ONNX has not."""
    return TensorProto.DataType.Name(data_type).lower() if data_type in TensorProto.DataType.values() else str(data_type)


def _div(node: Node) -> Use:
    floating = any(operand.dtype.is_float for operand in node.all())
    return Use("div", node.all(), {} if floating else {"rounding": "trunc"})


def _mod(node: Node) -> Use:
    return Use("fmod" if node.integer("fmod", 0) else "mod", node.all())


def few_factors(node: Node) -> int | None:
    """Return the constant exponent of a power if it is 2 or 3: a product, where the library's function is slow."""
    base, exponent = node.operand(0), node.operands[1] if node.has(1) else node.operand(1)
    is_single = exponent is None or (exponent.type.elements == 1 and exponent.rank <= base.rank)
    value = node.scalar(1, "exponent") if is_single and node.constants[1] is not None else None
    return int(value) if value in (2, 3) else None


def _pow(node: Node) -> Use:
    base, factors = node.operand(0), few_factors(node)
    if factors is not None:
        return Use("mul", (base,) * factors)
    exponent = node.operand(1)
    if promote(base.dtype, exponent.dtype) is not base.dtype:
        raise node.unsupported(f"{base.dtype.value} to the power of {exponent.dtype.value}")
    return Use("pow", (base, exponent))


def _bit_shift(node: Node) -> Use:
    if any(operand.dtype.is_signed for operand in node.all()):
        raise node.unsupported("a signed type")
    return Use(SHIFTS[node.choice("direction", "", SHIFTS)], node.all())


def _cast(node: Node) -> Use:
    target = node.attribute("to")
    kind = DATA_TYPES.get(target) if isinstance(target, int) else dtype_named(str(target).lower())
    if kind is None:
        shown = data_type_name(target) if isinstance(target, int) else f"{target!r:.40}"
        raise node.unsupported(f"a cast to {shown}")
    saturates = bool(node.integer("saturate", 1))
    if not saturates and becomes_infinite(node.operand(0).dtype, kind):
        hint = "with saturate=1 what is beyond becomes the greatest number; float8_e4m3fn takes saturate=0"
        raise node.unsupported(f"saturate=0, which makes infinities of {node.operand(0).dtype.value},", hint)
    return Use("cast", node.leading(1), {"dtype": kind.value} | ({} if saturates else {"saturate": False}))


def _clip(node: Node) -> Use:
    bounds: dict[str, object] = {}
    for position, (name, bound) in enumerate((("min", "least"), ("max", "most")), 1):
        value = node.number(name, math.inf) if node.attribute(name) is not None else node.scalar(position, name)
        if value is not None:
            bounds[bound] = value
    return Use("clip", node.leading(1), bounds)


def _padding(node: Node) -> object:
    auto = node.text("auto_pad", "NOTSET")
    pads = node.integers("pads") or (0,)
    if auto == "NOTSET":
        return pads
    if auto not in _SAME:
        raise node.invalid(f"auto_pad is {auto[:40]!r}")
    if any(pads):
        raise node.invalid(f"pads and auto_pad={auto} say two things; leave one of them out")
    return _SAME[auto]


def _window(node: Node) -> dict[str, object]:
    return {
        "stride": node.integers("strides") or 1,
        "padding": _padding(node),
        "dilation": node.integers("dilations") or 1,
    }


def _check_kernel(node: Node) -> None:
    stated, actual = node.integers("kernel_shape"), node.operand(1).shape[2:]
    if stated is not None and stated != actual:
        raise node.invalid(f"kernel_shape is {list(stated)}, the weight's is {list(actual)}")


def _conv(node: Node) -> Use:
    _check_kernel(node)
    return Use(f"conv{node.spatial_rank}d", node.leading(3), _window(node) | {"groups": node.integer("group", 1)})


def _conv_transpose(node: Node) -> Use:
    _check_kernel(node)
    window = _window(node)
    more = node.integers("output_padding") or 0
    shape = node.integers("output_shape")
    if shape is None and isinstance(window["padding"], str) and window["padding"] != "valid":
        shape = tuple(size * s for size, s in zip(node.operand(0).shape[2:], _per_dimension(node, window["stride"]), strict=True))
    if shape is not None:
        window["padding"], more = _padding_for(node, window, shape, node.integers("output_padding"))
    elif window["padding"] == "valid":
        window["padding"] = 0
    parameters = {"groups": node.integer("group", 1), "output_padding": more}
    return Use(f"conv_transpose{node.spatial_rank}d", node.leading(3), window | parameters)


def _per_dimension(node: Node, value: object) -> tuple[int, ...]:
    """Return one number per dimension."""
    if not isinstance(value, tuple):
        return (1,) * node.spatial_rank
    if len(value) != node.spatial_rank:
        raise node.invalid(f"{len(value)} numbers for {node.spatial_rank} dimensions")
    return value


def _padding_for(
    node: Node, window: dict[str, object], shape: tuple[int, ...], extra: tuple[int, ...] | None
) -> tuple[object, tuple[int, ...]]:
    """Return the padding and output padding that give a transposed convolution's result the requested shape.

    `extra`: output padding of the node.
    """
    if node.operand(0).rank != node.operand(1).rank:
        raise node.invalid(f"a weight of {node.operand(1).rank} dimensions, and input of {node.operand(0).rank}")
    smaller, larger, behind = [], [], []
    sizes = node.operand(0).shape[2:], node.operand(1).shape[2:], shape[-node.spatial_rank :]
    steps = _per_dimension(node, window["stride"]), _per_dimension(node, window["dilation"])
    added = _per_dimension(node, extra) if extra else (0,) * node.spatial_rank
    if len(shape) < node.spatial_rank:
        raise node.invalid(f"output_shape has {len(shape)} numbers for {node.spatial_rank} dimensions")
    for size, kernel, requested, stride, dilation, add in zip(*sizes, *steps, added, strict=True):
        total = (size - 1) * stride + (kernel - 1) * dilation + 1 + add - requested
        behind.append(add + max(-total, 0))
        half = max(total, 0) // 2
        smaller.append(half)
        larger.append(max(total, 0) - half)
    first, last = (smaller, larger) if window["padding"] == "same" else (larger, smaller)
    return (*first, *last), tuple(behind)


def _pool(node: Node, kind: str) -> Use:
    parameters = _window(node) | {
        "kernel": node.integers("kernel_shape"),
        "ceil_mode": bool(node.integer("ceil_mode", 0)),
    }
    if kind == "avg":
        parameters["count_include_pad"] = bool(node.integer("count_include_pad", 0))
    if kind == "lp":
        parameters["p"] = node.number("p", 2)
    return Use(f"{kind}_pool{node.spatial_rank}d", node.leading(1), parameters)


def _softmax(node: Node, operator: str) -> Use:
    rank = node.operand(0).rank
    axis = node.integer("axis", -1 if node.opset >= 13 else 1)
    if node.opset < 13 and axis % rank != rank - 1:
        raise node.unsupported("before operator set 13 an axis that is not the last, which takes all behind it too,")
    return Use(operator, node.leading(1), {"axis": axis})


def _check_stash(node: Node) -> None:
    """Reject a stash type other than the accumulator type: float32, or float64 for float64."""
    stash_type, formed = node.integer("stash_type", 1), _STASHED.get(node.operand(0).dtype.compute, 1)
    if stash_type not in (1, formed):
        kind = DATA_TYPES.get(stash_type)
        shown = f"stash_type={stash_type}" if kind is None else f"stash_type={stash_type} ({kind.value})"
        raise node.unsupported(f"attribute {shown}", "sums accumulate in float32: stash_type=1")


def _check_trained(node: Node) -> None:
    """Reject training mode, the default in the first operator sets."""
    if node.opset < 7 and not node.integer("is_test", 0):
        raise node.unsupported("training (is_test=0, before operator set 7)", "set is_test=1")


def stash_dtype(node: Node) -> DType:
    """Return the element type of the statistics of a normalisation."""
    _check_stash(node)
    return DATA_TYPES[node.integer("stash_type", 1)]


def _norm(node: Node, operator: str, operands: int) -> Use:
    _check_stash(node)
    parameters = {"axis": node.integer("axis", -1), "epsilon": node.number("epsilon", 1e-5)}
    return Use(operator, node.leading(operands), parameters)


def _batch_norm(node: Node) -> Use:
    _check_trained(node)
    node.check_default("training_mode", 0)
    if node.opset < 9:
        node.check_default("spatial", 1)
    return Use("batch_norm", node.leading(5), {"epsilon": node.number("epsilon", 1e-5)})


def _group_norm(node: Node) -> Use:
    x = node.operand(0)
    if len(x.shape) < 3:
        raise node.invalid(f"input 0 has {len(x.shape)} dimensions, expected batch, channels and more")
    groups = node.integer("num_groups", 0) if node.op_type == "GroupNormalization" else x.shape[1]
    if node.op_type == "GroupNormalization" and node.opset < 21:
        raise node.unsupported("a scale of each group (before operator set 21)")
    if node.op_type == "GroupNormalization":
        _check_stash(node)
    return Use("group_norm", node.leading(3), {"groups": groups, "epsilon": node.number("epsilon", 1e-5)})


def _reduce(node: Node, operator: str) -> Use:
    axes = node.setting("axes", 1)
    nothing = bool(node.integer("noop_with_empty_axes", 0))
    parameters: dict[str, object] = {"keepdims": bool(node.integer("keepdims", 1))}
    if axes or nothing:
        parameters["axis"] = axes or ()
    return Use(operator, node.leading(1), parameters)


def _transpose(node: Node) -> Use:
    order = node.integers("perm")
    return Use("transpose", node.all(), {} if order is None else {"permutation": order})


def _concat(node: Node) -> Use:
    if node.opset >= 4 and node.attribute("axis") is None:
        raise node.invalid("attribute axis is missing")
    return Use("concat", node.all(), {"axis": node.integer("axis", 1)})


def _pad(node: Node) -> Use:
    rank = node.operand(0).rank
    pads_given, dims = node.required("pads", 1), node.constant(3, "axes")
    if any(not -rank <= d < rank for d in dims or ()):
        raise node.invalid(f"axes {list(dims or ())} of {rank} dimensions")
    places = tuple(range(rank)) if dims is None else tuple(d % rank for d in dims)
    if len(pads_given) != 2 * len(places):
        raise node.invalid(f"{len(pads_given)} pads for {len(places)} dimensions")
    pads = [0] * (2 * rank)
    for i, d in enumerate(places):
        pads[d], pads[d + rank] = pads_given[i], pads_given[i + len(places)]
    value = node.scalar(2, "constant_value") if node.opset >= 11 else node.number("value", 0.0)
    parameters: dict[str, object] = {"pads": pads, "mode": node.text("mode", "constant"), "value": value or 0.0}
    return Use("pad", node.leading(1), parameters)


def _reshape(node: Node) -> Use:
    x, shape = node.operand(0), node.required("shape", 1)
    if not node.integer("allowzero", 0):
        if any(extent == 0 and d >= x.rank for d, extent in enumerate(shape)):
            raise node.invalid(f"shape {list(shape)} copies a dimension that does not exist")
        shape = tuple(x.shape[d] if extent == 0 else extent for d, extent in enumerate(shape))
    return Use("reshape", (x,), {"shape": shape})


def _flatten(node: Node) -> Use:
    x, axis = node.operand(0), node.integer("axis", 1)
    axis += x.rank if axis < 0 else 0
    return Use("reshape", (x,), {"shape": (math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))})


def _squeeze(node: Node) -> Use:
    x, axes = node.operand(0), node.setting("axes", 1)
    return Use("squeeze", (x,), {"axis": [d for d, size in enumerate(x.shape) if size == 1] if axes is None else axes})


def _slice(node: Node) -> Use:
    parameters: dict[str, object] = {
        "starts": node.required("starts", 1),
        "stops": node.required("ends", 2),
    }
    for name, position in (("axes", 3), ("steps", 4)):
        value = node.setting(name, position)
        if value is not None:
            parameters[name] = value
    return Use("slice", node.leading(1), parameters)


def _dropout(node: Node) -> Use:
    """Convert to the identity, which dropout is in inference. Seed and ratio are for training."""
    _check_trained(node)
    node.attribute("seed")
    ratio: float | None = node.number("ratio", 0.5)
    if node.opset >= 12:
        node.read.add(1)
        if node.scalar(2, "training_mode"):
            ratio = node.scalar(1, "ratio") if node.has(1) else ratio
            if ratio != 0:
                hint = "export the network for inference, or with ratio 0"
                raise node.unsupported(f"training_mode=true (input 2), which drops elements at random (ratio {ratio}),", hint)
    return Use("identity", node.leading(1))


def _cumulate(node: Node, operator: str) -> Use:
    axis = node.required("axis", 1)
    if len(axis) != 1:
        raise node.invalid(f"axis is {list(axis)}; one dimension is expected")
    flags = {name: bool(node.integer(name, 0)) for name in ("exclusive", "reverse")}
    return Use(operator, node.leading(1), {"axis": axis[0], **flags})


def _tile(node: Node) -> Use:
    if node.opset >= 6:
        return Use("tile", node.leading(1), {"repeats": node.required("repeats", 1)})
    tiles, axis = node.scalar(1, "tiles"), node.scalar(2, "axis")
    repeats = [1] * node.operand(0).rank
    if tiles is None or axis is None or not -len(repeats) <= axis < len(repeats):
        raise node.invalid(f"tiles is {tiles} and axis is {axis}")
    repeats[int(axis)] = int(tiles)
    return Use("tile", node.leading(1), {"repeats": repeats})


def _center_crop_pad(node: Node) -> Use:
    """Convert to padding, which is negative where the tensor is cropped."""
    x, shape = node.operand(0), node.required("shape", 1)
    axes = node.integers("axes") or tuple(range(x.rank))
    if len(axes) != len(shape) or any(not -x.rank <= axis < x.rank for axis in axes):
        raise node.invalid(f"shape is {list(shape)}, axes are {list(axes)}, the tensor has {x.rank} dimensions")
    pads = [0] * (2 * x.rank)
    for axis, extent in zip(axes, shape, strict=True):
        more = extent - x.shape[axis]
        before = abs(more) // 2 * (1 if more > 0 else -1)
        pads[axis % x.rank], pads[axis % x.rank + x.rank] = before, more - before
    return Use("pad", (x,), {"pads": pads})


def _roi_align(node: Node) -> Use:
    samples = node.integer("sampling_ratio", 0)
    if samples < 1:
        raise node.unsupported(
            f"sampling_ratio={samples}, where the size of a region decides the number of samples,", "set sampling_ratio"
        )
    usual = "half_pixel" if node.opset >= 16 else "output_half_pixel"
    transformation = node.text("coordinate_transformation_mode", usual)
    if transformation not in ("half_pixel", "output_half_pixel"):
        raise node.invalid(f"coordinate_transformation_mode is {transformation[:40]!r}")
    parameters = {
        "mode": node.text("mode", "avg"),
        "height": node.integer("output_height", 1),
        "width": node.integer("output_width", 1),
        "samples": samples,
        "spatial_scale": node.number("spatial_scale", 1.0),
        "half_pixel": transformation == "half_pixel",
    }
    return Use("roi_align", node.leading(3), parameters)


def _deform_conv(node: Node) -> Use:
    if node.spatial_rank != 2:
        raise node.unsupported(f"a tensor of {node.operand(0).rank} dimensions")
    _check_kernel(node)
    parameters = {
        "stride": node.integers("strides") or 1,
        "padding": node.integers("pads") or 0,
        "dilation": node.integers("dilations") or 1,
        "groups": node.integer("group", 1),
        "offset_groups": node.integer("offset_group", 1),
    }
    return Use("deform_conv2d", node.all(), parameters)


def _element_type(name: str) -> Read:
    """Return the reader of an element type that is an attribute; None if it is not given."""

    def read(node: Node) -> str | None:
        value = node.integer(name, 0)
        if value and value not in DATA_TYPES:
            raise node.unsupported(f"{name}={data_type_name(value)}")
        return DATA_TYPES[value].value if value else None

    return read


def _sampling_mode(node: Node) -> str:
    mode = node.text("mode", "linear")
    return _SAMPLING_MODES.get(mode, mode)


def _diagonal(node: Node) -> int:
    return (node.constant(1, "k") or (0,))[0]


# Of a quantization: a scale of one element has neither axis nor block.
_BLOCK = {"axis": integer("axis", 1), "block": integer("block_size", 0)}

# Types of results that are not those of the language: comparisons are int8 there, positions int32.
RESULT_TYPES = {
    **dict.fromkeys(
        ["And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not", "Or", "Xor"],
        DType.BOOL,
    ),
    **dict.fromkeys(["ArgMax", "ArgMin"], DType.INT64),
}  # fmt: skip

# Reductions whose results for integers are integers, although the operator's are floats: they are truncated.
INTEGER_REDUCTIONS = frozenset({"ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean"})

_SAME_OPERATORS = {
    "Abs": "abs", "Acos": "acos", "Acosh": "acosh", "Add": "add", "And": "logical_and", "Asin": "asin",
    "Asinh": "asinh", "Atan": "atan", "Atanh": "atanh", "BitwiseAnd": "bitwise_and", "BitwiseNot": "bitwise_not",
    "BitwiseOr": "bitwise_or", "BitwiseXor": "bitwise_xor", "Ceil": "ceil", "Cos": "cos", "Cosh": "cosh",
    "Det": "determinant", "Equal": "equal", "Erf": "erf", "Exp": "exp", "Floor": "floor", "Greater": "greater",
    "GreaterOrEqual": "greater_equal", "HardSwish": "hard_swish", "Identity": "identity", "IsNaN": "isnan",
    "Less": "less", "LessOrEqual": "less_equal", "Log": "log", "MatMul": "matmul", "Max": "max", "Mean": "mean",
    "Min": "min", "Mish": "mish", "Mul": "mul", "Neg": "neg", "Not": "logical_not", "Or": "logical_or",
    "PRelu": "prelu", "Reciprocal": "reciprocal", "Relu": "relu", "Round": "round", "Sigmoid": "sigmoid",
    "Sign": "sign", "Sin": "sin", "Sinh": "sinh", "Softplus": "softplus", "Softsign": "softsign", "Sqrt": "sqrt",
    "Sub": "sub", "Sum": "add", "Tan": "tan", "Tanh": "tanh", "Where": "where", "Xor": "logical_xor",
}  # fmt: skip
# Activations. ONNX's defaults may differ from the operator's.
_NUMBERED: dict[str, tuple[str, dict[str, float]]] = {
    "Celu": ("celu", {"alpha": 1.0}),
    "Elu": ("elu", {"alpha": 1.0}),
    "HardSigmoid": ("hard_sigmoid", {"alpha": 0.2, "beta": 0.5}),
    "LeakyRelu": ("leaky_relu", {"alpha": 0.01}),
    "Selu": ("selu", {"alpha": 1.6732632423543772, "gamma": 1.0507009873554805}),
    "Shrink": ("shrink", {"lambd": 0.5, "bias": 0.0}),
    "ThresholdedRelu": ("thresholded_relu", {"alpha": 1.0}),
}
_REDUCTIONS = {
    "Sum": "sum", "Mean": "mean", "Max": "max", "Min": "min", "Prod": "prod", "L1": "l1", "L2": "l2",
    "SumSquare": "sum_square", "LogSum": "log_sum", "LogSumExp": "log_sum_exp",
}  # fmt: skip

NODES: dict[str, Reader] = {
    **{name: call(operator) for name, operator in _SAME_OPERATORS.items()},
    **{
        name: call(operator, **{key: number(key, default) for key, default in numbers.items()})
        for name, (operator, numbers) in _NUMBERED.items()
    },
    **{f"Reduce{name}": partial(_reduce, operator=f"reduce_{kind}") for name, kind in _REDUCTIONS.items()},
    **{
        f"Arg{name}": call(
            f"arg{name.lower()}",
            1,
            axis=integer("axis", 0),
            keepdims=flag("keepdims", default=True),
            last=flag("select_last_index"),
        )
        for name in ("Max", "Min")
    },
    "AveragePool": partial(_pool, kind="avg"),
    "BatchNormalization": _batch_norm,
    "BitShift": _bit_shift,
    "Cast": _cast,
    "CenterCropPad": _center_crop_pad,
    "Clip": _clip,
    "Col2Im": call(
        "col2im",
        1,
        image=required("image_shape", 1),
        kernel=required("block_shape", 2),
        stride=integers("strides", 1),
        padding=integers("pads", 0),
        dilation=integers("dilations", 1),
    ),
    "Concat": _concat,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "CumProd": partial(_cumulate, operator="cumprod"),
    "CumSum": partial(_cumulate, operator="cumsum"),
    "DeformConv": _deform_conv,
    "DepthToSpace": call("depth_to_space", block=integer("blocksize", 1), order=named("mode", "DCR", _DEPTH_ORDERS)),
    "DequantizeLinear": call("dequantize_linear", 3, **_BLOCK, dtype=_element_type("output_dtype")),
    "Div": _div,
    "Dropout": _dropout,
    "Einsum": call(EINSUM, equation=text("equation", "")),
    "Expand": call("broadcast_to", 1, shape=required("shape", 1)),
    "Flatten": _flatten,
    "Gather": call("gather", axis=integer("axis", 0), negative=True),
    "GatherElements": call("gather_elements", axis=integer("axis", 0), negative=True),
    "GatherND": call("gather_nd", batch_dims=integer("batch_dims", 0), negative=True),
    "Gelu": call("gelu", approximate=text("approximate", "none")),
    "Gemm": call(
        "gemm",
        3,
        alpha=number("alpha", 1.0),
        beta=number("beta", 1.0),
        transpose_a=flag("transA"),
        transpose_b=flag("transB"),
    ),
    "GlobalAveragePool": call("global_avg_pool{}d", 1),
    "GlobalLpPool": call("global_lp_pool{}d", 1, p=number("p", 2)),
    "GlobalMaxPool": call("global_max_pool{}d", 1),
    "GridSample": call(
        "grid_sample", 2, mode=_sampling_mode, padding=text("padding_mode", "zeros"), align_corners=flag("align_corners")
    ),
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _group_norm,
    "IsInf": call("isinf", negative=flag("detect_negative", default=True), positive=flag("detect_positive", default=True)),
    "LRN": call(
        "local_response_norm",
        size=integer("size", 0),
        alpha=number("alpha", 1e-4),
        beta=number("beta", 0.75),
        bias=number("bias", 1.0),
    ),
    "LayerNormalization": partial(_norm, operator="layer_norm", operands=3),
    "LogSoftmax": partial(_softmax, operator="log_softmax"),
    "LpNormalization": call("lp_norm", axis=integer("axis", -1), p=number("p", 2)),
    "LpPool": partial(_pool, kind="lp"),
    "MaxPool": partial(_pool, kind="max"),
    "Mod": _mod,
    "Pad": _pad,
    "Pow": _pow,
    "QuantizeLinear": call(
        "quantize_linear",
        3,
        **_BLOCK,
        dtype=_element_type("output_dtype"),
        precision=_element_type("precision"),
        saturate=flag("saturate", default=True),
    ),
    "RMSNormalization": partial(_norm, operator="rms_norm", operands=2),
    "Reshape": _reshape,
    "ReverseSequence": call("reverse_sequence", time_axis=integer("time_axis", 0), batch_axis=integer("batch_axis", 1)),
    "RoiAlign": _roi_align,
    **{
        name: call("scatter_elements", reduction=text("reduction", "none"), negative=True, axis=integer("axis", 0))
        for name in ("Scatter", "ScatterElements")
    },
    "ScatterND": call("scatter_nd", reduction=text("reduction", "none"), negative=True),
    "SimplifiedLayerNormalization": partial(_norm, operator="rms_norm", operands=2),
    "Slice": _slice,
    "Softmax": partial(_softmax, operator="softmax"),
    "SpaceToDepth": call("space_to_depth", block=integer("blocksize", 1)),
    "Squeeze": _squeeze,
    "TensorScatter": call(
        "cache_update", 3, axis=integer("axis", -2), circular=named("mode", "linear", {"linear": False, "circular": True})
    ),
    "Tile": _tile,
    "Transpose": _transpose,
    "Trilu": call("trilu", 1, upper=flag("upper", default=True), diagonal=_diagonal),
    "Unsqueeze": call("unsqueeze", 1, axis=required("axes", 1)),
}
