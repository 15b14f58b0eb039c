"""Graphs that torch.compile captures: groups of supported nodes become models, torch runs the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import fx
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from roller_svc.compiler.request import read_options, reject_unknown
from roller_svc.errors import ArgumentError, UnsupportedModelError, UnsupportedNode
from roller_svc.frontend.torch.convert import operator_name
from roller_svc.frontend.torch.partition import SupportChecker
from roller_svc.frontend.torch.recurrent_calls import capture_recurrent_modules, preserve_recurrent_calls
from roller_svc.frontend.torch.tensors import note_writes
from roller_svc.graph.weights import Weights
from roller_svc.ir.options import SearchOptions
from roller_svc.semantics.interpreter import reference
from roller_svc.torch_backend.part import Part, slower, time_interleaved
from roller_svc.torch_backend.reports import VIEW, Record, left_to_torch, warn, warn_of_nodes

# Shapes for which one graph is compiled; torch runs it for further ones.
MAX_SHAPES = 32
# What these may copy of one graph's constants; the constants are inputs of further ones. The first may copy all.
MAX_COPIED_BYTES = 4 << 30
GRADIENTS = "gradients are not compiled; call below torch.no_grad() to infer"
# Operators that move no element when torch runs them: a group of these alone stays with torch.
_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "alias.default", "detach.default", "expand.default", "permute.default", "select.int", "slice.Tensor",
        "split.Tensor", "split_with_sizes.default", "squeeze.default", "squeeze.dim", "squeeze.dims", "t.default",
        "transpose.int", "unsqueeze.default", "view.default", "_unsafe_view.default", "unbind.int",
    )
) | {"getitem"}  # fmt: skip

Compiled = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions(SearchOptions):
    """Options of the backend: those of kernels, and its own."""

    strict: bool = field(default=False, metadata={"help": "raise an error in place of leaving operators to torch"})


class _TrainingError(Exception):
    """A graph needs gradients."""


def compile_graph(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> Compiled:
    """Compile a graph that torch.compile captured: the backend itself.

    Args:
        module: the graph.
        inputs: its inputs, real or fake.
        options: the fields of GraphOptions.
        mode: rejected unless it is "default".

    Raises:
        ArgumentError: an option is unknown or invalid; a strict graph needs gradients.
        UnsupportedModelError: a strict graph has nodes that are not supported.
    """
    if mode not in (None, "default"):
        raise ArgumentError(f"mode {mode!r} is not supported; leave it out", code="invalid-option")
    reject_unknown(GraphOptions, options or {}, "torch.compile")
    checked = GraphOptions(**read_options(GraphOptions, options or {}))
    placeholders = module.graph.find_nodes(op="placeholder")
    symbolic = [i for i, node in enumerate(placeholders) if _is_symbolic(node.meta.get("example_value"))]
    if symbolic or any(map(_is_number, placeholders)):
        return _ByShape(module, symbolic, checked)
    return _compile_for_shapes(module, inputs, checked)


def _is_symbolic(value: object) -> bool:
    """Return whether an input is a symbolic number, or a tensor with a symbolic extent or stride."""
    if isinstance(value, torch.Tensor):
        return any(isinstance(each, torch.SymInt) for each in (*value.shape, *value.stride()))
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def _is_number(node: fx.Node) -> bool:
    """Return whether a placeholder is a tensor of which only the number is read."""
    return bool(node.users) and all((user.op, user.target) == ("call_method", "item") for user in node.users)


class _ByShape:
    """A graph with symbolic extents, compiled for each set of shapes at its first call."""

    def __init__(self, module: fx.GraphModule, symbolic: Sequence[int], options: GraphOptions) -> None:
        self._module = module
        placeholders = module.graph.find_nodes(op="placeholder")
        # Numbers that torch passes as tensors, such as an eps.
        self._numbers = tuple(i for i, node in enumerate(placeholders) if _is_number(node))
        self._symbolic = tuple(symbolic)
        self._options = options
        self._compiled: dict[tuple[object, ...], Compiled] = {}
        self._copied_bytes = 0
        self._has_warned = False

    def __call__(self, *inputs: Any) -> Any:
        sizes = [x.shape if isinstance(x, torch.Tensor) else x for x in [inputs[i] for i in self._symbolic]]
        key = (torch.is_grad_enabled(), *sizes, *[inputs[i].item() for i in self._numbers])
        compiled = self._compiled.get(key)
        if compiled is None:
            if len(self._compiled) >= MAX_SHAPES:
                self._refuse()
                return self._module.forward(*inputs)
            compiled = self._compiled[key] = self._compile(inputs)
        return compiled(*inputs)

    def _refuse(self) -> None:
        reason = f"a graph was compiled for {MAX_SHAPES} sets of shapes; further ones are left to torch"
        if self._options.strict:
            raise ArgumentError(reason, code="too-many-shapes", hint="pad inputs to fewer shapes")
        if not self._has_warned:
            self._has_warned = True
            warn(reason)

    def _compile(self, inputs: Sequence[Any]) -> Compiled:
        mode = FakeTensorMode(allow_non_fake_inputs=True)  # without symbols
        fake = [mode.from_tensor(x, static_shapes=True) if isinstance(x, torch.Tensor) else x for x in inputs]
        for i in self._numbers:
            fake[i].constant = inputs[i]
        static = [x for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and i not in self._symbolic]
        copied_bytes = self._copied_bytes + sum(x.nbytes for x in static)
        copies = not self._compiled or copied_bytes <= MAX_COPIED_BYTES
        if copies:
            self._copied_bytes = copied_bytes
        with tracing(TracingContext(mode)):
            return _compile_for_shapes(self._module, fake, self._options, copies=copies)


def _compile_for_shapes(module: fx.GraphModule, inputs: Sequence[Any], options: GraphOptions, *, copies: bool = True) -> Compiled:
    """Return a compiled graph, whose constants are inputs if it may not copy them.

    One that needs gradients is torch's, without an overhead.
    """
    tensors = [each for each in (*inputs, *module.parameters()) if isinstance(each, torch.Tensor)]
    may_train = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    as_torch: Compiled = module.forward
    graphs: list[_Graph] = []

    def compile_inference(traced: fx.GraphModule, _: Sequence[Any]) -> Compiled:
        graphs.append(_compile(traced, options, copies=copies))
        boxed: Compiled = make_boxed_func(graphs[0].run)
        return boxed

    try:
        with nullcontext() if may_train else preserve_recurrent_calls(module):
            compiled: Compiled = aot_module_simplified(
                module,
                list(inputs),
                fw_compiler=_refuse_training,
                bw_compiler=_refuse_training,
                inference_compiler=compile_inference,
            )
    except _TrainingError:
        left = (UnsupportedNode("graph", "forward and backward", GRADIENTS),)
        if options.strict:
            raise UnsupportedModelError(left) from None
        Record((), left)
        warn(f"a graph is left to torch: {GRADIENTS}")
        return as_torch
    (graph,) = graphs
    if not graph.parts:
        return as_torch
    if not _is_called_as_is(inputs):
        return compiled
    return graph.run if options.strict else _Chosen(graph, module)


class _Chosen:
    """A graph without effects, compiled or with torch. The first call chooses what is faster on its inputs."""

    def __init__(self, graph: _Graph, module: fx.GraphModule) -> None:
        self._graph = graph
        self._module = module
        self._run: Compiled | None = None

    def __call__(self, *inputs: Any) -> Any:
        return self._first(inputs) if self._run is None else self._run(*inputs)

    def _first(self, inputs: Sequence[Any]) -> Any:
        results = self._graph.run(*inputs)  # builds the parts
        compiled = [part for part in self._graph.parts if part.state.failure is None]
        if compiled and not self._graph.left:
            seconds = time_interleaved(lambda: self._graph.run(*inputs), lambda: self._module.forward(*inputs))
            if seconds[0] > seconds[1]:
                for part in compiled:
                    part.leave(slower(seconds))
                warn(f"a graph runs with torch: {slower(seconds)}")
                compiled = []
        self._run = self._graph.run if compiled else self._module.forward
        return results


@dataclass(frozen=True, slots=True)
class _Graph:
    """A graph of ATen operators with models in place of groups of nodes."""

    run: Compiled
    parts: tuple[Part, ...]
    left: tuple[UnsupportedNode, ...]  # nodes that compute something with torch


def _is_called_as_is(inputs: Sequence[Any]) -> bool:
    """Return whether the traced graph has the inputs and outputs of the captured one, and no effects.

    Then it can be called without AOTAutograd's wrapper, which takes longer than small models.
    """
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    return (
        metadata is not None
        and len(metadata.input_info) == len(inputs)
        and not any(is_traceable_wrapper_subclass(each) for each in inputs)
        and not any(each.mutates_data or each.mutates_metadata for each in metadata.input_info)
        and all(each.output_type is OutputType.non_alias for each in metadata.output_info)
        and not metadata.tokens
    )


def _refuse_training(*_: object) -> NoReturn:
    raise _TrainingError


class _Support(OperatorSupportBase):
    """Answers the partitioner, and keeps the reasons."""

    def __init__(self) -> None:
        self.checker = SupportChecker(Weights(), reference)

    def is_node_supported(self, _: Mapping[str, torch.nn.Module], node: fx.Node) -> bool:
        return self.checker.reason_against(node) is None


def _compile(module: fx.GraphModule, options: GraphOptions, *, copies: bool) -> _Graph:
    """Return the graph with models in place of groups of supported nodes.

    Parameters and buffers are constants of the models, until they change, if they may be copied.
    """
    support = _Support()
    partitioner = CapabilityBasedPartitioner(module, support, allows_single_node_partition=True)
    proposed = partitioner.propose_partitions()
    partitions = [each for each in proposed if any(operator_name(node) not in _VIEWS for node in each.nodes)]
    grouped = {node for partition in partitions for node in partition.nodes}
    eager = _eager_nodes(module, support.checker, grouped)
    left = left_to_torch(eager)
    if left and options.strict:
        raise UnsupportedModelError(left)
    static = _static_placeholders(module) if copies else frozenset()
    fused = partitioner.fuse_partitions(partitions, prefix="roller_")
    parts: list[Part] = []
    for node in fused.graph.find_nodes(op="call_module"):
        constants = [i for i, each in enumerate(node.args) if each.name in static]
        parts.append(part := Part(fused.get_submodule(node.target), constants, options, strict=options.strict))
        with fused.graph.inserting_before(node):  # a call of a function takes less than one of a module
            node.replace_all_uses_with(fused.graph.call_function(part.run, node.args))
        fused.graph.erase_node(node)
    Record([part.state for part in parts], eager)
    if left:
        warn_of_nodes(sum(part.state.nodes for part in parts), left)
    return _Graph(fx.GraphModule(fused, fused.graph).forward, tuple(parts), left)


def _eager_nodes(module: fx.GraphModule, checker: SupportChecker, parts: set[fx.Node]) -> list[UnsupportedNode]:
    nodes = []
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr") or node in parts or operator_name(node) == "getitem":
            continue
        reason = checker.reason_against(node)
        nodes.append(UnsupportedNode(operator_name(node), node.name, reason or VIEW))
    return nodes


def _static_placeholders(module: fx.GraphModule) -> frozenset[str]:
    """Return the placeholders that are parameters or buffers."""
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    indices = set() if metadata is None else set(metadata.static_input_indices)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    return frozenset(node.name for i, node in enumerate(placeholders) if i in indices)


def _note_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Raise the versions of parameters that an optimizer has written, which fused steps do not."""
    note_writes(each for group in optimizer.param_groups for each in group["params"] if each.grad is not None)


capture_recurrent_modules()
register_optimizer_step_post_hook(torch._dynamo.disable(_note_step))  # also after compiled steps
