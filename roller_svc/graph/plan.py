"""Graph and kernels → ModelPlan: the steps, their order, and memory for every tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from roller_svc.analysis.happens_before import Clock, HappensBefore
from roller_svc.errors import InvariantError
from roller_svc.graph.concats import Piece, input_offsets, is_contiguous_concat, place_pieces
from roller_svc.graph.memory import Lifetime, align, place
from roller_svc.graph.parameters import order_parameters
from roller_svc.graph.states import updates_of
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
    ROperator,
    SlotUpdate,
    Step,
    VDeviceStep,
)
from roller_svc.ir.program import TensorType
from roller_svc.ir.vdevice import VDevicePlan

WHOLE_BYTES = 1 << 46  # of a caller's array, more than any has


def plan_model(
    graph: Graph,
    kernels: Sequence[ModelKernel],
    kernel_of: Mapping[str, int],
    name: str,
    target: str,
    *,
    share_memory: bool = True,
    schedule: Schedule | None = None,
    efficient: Mapping[int, ModelKernel] | None = None,
    alignment_bytes: int = 1,
) -> PlannedModel:
    """Return the plan of a graph, the steps that a schedule gets, its launches, and the buffers between nodes.

    Args:
        graph: the graph.
        kernels: its kernels.
        kernel_of: the kernel of each node that is neither a view nor a loop, by `kernel_key`.
        name: name of the model.
        target: id of the device.
        share_memory: whether tensors that are not needed at the same time may use the same memory.
        schedule: chooses the launches; by default steps run one after the other, each on all workers.
        efficient: the most efficient rKernels of some kernels. Those in use follow the kernels of the plan.
        alignment_bytes: what addresses of kernels' tensors are a multiple of. Inputs, outputs and weights are aligned;
            a part of a tensor that is not is copied.
    """
    types, input_types = graph.types, dict(graph.inputs)
    given = [name for name, _ in graph.inputs if name not in graph.states]
    results = [(name, tensor) for name, tensor in graph.outputs if name not in graph.states]
    slots = FIRST_INPUT + len(given) + len(results) + len(graph.states)
    planner = _Planner(tuple(kernels), kernel_of, slots, share_memory, schedule, efficient or {}, alignment_bytes)
    first_output = FIRST_INPUT + len(given)
    states = {name: Address(first_output + len(results) + i) for i, name in enumerate(graph.states)}
    inputs = {name: Address(FIRST_INPUT + i) for i, name in enumerate(given)} | states
    written = {name: Address(first_output + i) for i, (name, _) in enumerate(results)} | states
    steps, arena_bytes = planner.plan(graph, "", inputs, [written[name] for name, _ in graph.outputs], ARENA)
    weights, weights_bytes = planner.parameters()
    plan = ModelPlan(
        name,
        target,
        tuple((name, input_types[name]) for name in given),
        tuple((name, types[tensor]) for name, tensor in results),
        planner.used_kernels(),
        tuple(planner.prepack),
        steps,
        weights,
        weights_bytes,
        weights_bytes,
        planner.packed_bytes,
        arena_bytes,
        planner.tensor_bytes,
        planner.num_slots,
        tuple((name, input_types[name]) for name in graph.states),
    )
    return PlannedModel(order_parameters(plan), planner.steps, planner.launches, planner.buffers)


def kernel_key(path: str, node: Node) -> str:
    """Return the key of a node in a graph or in the body of a loop."""
    return f"{path}/{node.name}"


@dataclass(slots=True)
class _Buffer:
    """Memory of a tensor that no input, constant or output provides."""

    name: str  # for stories: the tensor, or what else it is for
    bytes: int
    address: Address | None = None  # set once it is placed


@dataclass(slots=True)
class _Place:
    """Where a tensor lies: at an address, or in a buffer that is placed later."""

    base: Address | _Buffer
    offset_bytes: int = 0

    def moved(self, offset_bytes: int) -> _Place:
        return _Place(self.base, self.offset_bytes + offset_bytes)

    @property
    def known(self) -> Address | None:
        """Return the address; None in a buffer that is not placed yet."""
        base = self.base.address if isinstance(self.base, _Buffer) else self.base
        return None if base is None else Address(base.slot, base.offset_bytes + self.offset_bytes)

    @property
    def address(self) -> Address:
        known = self.known
        if known is None:
            raise InvariantError("a buffer is used before it is placed")
        return known


@dataclass(frozen=True, slots=True)
class _PendingKernel:
    """A launch whose buffers are not placed yet."""

    node: str
    kernel: int
    launch: int
    source: KernelSource
    places: Mapping[str, _Place]  # by symbol
    efficient: _PendingKernel | None = None  # its launch by the most efficient rKernel, if that is another one

    def step(self) -> KernelStep:
        places = {symbol: place.address for symbol, place in self.places.items()}
        return _kernel_step(self.node, self.kernel, self.launch, self.source, places)


@dataclass(frozen=True, slots=True)
class _PendingCopy:
    """A copy between tensors that are not placed yet."""

    node: str
    target: _Place
    source: _Place
    bytes: int
    number: int = 0  # among the copies of its node

    def step(self) -> Step:
        return CopyStep(self.node, self.target.address, self.source.address, self.bytes, self.number)


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


@dataclass(frozen=True, slots=True)
class _Access:
    """Bytes of a place that a step reads or writes."""

    place: _Place
    bytes: int
    is_write: bool = True


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step before it is placed in memory, for a schedule."""

    node: str
    predecessors: tuple[int, ...]  # steps that have to finish before
    kernel: int | None = None  # in the plan's kernels; None: a copy or a loop
    launch: int = 0
    num_tasks: tuple[int, ...] = ()  # of each phase of the launch; empty if it cannot be divided
    loop: tuple[int, tuple[Step, ...]] | None = None  # of a loop: how many steps, and the body
    efficient: ModelKernel | None = None  # most efficient rKernel: a launch of one phase or none; None: the fastest

    @property
    def is_loop(self) -> bool:
        """Return whether the step is a loop, which cannot be divided."""
        return self.loop is not None

    def phases(self, rkernel: int) -> tuple[int, ...]:
        """Return the rTasks of each phase of an rKernel's launch; none if it cannot be divided."""
        return self.efficient.source.num_tasks[0] if rkernel and self.efficient is not None else self.num_tasks

    @property
    def efficient_tasks(self) -> int:
        """Return the rTasks of the most efficient rKernel."""
        return max(self.phases(1), default=1)


