"""Graph and kernels → ModelPlan: memory for every tensor, and the steps in order (a serial plan)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from roller_svc.errors import InvariantError
from roller_svc.graph.concats import Piece, input_offsets, is_contiguous_concat, place_pieces
from roller_svc.graph.memory import Lifetime, align, place
from roller_svc.graph.parameters import order_parameters
from roller_svc.graph.views import view_offset_elements
from roller_svc.ir.graph import Constant, Graph, LoopNode, Node, OpNode
from roller_svc.ir.kernel import Buffer, KernelSource, LaunchSpec, Role
from roller_svc.ir.model_plan import (
    ARENA,
    FIRST_INPUT,
    PACKED,
    WEIGHTS,
    Address,
    CopyStep,
    KernelStep,
    LoopStep,
    ModelKernel,
    ModelPlan,
    Parameter,
    SlotUpdate,
    Step,
)
from roller_svc.ir.program import TensorType


def plan_model(
    graph: Graph, kernels: Sequence[ModelKernel], kernel_of: Mapping[str, int], name: str, target: str, *,
    share_memory: bool = True,
) -> ModelPlan:  # fmt: skip
    """Return the serial plan of a graph: each kernel uses all workers, nodes run in the graph's order.

    `kernel_of` has the kernel of each node that is neither a view nor a loop, by `kernel_key`. With `share_memory`,
    tensors that are not needed at the same time may use the same memory.
    """
    slots = FIRST_INPUT + len(graph.inputs) + len(graph.outputs)
    planner = _Planner(tuple(kernels), kernel_of, slots, share_memory)
    inputs = {tensor: Address(FIRST_INPUT + i) for i, (tensor, _) in enumerate(graph.inputs)}
    first_output = FIRST_INPUT + len(graph.inputs)
    outputs = [Address(first_output + i) for i in range(len(graph.outputs))]
    steps, arena_bytes = planner.plan(graph, "", inputs, outputs, ARENA)
    types = graph.types
    weights, weights_bytes = planner.parameters()
    plan = ModelPlan(
        name, target, graph.inputs, tuple((name, types[tensor]) for name, tensor in graph.outputs), tuple(kernels),
        tuple(planner.prepack), steps, weights, weights_bytes, weights_bytes, planner.packed_bytes,
        arena_bytes, planner.tensor_bytes, planner.num_slots,
    )  # fmt: skip
    return order_parameters(plan)


def kernel_key(path: str, node: Node) -> str:
    """Return the key of a node in a graph or in the body of a loop."""
    return f"{path}/{node.name}"


@dataclass(slots=True)
class _Buffer:
    """Memory of a tensor that no input, constant or output provides."""

    bytes: int
    first: int
    last: int
    address: Address | None = None  # set once it is placed


@dataclass(slots=True)
class _Place:
    """Where a tensor lies: at an address, or in a buffer that is placed later."""

    base: Address | _Buffer
    offset_bytes: int = 0

    def moved(self, offset_bytes: int) -> _Place:
        return _Place(self.base, self.offset_bytes + offset_bytes)

    @property
    def address(self) -> Address:
        base = self.base.address if isinstance(self.base, _Buffer) else self.base
        if base is None:
            raise InvariantError("a buffer is used before it is placed")
        return Address(base.slot, base.offset_bytes + self.offset_bytes)


@dataclass(frozen=True, slots=True)
class _PendingKernel:
    """A launch whose buffers are not placed yet."""

    node: str
    kernel: int
    launch: int
    source: KernelSource
    places: Mapping[str, _Place]  # by symbol

    def step(self) -> Step:
        places = {symbol: place.address for symbol, place in self.places.items()}
        return _kernel_step(self.node, self.kernel, self.launch, self.source, places)


@dataclass(frozen=True, slots=True)
class _PendingCopy:
    """A copy between tensors that are not placed yet."""

    node: str
    target: _Place
    source: _Place
    bytes: int

    def step(self) -> Step:
        return CopyStep(self.node, self.target.address, self.source.address, self.bytes)


@dataclass(frozen=True, slots=True)
class _PendingUpdate:
    """A slot of a loop, over a tensor that is not placed yet."""

    slot: int
    start: _Place
    stride_bytes: int = 0
    alternate_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _PendingLoop:
    """A loop whose slots are not placed yet."""

    node: LoopNode
    updates: Sequence[_PendingUpdate]
    body: tuple[Step, ...]

    def step(self) -> Step:
        updates = (SlotUpdate(u.slot, u.start.address, u.stride_bytes, u.alternate_bytes) for u in self.updates)
        return LoopStep(self.node.name, self.node.steps, tuple(updates), self.body)


_Pending = _PendingKernel | _PendingCopy | _PendingLoop


@dataclass(slots=True)
class _Planner:
    kernels: tuple[ModelKernel, ...]
    kernel_of: Mapping[str, int]
    num_slots: int
    share_memory: bool
    prepack: list[Step] = field(default_factory=list)
    packed_bytes: int = 0
    tensor_bytes: int = 0
    _weights: dict[Constant, int] = field(default_factory=dict)
    _weights_bytes: int = 0
    _packed: dict[tuple[object, ...], dict[str, Address]] = field(default_factory=dict)

    def parameters(self) -> tuple[tuple[Parameter, ...], int]:
        """Return the constants in use, and the bytes of all."""
        listed = (Parameter(constant.type, constant.digest, at) for constant, at in self._weights.items())
        return tuple(listed), self._weights_bytes

    def weight(self, constant: Constant) -> Address:
        if constant not in self._weights:
            self._weights[constant] = self._weights_bytes
            self._weights_bytes += align(constant.type.bytes)
        return Address(WEIGHTS, self._weights[constant])

    def new_slot(self) -> int:
        self.num_slots += 1
        return self.num_slots - 1

    def plan(
        self, graph: Graph, path: str, inputs: Mapping[str, Address], outputs: Sequence[Address], arena: int
    ) -> tuple[tuple[Step, ...], int]:
        """Return the steps of a graph, and the bytes of its buffers, which lie behind the slot `arena`."""
        return _Level(self, graph, path, dict(inputs), outputs, arena).run()

    def packed(self, kernel: int, node: str, constants: Mapping[str, Address]) -> dict[str, Address]:
        """Return the packed buffers of a kernel for these constants, by symbol; pack them once."""
        source = self.kernels[kernel].source
        key = (kernel, *sorted((name, at.offset_bytes) for name, at in constants.items()))
        if key not in self._packed:
            places: dict[str, Address] = {}
            for buffer in source.prepacked_buffers:
                places[buffer.symbol] = Address(PACKED, self.packed_bytes)
                self.packed_bytes += align(buffer.bytes)
            self._packed[key] = places
            inputs = {b.symbol: constants[b.name] for b in source.buffers_of(Role.INPUT) if b.name in constants}
            for number, launch in enumerate(source.launches):
                if launch.is_prepack:
                    self.prepack.append(_kernel_step(node, kernel, number, source, inputs | places))
        return self._packed[key]


@dataclass(slots=True)
class _Level:
    """The graph of the model, or the body of a loop."""

    planner: _Planner
    graph: Graph
    path: str
    inputs: dict[str, Address]
    outputs: Sequence[Address]
    arena: int
    places: dict[str, _Place] = field(default_factory=dict)
    buffers: list[_Buffer] = field(default_factory=list)
    last_use: dict[str, int] = field(default_factory=dict)
    pieces: dict[str, Piece] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)

    def run(self) -> tuple[tuple[Step, ...], int]:
        self.places = {tensor: _Place(address) for tensor, address in self.inputs.items()}
        self.types = self.graph.types
        end = len(self.graph.nodes)
        views = self._views()
        for i, node in enumerate(self.graph.nodes):
            for tensor in node.inputs:
                self.last_use[tensor] = i
        for _, tensor in self.graph.outputs:
            self.last_use[tensor] = end
        for node in reversed(self.graph.nodes):  # what reads a view reads its root
            if node.name in views:
                (source,), (result,) = node.inputs, node.outputs
                self.last_use[source] = max(self.last_use.get(source, -1), self.last_use.get(result, -1))
        self.pieces = place_pieces(self.graph)
        for tensor in self.pieces:  # what reads a piece reads its host
            host = self._host(tensor)
            self.last_use[host] = max(self.last_use.get(host, -1), self.last_use.get(tensor, -1))
        direct = self._direct_outputs(views)
        pending: list[_Pending] = []
        for i, node in enumerate(self.graph.nodes):
            if node.name in views:
                self.places[node.outputs[0]] = self._place(node.inputs[0]).moved(views[node.name])
            elif is_contiguous_concat(node):
                pending += self._concat(i, node, direct)
            elif isinstance(node, LoopNode):
                pending += self._loop(i, node, direct)
            else:
                pending += self._kernel(i, node, direct)
        for address, (name, tensor) in zip(self.outputs, self.graph.outputs, strict=True):
            if direct.get(tensor) != address:
                pending.append(
                    _PendingCopy(f"output {name}", _Place(address), self._place(tensor), self.types[tensor].bytes)
                )
        lifetimes = [Lifetime(b.first, b.last, b.bytes) for b in self.buffers]
        offsets, total = place(lifetimes, share=self.planner.share_memory)
        for buffer, offset in zip(self.buffers, offsets, strict=True):
            buffer.address = Address(self.arena, offset)
        return tuple(each.step() for each in pending), total

    def _views(self) -> dict[str, int]:
        """Return the offset in bytes of each node that is a view, by name."""
        views = {}
        for node in self.graph.nodes:
            offset = view_offset_elements(node)
            if offset is not None:
                views[node.name] = offset * node.output_types[0].dtype.bytes
        return views

    def _direct_outputs(self, views: Mapping[str, int]) -> dict[str, Address]:
        """Return the tensors that a node writes straight to an output's memory."""
        written = {t for node in self.graph.nodes if node.name not in views for t in node.outputs} - set(self.pieces)
        carried = {t for node in self.graph.nodes if isinstance(node, LoopNode) for t in node.outputs[: node.carried]}
        direct: dict[str, Address] = {}
        for address, (_, tensor) in zip(self.outputs, self.graph.outputs, strict=True):
            if tensor in written and tensor not in carried:
                direct.setdefault(tensor, address)
        return direct

    def _place(self, tensor: str) -> _Place:
        if tensor not in self.places:
            self.places[tensor] = _Place(self.planner.weight(self.graph.constants[tensor]))
        return self.places[tensor]

    def _buffer(self, size_bytes: int, first: int, last: int) -> _Place:
        buffer = _Buffer(size_bytes, first, last)
        self.buffers.append(buffer)
        return _Place(buffer)

    def _host(self, tensor: str) -> str:
        """Return the tensor in whose memory a piece lies, which is not a piece itself."""
        while tensor in self.pieces:
            tensor = self.pieces[tensor].host
        return tensor

    def _result(self, i: int, tensor: str, type_: TensorType, direct: Mapping[str, Address]) -> _Place:
        """Return the place of a tensor that node `i` writes; a piece lies in its host, which the first piece makes."""
        if tensor in self.places:
            return self.places[tensor]
        self.planner.tensor_bytes += type_.bytes
        if tensor in self.pieces:
            piece = self.pieces[tensor]
            host = self._result(i, piece.host, self.types[piece.host], direct)
            self.places[tensor] = host.moved(piece.offset_bytes)
        elif tensor in direct:
            self.places[tensor] = _Place(direct[tensor])
        else:
            self.places[tensor] = self._buffer(type_.bytes, i, max(i, self.last_use.get(tensor, i)))
        return self.places[tensor]

    def _concat(self, i: int, node: Node, direct: Mapping[str, Address]) -> list[_Pending]:
        """Return the copies of inputs that do not lie in the result."""
        result = self._result(i, node.outputs[0], node.output_types[0], direct)
        copies: list[_Pending] = []
        for tensor, type_, offset in zip(node.inputs, node.input_types, input_offsets(node), strict=True):
            place = self._place(tensor)
            if place.base is not result.base or place.offset_bytes != result.offset_bytes + offset:
                copies.append(_PendingCopy(node.name, result.moved(offset), place, type_.bytes))
        return copies

    def _kernel(self, i: int, node: OpNode, direct: Mapping[str, Address]) -> list[_Pending]:
        kernel = self.planner.kernel_of[kernel_key(self.path, node)]
        source = self.planner.kernels[kernel].source
        tensors = {
            (Role.INPUT, name): self._place(tensor)
            for (name, _), tensor in zip(node.program.inputs, node.inputs, strict=True)
        }
        for output, tensor, type_ in zip(node.program.outputs, node.outputs, node.output_types, strict=True):
            tensors[Role.OUTPUT, output.name] = self._result(i, tensor, type_, direct)
        constants = {name: tensors[Role.INPUT, name].address for name in source.constants}
        packed = self.planner.packed(kernel, node.name, constants) if source.prepacked_buffers else {}
        places: dict[str, _Place] = {}
        for buffer in source.buffers:
            if buffer.role in (Role.INPUT, Role.OUTPUT):
                places[buffer.symbol] = tensors[buffer.role, buffer.name]
            elif buffer.symbol in packed:
                places[buffer.symbol] = _Place(packed[buffer.symbol])
            elif buffer.role is Role.WORKSPACE:
                places[buffer.symbol] = self._buffer(buffer.bytes, i, i)
        return [
            _PendingKernel(node.name, kernel, number, source, places)
            for number, launch in enumerate(source.launches)
            if not launch.is_prepack
        ]

    def _loop(self, i: int, node: LoopNode, direct: Mapping[str, Address]) -> list[_Pending]:
        """Return the copies of the first states, and the loop.

        A state has two halves that take turns: a step reads one and writes the other.
        """
        planner, body = self.planner, node.body
        names = [name for name, _ in body.inputs]
        inputs: dict[str, Address] = {}
        outputs: list[Address] = []
        updates: list[_PendingUpdate] = []
        steps: list[_Pending] = []
        results = list(zip(node.outputs[: node.carried], node.output_types, strict=False))
        for name, tensor, (result, type_) in zip(names, node.inputs, results, strict=False):
            half = align(type_.bytes)
            last = max(i, self.last_use.get(result, i))
            state = self._buffer(2 * half, i, last)
            steps.append(_PendingCopy(node.name, state, self._place(tensor), type_.bytes))
            read, write = planner.new_slot(), planner.new_slot()
            updates += [_PendingUpdate(read, state, 0, half), _PendingUpdate(write, state.moved(half), 0, -half)]
            inputs[name] = Address(read)
            outputs.append(Address(write))
            self.places[result] = state.moved(half * (node.steps & 1))
        middle = node.carried + len(node.scanned)
        scanned = zip(names[node.carried : middle], node.inputs[node.carried : middle], node.scanned, strict=True)
        types = dict(body.inputs)
        for name, tensor, backward in scanned:
            inputs[name] = self._slices(node, types[name], self._place(tensor), updates, backward=backward)
        for name, tensor in zip(names[middle:], node.inputs[middle:], strict=True):
            slot = planner.new_slot()
            updates.append(_PendingUpdate(slot, self._place(tensor)))
            inputs[name] = Address(slot)
        whole = zip(node.outputs[node.carried :], node.output_types[node.carried :], node.stacked, strict=True)
        for tensor, type_, backward in whole:
            piece = TensorType(type_.dtype, type_.shape[1:])
            result_place = self._result(i, tensor, type_, direct)
            outputs.append(self._slices(node, piece, result_place, updates, backward=backward))
        arena = planner.new_slot()
        inner, size = planner.plan(body, kernel_key(self.path, node), inputs, outputs, arena)
        updates.append(_PendingUpdate(arena, self._buffer(size, i, i)))
        return [*steps, _PendingLoop(node, updates, inner)]

    def _slices(
        self, node: LoopNode, piece: TensorType, whole: _Place, updates: list[_PendingUpdate], *, backward: bool
    ) -> Address:
        """Return the address of a slice, whose slot moves along the whole tensor."""
        slot = self.planner.new_slot()
        if backward:
            updates.append(_PendingUpdate(slot, whole.moved((node.steps - 1) * piece.bytes), -piece.bytes))
        else:
            updates.append(_PendingUpdate(slot, whole, piece.bytes))
        return Address(slot)


def _kernel_step(
    node: str, kernel: int, number: int, source: KernelSource, places: Mapping[str, Address]
) -> KernelStep:
    launch: LaunchSpec = source.launches[number]
    buffers: dict[str, Buffer] = {b.symbol: b for b in source.buffers}
    arguments = tuple(None if buffers[s].role is Role.STATUS else places[s] for s in launch.args)
    zeroed = tuple((places[s], buffers[s].bytes) for s in launch.zeroed)
    return KernelStep(node, kernel, number, arguments, zeroed)
