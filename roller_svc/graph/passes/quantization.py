"""Quantized tensors: products of them become sums of integers, and what only moves them moves integers.

Exporters write DequantizeLinear before each operator of floats, and QuantizeLinear after it. The product of two
dequantized tensors, Σ sa (a - za) * sb (b - zb), is sa sb Σ (a - za) * (b - zb): a sum that is exact in int32, scaled
once. The pass runs before constants are folded, since that makes weights float32.

A product of floats and a dequantized constant takes the constant's integers, and dequantizes them itself: few rows then
read no more bytes than the file has (`packed_weights.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from roller_svc.errors import InvariantError
from roller_svc.frontend.graph_builder import DEQUANTIZE, program_of_call
from roller_svc.frontend.ops import OPS
from roller_svc.graph.costs import CostTable
from roller_svc.graph.merge import merge_nodes
from roller_svc.graph.passes.constants import evaluate_node
from roller_svc.graph.passes.packed_weights import PackedWeight, packed_weight
from roller_svc.graph.weights import Array, Weights
from roller_svc.ir.affine import affine
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, Select, axes_of, children, loads_of, rewrite
from roller_svc.ir.graph import FUSED, Constant, Graph, HostNode, LoopNode, Node, OpNode
from roller_svc.ir.program import Combine, StatementKind, TensorExpr, TensorProgram, TensorType
from roller_svc.semantics.interpreter import reference

QUANTIZE = "quantize_linear"
_BYTES = (DType.INT8, DType.UINT8)
_QUANTIZED = (*_BYTES, DType.INT16, DType.UINT16)
# Scales of which no product of two and a sum is subnormal or infinite, and with which x * scale / scale rounds to x.
MIN_SCALE, MAX_SCALE = 2.0**-40, 2.0**40
# Steps of a result that a divided number may be: roundings of float32 then are less than a tenth of a step. Smaller
# numbers times an integer may be subnormal.
GREATEST_STEPS, LEAST_STEPS = 2.0**18, 2.0**-60


def sum_integers(graph: Graph, weights: Weights, costs: CostTable) -> Graph:
    """Return the graph with products of quantized tensors as sums of integers where the model expects that to be faster.

    Scales and zero points must be constants. A tensor that is quantized again as it was is not converted.
    """
    uses = Counter(tensor for node in graph.nodes for tensor in node.inputs)
    uses.update(tensor for _, tensor in graph.outputs)
    # Of constants as they are folded: each dequantized one has floats.
    elements = sum(constant.type.elements for constant in graph.constants.values())
    exceeds_caches = elements * DType.FLOAT32.bytes > max(level.capacity_bytes for level in costs.hw.levels[1:])
    rewriting = _Rewriting(weights, costs, dict(graph.constants), uses, exceeds_caches)
    for node in graph.nodes:
        rewriting.add(rewriting.rewrite(node))
    nodes = tuple(node for node in rewriting.nodes if rewriting.replaced.isdisjoint(node.outputs))
    outputs = tuple((name, rewriting.same.get(tensor, tensor)) for name, tensor in graph.outputs)
    return replace(graph, constants=rewriting.constants, nodes=nodes, outputs=outputs)


@dataclass(frozen=True, slots=True)
class _Quantized:
    """A float32 tensor that is `(integers - zero) * scale`, as a node makes it or quantizes it."""

    node: OpNode
    tensor: str  # of the integers
    type: TensorType
    axis: int | None  # along which each index has a scale; None: all elements share one
    scale: Array
    zero: Array  # int64, of the scale's shape

    def is_like(self, other: _Quantized) -> bool:
        """Return whether equal integers are equal numbers."""
        is_same = self.type.dtype is other.type.dtype and self.axis == other.axis
        return is_same and np.array_equal(self.scale, other.scale) and np.array_equal(self.zero, other.zero)


@dataclass(frozen=True, slots=True)
class _Factor:
    """A factor of a product: integers less a zero point, times a scale; 0 where a condition fails."""

    load: Load  # of the integers
    condition: Expr | None
    zero: int
    scale: Array
    scaled_axis: str | None  # along which each index has a scale
    tensor: str  # in the graph
    constant: Array | None  # the integers, if they are known

    @property
    def greatest(self) -> int:
        """The greatest absolute value of an element less the zero point."""
        low, high = self.load.dtype.integer_range
        if self.constant is not None:
            low, high = int(self.constant.min()), int(self.constant.max())
        return max(abs(low - self.zero), abs(high - self.zero))

    def value(self, zero: int) -> Expr:
        """Return the integers, which are the zero point where the condition fails."""
        if self.condition is None:
            return self.load
        return Select(self.condition, self.load, Const(zero, self.load.dtype), self.load.dtype)

    def difference(self) -> Expr:
        """Return the integers less the zero point."""
        wide = _widened(self.load)
        value = Op(OpKind.SUB, (wide, Const(self.zero, DType.INT32)), DType.INT32) if self.zero else wide
        return value if self.condition is None else Select(self.condition, value, Const(0, DType.INT32), DType.INT32)


@dataclass(frozen=True, slots=True)
class _ScaledSum:
    """Names of the inputs of a node that multiplies a sum of integers, and then adds a number."""

    scale: str
    added: str | None  # None: nothing is added; "": more than an addition follows


@dataclass(slots=True)
class _Rewriting:
    weights: Weights
    costs: CostTable
    constants: dict[str, Constant]
    uses: Mapping[str, int]  # readers of each tensor, outputs of the graph among them
    exceeds_caches: bool  # whether constants of the graph do not fit the caches together
    nodes: list[Node] = field(default_factory=list)
    replaced: set[str] = field(default_factory=set)  # results of nodes whose work others do
    producers: dict[str, Node] = field(default_factory=dict)
    sums: dict[str, _ScaledSum] = field(default_factory=dict)  # by the result
    quantized: dict[str, _Quantized] = field(default_factory=dict)  # by the float tensor
    packed: dict[str, PackedWeight] = field(default_factory=dict)  # by the float tensor
    same: dict[str, str] = field(default_factory=dict)  # tensor → the one that it equals

    def add(self, nodes: Sequence[Node]) -> None:
        """Add nodes to the graph."""
        self.nodes += nodes
        self.producers |= {tensor: node for node in nodes for tensor in node.outputs}

    def rewrite(self, node: Node) -> Sequence[Node]:
        """Return the nodes that a node becomes."""
        inputs = tuple(self.same.get(tensor, tensor) for tensor in node.inputs)
        if isinstance(node, LoopNode):
            return (replace(node, inputs=inputs, body=sum_integers(node.body, self.weights, self.costs)),)
        if isinstance(node, HostNode):
            raise InvariantError(f"node {node.name} is a function of Python: a graph is cut before its passes")
        node = replace(node, inputs=inputs)
        if (weight := packed_weight(node, self.packed, self.constants)) is not None:
            self.packed[node.outputs[0]] = weight
        if node.operator == DEQUANTIZE:
            if (quantized := self._read(node)) is not None:
                self.quantized[node.outputs[0]] = quantized
            return (node,)
        if node.operator == QUANTIZE:
            quantized, before = self._read(node), self.quantized.get(node.inputs[0])
            if quantized is not None and before is not None and quantized.is_like(before):
                self.same[node.outputs[0]] = before.tensor
                return ()
            return (node,) if quantized is None or quantized.axis is not None else self._requantize(node, quantized)
        return self._move(node) or (self._sum(node) or self._with_packed_weight(node) or node,)

    def _read(self, node: OpNode) -> _Quantized | None:
        """Return what a node converts; None unless its numbers are constants in the range of scales."""
        parameters, (first, scales, *_), (last,) = dict(node.parameters), node.input_types, node.output_types
        is_read = node.operator == DEQUANTIZE
        integers, floats = (first, last) if is_read else (last, first)
        is_plain = not parameters.get("block", 0) and parameters.get("precision") in (None, DType.FLOAT32.value)
        if not is_plain or integers.dtype not in _QUANTIZED or {floats.dtype, scales.dtype} != {DType.FLOAT32}:
            return None
        if any(each not in self.constants for each in node.inputs[1:]):
            return None
        scale, *zeros = (self.weights.array(self.constants[each]) for each in node.inputs[1:])
        zero = zeros[0].astype(np.int64) if zeros else np.zeros((), np.int64)
        is_single = scale.size == 1 and scale.ndim <= 1
        if not np.all((scale >= MIN_SCALE) & (scale <= MAX_SCALE)) or (is_single and zero.size > 1):
            return None
        shape = () if is_single else scale.shape
        axis = None if is_single else int(str(parameters.get("axis", 1))) % len(integers.shape)
        zero = np.broadcast_to(zero.reshape(()) if zero.size == 1 else zero, shape)
        return _Quantized(node, node.inputs[0] if is_read else node.outputs[0], integers, axis, scale.reshape(shape), zero)

    # movement ---------------------------------------------------------------------------------------------------------
    def _move(self, node: OpNode) -> Sequence[Node]:
        """Return the node with integers in place of floats, and their conversion; nothing if it does not only move them."""
        names = _moved_inputs(node)
        inputs = list(zip(node.program.inputs, node.inputs, strict=True))
        moved = [self.quantized.get(tensor) for (name, _), tensor in inputs if name in names]
        known = [each for each in moved if each is not None]
        if not known or len(known) < len(moved) or not all(known[0].is_like(each) for each in known):
            return ()
        axis = known[0].axis if known[0].axis is None else _moved_axis(node, known[0].axis)
        if (axis is None) != (known[0].axis is None):
            return ()
        types, tensors = list(node.input_types), list(node.inputs)
        for i, ((name, _), tensor) in enumerate(inputs):
            if name in names:
                types[i], tensors[i] = self.quantized[tensor].type, self.quantized[tensor].tensor
        program = program_of_call(node.operator, tuple(types), node.parameters)
        (output,) = program.outputs
        type_ = program.types[output.tensor]
        if type_ != TensorType(known[0].type.dtype, node.output_types[0].shape):
            return ()
        integers = f"{node.outputs[0]}.integers"
        conversion = known[0].node
        read_types = (type_, *conversion.input_types[1:])
        parameters = () if axis is None else (("axis", axis),)
        dequantized = OpNode(
            f"{node.name}/{DEQUANTIZE}",
            DEQUANTIZE,
            program_of_call(DEQUANTIZE, read_types, parameters),
            (integers, *conversion.inputs[1:]),
            node.outputs,
            parameters,
        )
        self.quantized[node.outputs[0]] = replace(known[0], node=dequantized, tensor=integers, type=type_, axis=axis)
        mover = replace(node, program=program, inputs=tuple(tensors), outputs=(integers,))
        if all(tensor in self.constants for tensor in tensors):  # products are to know the integers
            self.constants |= evaluate_node(mover, self.constants, self.weights)
            return (dequantized,)
        return (mover, dequantized)

    # scales after scales ----------------------------------------------------------------------------------------------
    def _requantize(self, node: OpNode, quantized: _Quantized) -> Sequence[Node]:
        """Return the node without its division, where the scales of what it quantizes are divided instead."""
        replaced, new = set[str](), list[OpNode]()
        divided = self._divide(node.inputs[0], float(quantized.scale), node, replaced, new)
        if divided is None:
            return (node,)
        scale, _ = node.program.inputs[1]

        def without_division(expr: Expr) -> Expr:
            is_division = isinstance(expr, Op) and expr.kind is OpKind.DIV and expr.args[1:] == (Load(scale, (), DType.FLOAT32),)
            return expr.args[0] if is_division and isinstance(expr, Op) else expr

        (statement,) = node.program.statements
        changed = replace(statement, body=rewrite(statement.body, without_division))
        if any(load.tensor == scale for load in changed.reads):
            return (node,)
        self.replaced |= replaced
        inputs = tuple(each for each in node.program.inputs if each[0] != scale)
        program = replace(node.program, inputs=inputs, statements=(changed,))
        return (*new, OpNode(node.name, FUSED, program, (divided, *node.inputs[2:]), node.outputs))

    def _divide(self, tensor: str, by: float, at: OpNode, replaced: set[str], new: list[OpNode]) -> str | None:
        """Return a tensor divided by a number, by `new` nodes in place of `replaced` ones; None if that takes a division."""
        node, name = self.producers.get(tensor), f"{at.outputs[0]}.{len(self.constants)}.{len(new)}"
        if tensor not in self.quantized and self._constant(tensor) is not None:
            return self._divide_constant(tensor, by, name)
        if not isinstance(node, OpNode):
            return None
        if (quantized := self.quantized.get(tensor)) is not None:
            scale = self._divide_constant(node.inputs[1], by, f"{name}.scale", GREATEST_STEPS / _extent(quantized.type.dtype))
            if scale is None:
                return None
            new.append(replace(node, name=f"{at.name}/{DEQUANTIZE}.{len(new)}", inputs=(node.inputs[0], scale, *node.inputs[2:]),
                               outputs=(name,)))  # fmt: skip
            return name
        if self.uses[tensor] != 1:
            return None
        inputs = dict(zip((each for each, _ in node.program.inputs), node.inputs, strict=True))
        if (known := self.sums.get(tensor)) is not None:
            if known.added == "":
                return None
            changed: dict[str, str | None] = {known.scale: self._divide_constant(inputs[known.scale], by, f"{name}.scale")}
            if known.added is not None:
                changed[known.added] = self._divide_constant(inputs[known.added], by, f"{name}.added")
        elif node.operator == "mul":
            changed = self._divide_factor(inputs, by, at, replaced, new)
        elif node.operator == "add" and not any(map(self._is_bounded, inputs.values())):
            return None  # two large numbers may cancel each other, and leave more than a step of their roundings
        elif node.operator in ("add", "relu") or (len(inputs) == 1 and _moved_inputs(node)):
            changed = {each: self._divide(inputs[each], by, at, replaced, new) for each in inputs}
        else:
            return None
        read = inputs | {each: divided for each, divided in changed.items() if divided is not None}
        if not changed or None in changed.values():
            return None
        replaced.add(tensor)
        name = f"{name}.{len(new)}"
        new.append(replace(node, inputs=tuple(read.values()), outputs=(name,)))
        return name

    def _divide_factor(
        self, inputs: Mapping[str, str], by: float, at: OpNode, replaced: set[str], new: list[OpNode]
    ) -> dict[str, str | None]:
        """Return the first factor of a product that can be divided, by the name of its input; nothing if none can be."""
        for name, tensor in inputs.items():
            own_replaced, own_new = set(replaced), list(new)
            divided = self._divide(tensor, by, at, own_replaced, own_new)
            if divided is not None:
                replaced |= own_replaced
                new[:] = own_new
                return {name: divided}
        return {}

    def _divide_constant(self, tensor: str, by: float, name: str, greatest: float = GREATEST_STEPS) -> str | None:
        """Return a constant divided by a number; None if it is not one, or if its numbers are subnormal or too large."""
        value = self._constant(tensor)
        if value is None or value.dtype != np.float32:
            return None
        divided = value.astype(np.float64) / by
        size = np.abs(divided)
        if not np.all((size <= greatest) & ((size == 0) | (size >= LEAST_STEPS))):
            return None
        return self._add(name, divided.astype(np.float32), DType.FLOAT32)

    def _is_bounded(self, tensor: str) -> bool:
        """Return whether the numbers of a tensor are bounded where they can be divided."""
        return tensor in self.quantized or self._constant(tensor) is not None

    def _constant(self, tensor: str) -> Array | None:
        """Return the value of a constant, perhaps one that is dequantized."""
        if tensor in self.constants:
            return self.weights.array(self.constants[tensor])
        node = self.producers.get(tensor)
        if not isinstance(node, OpNode) or node.operator != DEQUANTIZE or any(each not in self.constants for each in node.inputs):
            return None
        arrays = zip((name for name, _ in node.program.inputs), node.inputs, strict=True)
        (output,) = node.program.outputs
        return reference(node.program, {name: self.weights.array(self.constants[each]) for name, each in arrays})[output.name]

    # products ---------------------------------------------------------------------------------------------------------
    def _sum(self, node: OpNode) -> OpNode | None:
        """Return the node with a sum of integers in place of a sum of floats; None where there is none that is faster."""
        for statement in node.program.statements:
            factors = self._factors(statement, node)
            if factors is not None:
                return self._with_integers(node, statement, factors)
        return None

    def _with_packed_weight(self, node: OpNode) -> OpNode | None:
        """Return the node with a constant factor that it dequantizes itself; None where there is none that is faster."""
        tensors = {name: tensor for (name, _), tensor in zip(node.program.inputs, node.inputs, strict=True)}
        for statement in node.program.statements:
            for load in _factor_loads(statement):
                weight = self.packed.get(tensors.get(load.tensor, ""))
                reads = [each for other in node.program.statements for each in other.reads if each.tensor == load.tensor]
                if weight is None or reads != [load] or self.uses[tensors[load.tensor]] != 1:
                    continue
                changed = weight.inlined(node, statement, load, self.weights, self.constants)
                before = self._seconds(node, self.constants | {tensors[load.tensor]: self.constants[weight.integers]})
                ways = [] if changed is None else [changed, *self._with_dequantized(changed)]
                timed = [(seconds, way) for way in ways if (seconds := self._seconds(way, self.constants)) is not None]
                if timed and (before is None or min(seconds for seconds, _ in timed) < before):
                    self._leave_out(tensors[load.tensor])
                    return min(timed, key=lambda pair: pair[0])[1]
        return None

    def _with_dequantized(self, node: OpNode) -> list[OpNode]:
        """Return the node with each factor that it dequantizes itself, as one whose scales are not constants."""
        producers = (self.producers.get(tensor) for tensor in dict.fromkeys(node.inputs))
        dequantized = [each for each in producers if isinstance(each, OpNode) and each.operator == DEQUANTIZE]
        return [replace(merge_nodes([each, node], node.outputs), name=node.name) for each in dequantized]

    def _seconds(self, node: OpNode, constants: Mapping[str, Constant]) -> float | None:
        """Return the seconds of a node in this graph: where caches do not hold all constants, its own come from memory."""
        cost, hw = self.costs.cost(node, constants), self.costs.hw
        if cost is None:
            return None
        read = sum(type_.bytes for type_, tensor in zip(node.input_types, node.inputs, strict=True) if tensor in constants)
        return max(cost.seconds, read / hw.dram.bandwidth_bytes_per_s) if self.exceeds_caches else cost.seconds

    def _leave_out(self, tensor: str) -> None:
        """Leave out the nodes that make a dequantized constant, as far as nothing else reads their results."""
        while tensor in self.packed and self.uses[tensor] == 1:
            self.replaced.add(tensor)
            tensor = self.producers[tensor].inputs[0]

    def _factors(self, statement: TensorExpr, node: OpNode) -> tuple[_Factor, _Factor] | None:
        """Return the quantized factors of a sum of products of two; None for other statements."""
        body = statement.body
        if not _sums_products(statement) or not isinstance(body, Op):
            return None
        tensors = {name: tensor for (name, _), tensor in zip(node.program.inputs, node.inputs, strict=True)}
        first, second = (self._factor(arg, tensors, statement) for arg in body.args)
        return None if first is None or second is None else (first, second)

    def _factor(self, expr: Expr, tensors: Mapping[str, str], statement: TensorExpr) -> _Factor | None:
        match expr:
            case Load() as load:
                condition = None
            case Select(cond=condition, then=Load() as load, otherwise=Const(value=0)) if not loads_of(condition):
                pass
            case _:
                return None
        quantized = self.quantized.get(tensors.get(load.tensor, ""))
        if quantized is None or quantized.type.dtype not in _BYTES or any(map(loads_of, load.index)):
            return None
        axis = None if quantized.axis is None else load.index[quantized.axis]
        if axis is not None and not (isinstance(axis, AxisRef) and axis in statement.index):
            return None
        array, tensor, dtype, zero = None, quantized.tensor, quantized.type.dtype, quantized.zero
        if tensor in self.constants:
            array = self.weights.array(self.constants[tensor]).astype(np.int64)
            shape = [1] * array.ndim
            if quantized.axis is not None:
                shape[quantized.axis] = -1
            centred = array - zero.reshape(shape)
            if zero.any() and _fits(centred, DType.INT8):
                array, dtype, zero = centred, DType.INT8, np.zeros((), np.int64)
                tensor = self._add(f"{tensor}.centred", centred.astype(np.int8), DType.INT8)
        if (zero != zero.reshape(-1)[0]).any():
            return None
        integers = replace(load, dtype=dtype)
        name = axis.name if isinstance(axis, AxisRef) else None
        return _Factor(integers, condition, int(zero.reshape(-1)[0]), quantized.scale, name, tensor, array)

    def _add(self, name: str, array: Array, dtype: DType) -> str:
        """Add a constant to the graph, and return its name."""
        self.constants[name] = self.weights.add_typed(array, TensorType(dtype, tuple(array.shape)))
        return name

    def _with_integers(self, node: OpNode, statement: TensorExpr, factors: tuple[_Factor, _Factor]) -> OpNode | None:
        """Return the node with the statement as a sum of integers, and a map that scales it."""
        names = {factor.load.tensor: factor for factor in factors}
        if any(load.tensor in names for other in node.program.statements if other is not statement for load in other.reads):
            return None
        if len({factor.scaled_axis for factor in factors} - {None}) > 1:
            return None
        points = math.prod(axis.extent for axis in statement.reduced)
        if points * math.prod(factor.greatest for factor in factors) > DType.INT32.integer_range[1]:
            return None
        inputs = [
            (name, TensorType(names[name].load.dtype, type_.shape), names[name].tensor) if name in names else (name, type_, tensor)
            for (name, type_), tensor in zip(node.program.inputs, node.inputs, strict=True)
        ]

        types = node.program.types

        def add_input(array: Array, dtype: DType, index: tuple[Expr, ...], role: str) -> Load:
            name = _unused(f"x{len(inputs)}", types)
            inputs.append((name, TensorType(dtype, array.shape), self._add(f"{node.outputs[0]}.{role}", array, dtype)))
            return Load(name, index, dtype)

        total = _unused(f"{statement.output}_integers", types)
        value: Expr = Load(total, statement.index, DType.INT32)
        offset = _offset(statement, factors)
        if offset is None:
            body = _product(factors[0].difference(), factors[1].difference())
        else:
            body = _product(*(_widened(factor.value(factor.zero)) for factor in factors))
            sums, index = offset
            if sums.any():
                loaded = add_input(sums.astype(np.int32), DType.INT32, index, "offset")
                value = Op(OpKind.ADD, (value, loaded), DType.INT32)
        scales = [factor.scale.astype(np.float64) for factor in factors]
        axis = next((factor.scaled_axis for factor in factors if factor.scaled_axis is not None), None)
        scale = add_input(
            (scales[0] * scales[1]).astype(np.float32), DType.FLOAT32, () if axis is None else (AxisRef(axis),), "scale"
        )
        scaled = Op(OpKind.MUL, (Cast(value, DType.FLOAT32), scale), DType.FLOAT32)
        summed = replace(
            statement,
            output=total,
            name=total,
            type=TensorType(DType.INT32, statement.type.shape),
            axes=(*statement.spatial, *sorted(statement.reduced, key=lambda each: not _slides(each.name, factors))),
            body=body,
        )
        mapped = replace(statement, kind=StatementKind.MAP, axes=statement.spatial, body=scaled, combine=None)
        statements = node.program.statements
        at = statements.index(statement)
        program = TensorProgram(
            tuple((name, type_) for name, type_, _ in inputs),
            (*statements[:at], summed, mapped, *statements[at + 1 :]),
            node.program.outputs,
        )
        changed = OpNode(node.name, FUSED, program, tuple(tensor for *_, tensor in inputs), node.outputs)
        if not self._is_faster(changed, node):
            return None
        self.sums[node.outputs[0]] = _ScaledSum(scale.tensor, _added_input(statements[at + 1 :], statement, node))
        return changed

    def _is_faster(self, changed: OpNode, node: OpNode) -> bool:
        """Return whether the model expects the sum of integers to be faster, also if it ranks no sum of floats."""
        folded = {t: self.constants[q.tensor] for t, q in self.quantized.items() if q.tensor in self.constants}
        cost = self.costs.cost(changed, self.constants)
        before = self.costs.cost(node, self.constants | folded)
        return cost is not None and (before is None or cost.seconds < before.seconds)


def _sums_products(statement: TensorExpr) -> bool:
    """Return whether a statement is a sum of products of two in float32."""
    is_sum = statement.kind is StatementKind.REDUCE and statement.combine is Combine.SUM
    return is_sum and isinstance(statement.body, Op) and statement.body.kind is OpKind.MUL and statement.type.dtype is DType.FLOAT32


def _factor_loads(statement: TensorExpr) -> list[Load]:
    """Return the tensors of floats of whose products a statement is the sum."""
    return [arg for arg in children(statement.body) if isinstance(arg, Load)] if _sums_products(statement) else []


def _added_input(statements: Sequence[TensorExpr], total: TensorExpr, node: OpNode) -> str | None:
    """Return the input that is added to a sum after it; "" if something else is done with it."""
    if not statements:
        return None
    inputs = {name for name, _ in node.program.inputs}
    match statements[0].body:
        case Op(kind=OpKind.ADD, args=(Load(tensor=first), Load(tensor=second))) if len(statements) == 1:
            return second if first == total.output and second in inputs else ""
        case _:
            return ""


def _moved_inputs(node: OpNode) -> frozenset[str]:
    """Return the inputs of which a node only moves or selects elements; none if it does anything else.

    The greatest and the least of elements is one of them.
    """
    program = node.program
    if node.operator not in OPS or len(program.statements) != 1:
        return frozenset()
    (statement,) = program.statements
    is_extremum = statement.kind is StatementKind.REDUCE and statement.combine in (Combine.MAX, Combine.MIN)
    if statement.kind is not StatementKind.MAP and not (is_extremum and isinstance(statement.body, Load)):
        return frozenset()
    loads = _selected(statement.body)
    moved = frozenset(load.tensor for load in loads)
    is_only_moved = sum(load.tensor in moved for load in statement.reads) == len(loads)  # not read by a condition or an index
    return moved if is_only_moved else frozenset()


def _moved_axis(node: OpNode, axis: int) -> int | None:
    """Return where a node puts a whole axis of its only input; None if it moves the axis in any other way."""
    (statement,) = node.program.statements
    loads = _selected(statement.body)
    if len(loads) != 1 or loads[0] is not statement.body or statement.kind is not StatementKind.MAP:
        return None
    place = loads[0].index[axis]
    if not isinstance(place, AxisRef) or statement.index.count(place) != 1:
        return None
    size = node.program.types[loads[0].tensor].shape[axis]
    return statement.index.index(place) if statement.extents[place.name] == size else None


def _selected(expr: Expr) -> tuple[Load, ...]:
    """Return the loads that an expression is one of; none if it may be anything else."""
    match expr:
        case Load():
            return (expr,)
        case Select(then=then, otherwise=otherwise):
            first, second = _selected(then), _selected(otherwise)
            return (*first, *second) if first and second else ()
        case _:
            return ()


def _unused(name: str, names: Collection[str]) -> str:
    """Return a name that is not among others."""
    while name in names:
        name += "_"
    return name


def _extent(dtype: DType) -> int:
    low, high = dtype.integer_range
    return high - low


def _widened(expr: Expr) -> Expr:
    return Cast(expr, DType.INT32)


def _product(first: Expr, second: Expr) -> Expr:
    return Op(OpKind.MUL, (first, second), DType.INT32)


def _fits(array: Array, dtype: DType) -> bool:
    low, high = dtype.integer_range
    return bool(array.size) and low <= int(array.min()) and int(array.max()) <= high


def _offset(statement: TensorExpr, factors: tuple[_Factor, _Factor]) -> tuple[Array, tuple[Expr, ...]] | None:
    """Return what is added to a sum of integers as they are in memory, and its index; None if the sum needs differences.

    Σ (a - za) * b = Σ a * b - za Σ b: the second sum is known if b is a constant.
    """
    shifted = [factor for factor in factors if factor.zero]
    if not shifted:
        return np.zeros((), np.int64), ()
    if len(shifted) > 1:
        return None
    (other,) = (factor for factor in factors if factor is not shifted[0])
    index = other.load.index
    axes = [each.name for each in index if isinstance(each, AxisRef)]
    is_plain = all(isinstance(each, AxisRef) or each == Const(0, DType.INT32) for each in index) and len(set(axes)) == len(axes)
    if other.constant is None or other.condition is not None or not is_plain:
        return None
    reduced = {axis.name: axis.extent for axis in statement.reduced}
    times = math.prod(extent for name, extent in reduced.items() if name not in axes)
    spatial = tuple(d for d, each in enumerate(index) if isinstance(each, AxisRef) and each.name not in reduced)
    summed_dims = tuple(d for d in range(len(index)) if d not in spatial)
    return -shifted[0].zero * times * other.constant.sum(axis=summed_dims), tuple(index[d] for d in spatial)


def _slides(axis: str, factors: tuple[_Factor, _Factor]) -> bool:
    """Return whether an axis is added to another one in an index, as that of a window is."""
    indices = (index for factor in factors for index in factor.load.index if axis in axes_of(index))
    return any(affine(index) is not None and len(axes_of(index)) > 1 for index in indices)