@dataclass(frozen=True, slots=True)
class Launch:
    """Steps that run one after the other, or by the plan of a virtual device."""

    steps: tuple[int, ...]
    operators: tuple[ROperator, ...] = ()  # of the plan; their steps are positions in `steps`
    plan: VDevicePlan | None = None
    rkernels: tuple[int, ...] = ()  # of each step, 0 the fastest and 1 the most efficient one; empty: all the fastest


Schedule = Callable[[Sequence[PlannedStep]], Sequence[Launch]]


@dataclass(frozen=True, slots=True)
class PlannedBuffer:
    """Memory in the arena, and the steps that use it."""

    name: str
    offset_bytes: int
    bytes: int
    read_by: tuple[int, ...]
    written_by: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A plan, and what it was made of. Bodies of loops are parts of their steps, launches and buffers."""

    plan: ModelPlan
    steps: tuple[PlannedStep, ...]
    launches: tuple[Launch, ...]
    buffers: tuple[PlannedBuffer, ...]


@dataclass(slots=True)
class _Planner:
    kernels: tuple[ModelKernel, ...]
    kernel_of: Mapping[str, int]
    num_slots: int
    share_memory: bool
    schedule: Schedule | None
    efficient: Mapping[int, ModelKernel]  # by the number of the fastest
    alignment_bytes: int
    unaligned_slots: set[int] = field(default_factory=set)  # of loops: whose address is not always a multiple of it
    # of the model, without bodies of loops
    steps: tuple[PlannedStep, ...] = ()
    launches: tuple[Launch, ...] = ()
    buffers: tuple[PlannedBuffer, ...] = ()
    prepack: list[Step] = field(default_factory=list)
    packed_bytes: int = 0
    tensor_bytes: int = 0
    efficient_uses: dict[int, int] = field(default_factory=dict)  # by the number of the fastest, in order of use
    _weights: dict[Constant, int] = field(default_factory=dict)
    _weights_bytes: int = 0
    _packed: dict[tuple[object, ...], dict[str, Address]] = field(default_factory=dict)

    def parameters(self) -> tuple[tuple[Parameter, ...], int]:
        """Return the constants in use, and the bytes of all."""
        listed = (Parameter(constant.type, constant.digest, at) for constant, at in self._weights.items())
        return tuple(listed), self._weights_bytes

    def used_kernels(self) -> tuple[ModelKernel, ...]:
        """Return the kernels, then the efficient ones in use. A node counts as a use of the kernel that it runs."""
        moved = self.efficient_uses
        fastest = (replace(each, uses=each.uses - moved.get(number, 0)) for number, each in enumerate(self.kernels))
        return (*fastest, *(replace(self.efficient[number], uses=uses) for number, uses in moved.items()))

    def use_efficient(self, kernel: int) -> int:
        """Return the number of the most efficient rKernel of a kernel in the plan, and count the use."""
        self.efficient_uses[kernel] = self.efficient_uses.get(kernel, 0) + 1
        return len(self.kernels) + list(self.efficient_uses).index(kernel)

    def weight(self, constant: Constant) -> Address:
        if constant not in self._weights:
            self._weights[constant] = self._weights_bytes
            self._weights_bytes += align(constant.type.bytes)
        return Address(WEIGHTS, self._weights[constant])

    def new_slot(self, start: _Place | None = None, stride_bytes: int = 0) -> int:
        """Return a slot of a loop that moves from a place, by default from an aligned one."""
        self.num_slots += 1
        if stride_bytes % self.alignment_bytes or not (start is None or self.is_aligned(start)):
            self.unaligned_slots.add(self.num_slots - 1)
        return self.num_slots - 1

    def is_aligned(self, place: _Place) -> bool:
        """Return whether a kernel may have a tensor at a place. Buffers and weights are aligned to more."""
        base = place.base
        if not isinstance(base, Address):
            return place.offset_bytes % self.alignment_bytes == 0
        return base.slot not in self.unaligned_slots and (base.offset_bytes + place.offset_bytes) % self.alignment_bytes == 0

    def plan(
        self, graph: Graph, path: str, inputs: Mapping[str, Address], outputs: Sequence[Address], arena: int
    ) -> tuple[tuple[Step, ...], int]:
        """Return the steps of a graph, and the bytes of its buffers, which lie behind the slot `arena`."""
        schedule = self.schedule if path == "" else None
        return _Level(self, graph, path, dict(inputs), outputs, arena, schedule or _in_order).run()

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
    schedule: Schedule
    places: dict[str, _Place] = field(default_factory=dict)
    buffers: list[_Buffer] = field(default_factory=list)
    pieces: dict[str, Piece] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)
    aligned: dict[str, _Place] = field(default_factory=dict)  # copies of tensors that do not lie as kernels expect

    def run(self) -> tuple[tuple[Step, ...], int]:
        self.places = {tensor: _Place(address) for tensor, address in self.inputs.items()}
        self.types = self.graph.types
        views = self._views()
        self.pieces = place_pieces(self.graph)
        direct = self._direct_outputs(views)
        pending: list[_Pending] = []
        for node in self.graph.nodes:
            if node.name in views:
                self.places[node.outputs[0]] = self._place(node.inputs[0]).moved(views[node.name])
            elif is_contiguous_concat(node):
                pending += self._concat(node, direct)
            elif isinstance(node, LoopNode):
                pending += self._loop(node, direct)
            elif isinstance(node, OpNode):
                pending += self._kernel(node, direct)
            else:
                raise InvariantError(f"node {node.name} is {node.operator}, which no plan of a device has")
        stored: set[Address] = set()  # a loop's state and its stack may be one tensor in one place
        for address, (name, tensor) in zip(self.outputs, self.graph.outputs, strict=True):
            size_bytes = self.types[tensor].bytes
            is_missing = name not in self.graph.states and direct.get(tensor) != address and address not in stored
            stored.add(address)
            if is_missing and size_bytes:
                pending.append(_PendingCopy(f"output {name}", _Place(address), self._place(tensor), size_bytes))
        pending += self._store_states()
        pending = _number_copies(pending)
        accesses = [_accesses(each) for each in pending]
        steps = _planned_steps(pending, accesses, self.planner.efficient)
        launches = tuple(self.schedule(steps))
        lifetimes = _lifetimes(self.buffers, accesses, launches)
        offsets, total = place(lifetimes, share=self.planner.share_memory)
        for buffer, offset in zip(self.buffers, offsets, strict=True):
            buffer.address = Address(self.arena, offset)
        if self.path == "":
            self.planner.steps, self.planner.launches = tuple(steps), launches
            self.planner.buffers = _placed_buffers(self.buffers, offsets, accesses)
        return tuple(step for launch in launches for step in self._launch_steps(launch, pending)), total

    def _launch_steps(self, launch: Launch, pending: Sequence[_Pending]) -> list[Step]:
        rkernels = launch.rkernels or (0,) * len(launch.steps)
        steps = [self._step(pending[number], rkernel) for number, rkernel in zip(launch.steps, rkernels, strict=True)]
        if launch.plan is None:
            return steps
        inner = tuple(step for step in steps if isinstance(step, KernelStep | CopyStep))
        if len(inner) < len(steps):
            raise InvariantError("a loop cannot be part of the plan of a virtual device")
        return [VDeviceStep(f"{inner[0].node} ... {inner[-1].node}", inner, launch.operators, launch.plan)]

    def _step(self, pending: _Pending, rkernel: int) -> Step:
        if not rkernel:
            return pending.step()
        if not isinstance(pending, _PendingKernel) or pending.efficient is None:
            raise InvariantError("a step without another rKernel has to use its fastest one")
        step = pending.efficient.step()
        return replace(step, kernel=self.planner.use_efficient(pending.kernel), rkernel=rkernel)

    def _views(self) -> dict[str, int]:
        """Return the offset in bytes of each node that is a view, by name."""
        views = {}
        for node in self.graph.nodes:
            offset = view_offset_elements(node)
            if offset is not None:
                views[node.name] = offset * node.output_types[0].dtype.bytes
        return views

    def _direct_outputs(self, views: Mapping[str, int]) -> dict[str, Address]:
        """Return the tensors that a node writes straight to an output's memory; none for a state, which others read."""
        written = {t for node in self.graph.nodes if node.name not in views for t in node.outputs} - set(self.pieces)
        written -= {result for node in self.graph.nodes for _, result in updates_of(node)}
        loops = [node for node in self.graph.nodes if isinstance(node, LoopNode)]
        carried = {t for node in loops for t in node.outputs[: node.carried]}
        carried |= {node.outputs[stack] for node in loops for stack in self._stacked_states(node).values()}
        direct: dict[str, Address] = {}
        for address, (name, tensor) in zip(self.outputs, self.graph.outputs, strict=True):
            if name in self.graph.states:
                continue
            if tensor in written and tensor not in carried and self.planner.is_aligned(_Place(address)):
                direct.setdefault(tensor, address)
        return direct

    def _store_states(self) -> list[_Pending]:
        """Return the copies of new values of states that are not in their memory.

        A value in the memory of a state that gets another one is copied before.
        """
        missing = [
            (f"state {name}", _Place(address), self._place(tensor), self.types[tensor].bytes)
            for address, (name, tensor) in zip(self.outputs, self.graph.outputs, strict=True)
            if name in self.graph.states and self._place(tensor).known != address and self.types[tensor].bytes
        ]
        overwritten = {target.base for _, target, _, _ in missing}
        saved: list[_Pending] = []
        stored: list[_Pending] = []
        for node, target, source, size_bytes in missing:
            if isinstance(source.base, Address) and Address(source.base.slot) in overwritten:
                buffer = self._buffer(f"new {node}", size_bytes)
                saved.append(_PendingCopy(node, buffer, source, size_bytes))
                source = buffer
            stored.append(_PendingCopy(node, target, source, size_bytes))
        return saved + stored

    def _place(self, tensor: str) -> _Place:
        if tensor not in self.places:
            self.places[tensor] = _Place(self.planner.weight(self.graph.constants[tensor]))
        return self.places[tensor]

    def _buffer(self, name: str, size_bytes: int) -> _Place:
        buffer = _Buffer(name, size_bytes)
        self.buffers.append(buffer)
        return _Place(buffer)

    def _result(self, tensor: str, type_: TensorType, direct: Mapping[str, Address]) -> _Place:
        """Return the place of a tensor that a node writes; a piece lies in its host, which the first piece makes."""
        if tensor in self.places:
            return self.places[tensor]
        self.planner.tensor_bytes += type_.bytes
        if tensor in self.pieces:
            piece = self.pieces[tensor]
            place = self._result(piece.host, self.types[piece.host], direct).moved(piece.offset_bytes)
            self.places[tensor] = place if self.planner.is_aligned(place) else self._buffer(tensor, type_.bytes)
        elif tensor in direct:
            self.places[tensor] = _Place(direct[tensor])
        else:
            self.places[tensor] = self._buffer(tensor, type_.bytes)
        return self.places[tensor]

    def _concat(self, node: Node, direct: Mapping[str, Address]) -> list[_Pending]:
        """Return the copies of inputs that do not lie in the result."""
        result = self._result(node.outputs[0], node.output_types[0], direct)
        copies: list[_Pending] = []
        for tensor, type_, offset in zip(node.inputs, node.input_types, input_offsets(node), strict=True):
            place = self._place(tensor)
            if place.base is not result.base or place.offset_bytes != result.offset_bytes + offset:
                copies.append(_PendingCopy(node.name, result.moved(offset), place, type_.bytes))
        return copies

    def _kernel(self, node: OpNode, direct: Mapping[str, Address]) -> list[_Pending]:
        kernel = self.planner.kernel_of[kernel_key(self.path, node)]
        source = self.planner.kernels[kernel].source
        copies: list[_Pending] = []
        named = zip(node.program.inputs, node.inputs, strict=True)
        tensors = {(Role.INPUT, name): self._aligned(node, tensor, type_, copies) for (name, type_), tensor in named}
        self.places |= {result: self._place(target) for target, result in updates_of(node)}
        for output, tensor, type_ in zip(node.program.outputs, node.outputs, node.output_types, strict=True):
            tensors[Role.OUTPUT, output.name] = self._result(tensor, type_, direct)
        constants = {name: tensors[Role.INPUT, name].address for name in source.constants}
        packed = self.planner.packed(kernel, node.name, constants) if source.prepacked_buffers else {}
        places: dict[str, _Place] = {}
        for buffer in source.buffers:
            if buffer.role in (Role.INPUT, Role.OUTPUT):
                places[buffer.symbol] = tensors[buffer.role, buffer.name]
            elif buffer.symbol in packed:
                places[buffer.symbol] = _Place(packed[buffer.symbol])
            elif buffer.role is Role.WORKSPACE:
                places[buffer.symbol] = self._buffer(f"workspace of {node.name}", buffer.bytes)
        other = self.planner.efficient.get(kernel)
        efficient = None if other is None else _efficient_launch(node, kernel, other.source, tensors)
        return [
            *copies,
            *(
                _PendingKernel(node.name, kernel, number, source, places, efficient)
                for number, launch in enumerate(source.launches)
                if not launch.is_prepack
            ),
        ]

    def _aligned(self, node: OpNode, tensor: str, type_: TensorType, copies: list[_Pending]) -> _Place:
        """Return where a kernel reads a tensor: its place, or an aligned copy, which the first reader makes."""
        place = self._place(tensor)
        if self.planner.is_aligned(place):
            return place
        if tensor not in self.aligned:
            self.aligned[tensor] = self._buffer(f"aligned {tensor}", type_.bytes)
            copies.append(_PendingCopy(node.name, self.aligned[tensor], place, type_.bytes))
        return self.aligned[tensor]

    def _loop(self, node: LoopNode, direct: Mapping[str, Address]) -> list[_Pending]:
        """Return the copies of the first states, and the loop.

        A state has two halves that take turns: a step reads one and writes the other. Where the loop stacks the state's
        values, they lie in the stack, behind the first state: a step reads a slice and writes the next one.
        """
        planner, body = self.planner, node.body
        names = [name for name, _ in body.inputs]
        inputs: dict[str, Address] = {}
        outputs: list[Address] = []
        updates: list[_PendingUpdate] = []
        steps: list[_Pending] = []
        slots_of_stacks: dict[int, Address] = {}  # of those that states lie in
        results = list(zip(node.outputs[: node.carried], node.output_types, strict=False))
        stacked = self._stacked_states(node)
        for number, (name, tensor, (result, type_)) in enumerate(zip(names, node.inputs, results, strict=False)):
            if number in stacked:
                stack = stacked[number]
                first, stride_bytes = self._stack_behind_state(node, stack, type_)
                steps.append(_PendingCopy(node.name, first, self._place(tensor), type_.bytes))
                self.places[result] = first.moved(node.steps * stride_bytes)
                inputs[name], each = (
                    self._moving_slot(start, stride_bytes, updates) for start in (first, first.moved(stride_bytes))
                )
                slots_of_stacks[stack] = each
                outputs.append(each)
                continue
            half = align(type_.bytes)
            state = self._buffer(f"state {name} of {node.name}", 2 * half)
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
            slot = planner.new_slot(self._place(tensor))
            updates.append(_PendingUpdate(slot, self._place(tensor)))
            inputs[name] = Address(slot)
        whole = zip(node.outputs[node.carried :], node.output_types[node.carried :], node.stacked, strict=True)
        for number, (tensor, type_, backward) in enumerate(whole, node.carried):
            if number in slots_of_stacks:
                outputs.append(slots_of_stacks[number])
                continue
            piece = TensorType(type_.dtype, type_.shape[1:])
            result_place = self._result(tensor, type_, direct)
            outputs.append(self._slices(node, piece, result_place, updates, backward=backward))
        arena = planner.new_slot()
        inner, size = planner.plan(body, kernel_key(self.path, node), inputs, outputs, arena)
        updates.append(_PendingUpdate(arena, self._buffer(f"body of {node.name}", size)))
        return [*steps, _PendingLoop(node, updates, inner)]

    def _slices(
        self, node: LoopNode, piece: TensorType, whole: _Place, updates: list[_PendingUpdate], *, backward: bool
    ) -> Address:
        """Return the address of a slice, whose slot moves along the whole tensor."""
        if backward:
            return self._moving_slot(whole.moved((node.steps - 1) * piece.bytes), -piece.bytes, updates)
        return self._moving_slot(whole, piece.bytes, updates)

    def _moving_slot(self, start: _Place, stride_bytes: int, updates: list[_PendingUpdate]) -> Address:
        """Return the address of a slot that moves by a distance in each step of a loop."""
        slot = self.planner.new_slot(start, stride_bytes)
        updates.append(_PendingUpdate(slot, start, stride_bytes))
        return Address(slot)

    def _stacked_states(self, node: LoopNode) -> dict[int, int]:
        """Return the states of a loop that it stacks, each with the number of that output. Their slices are aligned."""
        tensors = [tensor for _, tensor in node.body.outputs]
        found: dict[int, int] = {}
        for state, type_ in enumerate(node.output_types[: node.carried]):
            stack = next((i for i in range(node.carried, len(tensors)) if tensors[i] == tensors[state]), None)
            if stack is not None and stack not in found.values() and type_.bytes % self.planner.alignment_bytes == 0:
                found[state] = stack
        return found

    def _stack_behind_state(self, node: LoopNode, stack: int, type_: TensorType) -> tuple[_Place, int]:
        """Place a stacked output in memory that begins, in the order of steps, with the first state.

        Returns the place of the first state, and the distance to the slice of the first step.
        """
        size_bytes, backward = type_.bytes, node.stacked[stack - node.carried]
        memory = self._buffer(node.outputs[stack], (node.steps + 1) * size_bytes)
        self.planner.tensor_bytes += node.steps * size_bytes
        self.places[node.outputs[stack]] = memory if backward else memory.moved(size_bytes)
        return (memory.moved(node.steps * size_bytes), -size_bytes) if backward else (memory, size_bytes)


def _efficient_launch(
    node: OpNode, kernel: int, source: KernelSource, tensors: Mapping[tuple[Role, str], _Place]
) -> _PendingKernel:
    """Return a node's launch by the most efficient rKernel, whose only memory is the node's tensors."""
    places = {b.symbol: tensors[b.role, b.name] for b in source.buffers if b.role is not Role.STATUS}
    return _PendingKernel(node.name, kernel, 0, source, places)


def _number_copies(pending: Sequence[_Pending]) -> list[_Pending]:
    """Return the steps, with each copy numbered among those of its node. A plan by hand says by it which one it means."""
    counts: dict[str, int] = {}
    numbered: list[_Pending] = []
    for step in pending:
        if isinstance(step, _PendingCopy):
            number = counts[step.node] = counts.get(step.node, -1) + 1
            step = replace(step, number=number)
        numbered.append(step)
    return numbered


def _accesses(step: _Pending) -> list[_Access]:
    """Return what a step reads and writes, apart from weights. A loop may write all that it is given."""
    match step:
        case _PendingKernel():
            packed = {buffer.symbol for buffer in step.source.prepacked_buffers}
            used = set(step.source.launches[step.launch].operands)
            return [
                _Access(step.places[buffer.symbol], buffer.bytes, buffer.role is not Role.INPUT)
                for buffer in step.source.buffers
                if buffer.symbol in used and buffer.role is not Role.STATUS and buffer.symbol not in packed
            ]
        case _PendingCopy():
            return [_Access(step.target, step.bytes), _Access(step.source, step.bytes, is_write=False)]
        case _PendingLoop():
            starts = (update.start for update in step.updates)
            return [
                _Access(_Place(start.base), start.base.bytes)
                if isinstance(start.base, _Buffer)
                else _Access(_Place(Address(start.base.slot)), WHOLE_BYTES)
                for start in starts
            ]


def _planned_steps(
    pending: Sequence[_Pending], accesses: Sequence[Sequence[_Access]], efficient: Mapping[int, ModelKernel]
) -> list[PlannedStep]:
    """Return the steps with their dependencies: what was written before it is read, and read before it is written."""
    seen: dict[object, list[tuple[int, int, int, bool]]] = {}  # by memory: (step, first byte, end, whether it writes)
    planned: list[PlannedStep] = []
    for number, (step, used) in enumerate(zip(pending, accesses, strict=True)):
        predecessors: set[int] = set()
        for access in used:
            base = access.place.base
            memory, offset = (base.slot, base.offset_bytes) if isinstance(base, Address) else (id(base), 0)
            if memory in (WEIGHTS, PACKED):
                continue
            first = offset + access.place.offset_bytes
            end = first + access.bytes
            earlier = seen.setdefault(memory, [])
            predecessors |= {other for other, a, b, writes in earlier if (writes or access.is_write) and a < end and first < b}
            earlier.append((number, first, end, access.is_write))
        before = tuple(sorted(predecessors - {number}))
        if isinstance(step, _PendingKernel):
            tasks = step.source.num_tasks[step.launch]
            other = None if step.efficient is None else efficient[step.kernel]
            planned.append(PlannedStep(step.node, before, step.kernel, step.launch, tasks, efficient=other))
        else:
            name = step.node if isinstance(step, _PendingCopy) else step.node.name
            loop = (step.node.steps, step.body) if isinstance(step, _PendingLoop) else None
            planned.append(PlannedStep(name, before, loop=loop))
    return planned


def _placed_buffers(
    buffers: Sequence[_Buffer], offsets: Sequence[int], accesses: Sequence[Sequence[_Access]]
) -> tuple[PlannedBuffer, ...]:
    """Return the buffers that have elements, each with the steps that use it."""
    users: dict[int, tuple[dict[int, None], dict[int, None]]] = {id(buffer): ({}, {}) for buffer in buffers}
    for step, used in enumerate(accesses):
        for access in used:
            if isinstance(access.place.base, _Buffer):
                users[id(access.place.base)][access.is_write][step] = None
    return tuple(
        PlannedBuffer(buffer.name, offset, buffer.bytes, *map(tuple, users[id(buffer)]))
        for buffer, offset in zip(buffers, offsets, strict=True)
        if buffer.bytes
    )


def _in_order(steps: Sequence[PlannedStep]) -> list[Launch]:
    """Run one step after the other."""
    return [Launch((number,)) for number in range(len(steps))]


def _lifetimes(buffers: Sequence[_Buffer], accesses: Sequence[Sequence[_Access]], launches: Sequence[Launch]) -> list[Lifetime]:
    """Return the lifetime of each buffer: all uses, in the happens-before order of the launches."""
    spans: dict[int, tuple[int, Clock, Clock]] = {}  # by step: launch, what finished before it, what ends it
    at = 0
    for launch in launches:
        if launch.plan is None:
            for step in launch.steps:
                spans[step] = at, (), ()
                at += 1
            continue
        order = HappensBefore(launch.plan)
        for operator, start, end in zip(launch.operators, order.starts, order.ends, strict=True):
            step = launch.steps[operator.step]
            _, known_start, known_end = spans.get(step, (at, start, end))
            spans[step] = at, tuple(map(min, start, known_start)), tuple(map(max, end, known_end))
        at += 1
    users: dict[int, list[int]] = {}
    for step, used in enumerate(accesses):
        for access in used:
            if isinstance(access.place.base, _Buffer):
                users.setdefault(id(access.place.base), []).append(step)
    return [_lifetime([spans[step] for step in users.get(id(buffer), ())], buffer.bytes) for buffer in buffers]


def _lifetime(uses: Sequence[tuple[int, Clock, Clock]], size_bytes: int) -> Lifetime:
    first = min((at for at, _, _ in uses), default=0)
    last = max((at for at, _, _ in uses), default=0)
    starts = [start for at, start, _ in uses if at == first]
    ends = [end for at, _, end in uses if at == last]
    start, end = (
        tuple(map(choose, *clocks)) if len(clocks) > 1 else clocks[0] if clocks else ()
        for choose, clocks in ((min, starts), (max, ends))
    )
    return Lifetime(first, last, size_bytes, start, end)


def _kernel_step(node: str, kernel: int, number: int, source: KernelSource, places: Mapping[str, Address]) -> KernelStep:
    launch: LaunchSpec = source.launches[number]
    buffers: dict[str, Buffer] = {b.symbol: b for b in source.buffers}
    arguments = tuple(None if buffers[s].role is Role.STATUS else places[s] for s in launch.operands)
    zeroed = tuple((places[s], buffers[s].bytes) for s in launch.zeroed)
    return KernelStep(node, kernel, number, arguments, zeroed)
