"""The backend of torch.compile: `torch.compile(model, backend="roller")`.

AOTAutograd gives graphs of ATen operators. A capability-based partitioner groups the supported nodes; each group is
compiled as a model, and everything else stays with torch. `report()` says which nodes did, and why.
"""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from roller_svc import hardware as devices
from roller_svc.calibration import calibrate_at_first_use
from roller_svc.codegen.c.model import MODEL
from roller_svc.compiler.kernel_cache import KernelCache
from roller_svc.compiler.request import read_options, reject_unknown
from roller_svc.errors import ArgumentError, BuildError, InputError, UnsupportedNode
from roller_svc.frontend.torch.convert import operator_name
from roller_svc.frontend.torch.partition import SupportChecker, import_partition, result_nodes
from roller_svc.frontend.torch.tensors import array_of, tensor_of
from roller_svc.graph.compile import ModelOptions, build_model
from roller_svc.graph.weights import Weights
from roller_svc.ir.graph import Constant, Graph
from roller_svc.ir.options import SearchOptions
from roller_svc.runtime.graphs.cpu import CpuModel, weights_block
from roller_svc.semantics.interpreter import reference
from roller_svc.settings import settings

log = logging.getLogger(__name__)

VIEW = "a view, which copies nothing"
_SHOWN_REASONS = 5
MAX_REPORTS = 256  # the last ones are reported
# Constants that change more often than this become inputs.
MAX_REBUILDS = 3
# Operators that move no element when torch runs them: a group of these alone stays with torch.
_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "alias.default", "detach.default", "expand.default", "permute.default", "select.int", "slice.Tensor",
        "split.Tensor", "split_with_sizes.default", "squeeze.default", "squeeze.dim", "squeeze.dims", "t.default",
        "transpose.int", "unsqueeze.default", "view.default", "_unsafe_view.default", "unbind.int",
    )
) | {"getitem"}  # fmt: skip


class LeftToTorchWarning(UserWarning):
    """All operators of a graph stay with torch."""


@dataclass(frozen=True, slots=True)
class CompiledPart:
    """One group of nodes that is compiled as a model."""

    nodes: int
    constants: int  # inputs that are parameters or buffers of the module
    failure: str | None = None  # why the group runs with torch nevertheless

    def __str__(self) -> str:
        text = f"{self.nodes} nodes with {self.constants} constants"
        return text if self.failure is None else f"{text}, which run with torch: {self.failure}"


@dataclass(frozen=True, slots=True)
class GraphReport:
    """Report of one graph that torch.compile captured: what was compiled, and what stays with torch."""

    parts: tuple[CompiledPart, ...]
    eager: tuple[UnsupportedNode, ...]  # nodes that stay with torch, and why

    def __str__(self) -> str:
        lines = [f"compiled: {part}" for part in self.parts] + [f"with torch: {node}" for node in self.eager]
        return "\n".join(lines or ["nothing to compile"])


class _Record:
    """A report in progress: parts are built at their first call."""

    def __init__(self, eager: Sequence[UnsupportedNode]) -> None:
        self.parts: list[_Part] = []
        self.eager = tuple(eager)


_RECORDS: deque[_Record] = deque(maxlen=MAX_REPORTS)


def report() -> tuple[GraphReport, ...]:
    """Return a report for each graph since the start or the last `reset`."""
    return tuple(GraphReport(tuple(part.described() for part in record.parts), record.eager) for record in _RECORDS)


def reset() -> None:
    """Forget the reports."""
    _RECORDS.clear()


def compile_graph(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph that torch.compile captured: the backend itself.

    Args:
        module: the graph.
        inputs: its inputs, real or fake.
        options: the fields of SearchOptions.
        mode: rejected unless it is "default".

    Raises:
        ArgumentError: an option is unknown or invalid.
    """
    if mode not in (None, "default"):
        raise ArgumentError(f"mode {mode!r} is not supported; leave it out", code="invalid-option")
    reject_unknown(SearchOptions, options or {}, "torch.compile")
    checked = SearchOptions(**read_options(SearchOptions, options or {}))
    compiled: Callable[..., Any] = aot_module_simplified(
        module,
        list(inputs),
        fw_compiler=partial(_compile, options=checked, freeze=False),
        inference_compiler=partial(_compile, options=checked, freeze=True),
        bw_compiler=_keep_backward,
    )
    return compiled


def _keep_backward(module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    """Leave a backward graph to torch."""
    _RECORDS.append(_Record([UnsupportedNode("backward", "graph", "gradients are not compiled")]))
    run: Callable[..., Any] = make_boxed_func(module.forward)
    return run


class _Support(OperatorSupportBase):
    """Answers the partitioner, and keeps the reasons."""

    def __init__(self) -> None:
        self.checker = SupportChecker(Weights(), reference)

    def is_node_supported(self, _: Mapping[str, torch.nn.Module], node: fx.Node) -> bool:
        return self.checker.reason_against(node) is None


def _compile(module: fx.GraphModule, _: Sequence[Any], *, options: SearchOptions, freeze: bool) -> Callable[..., Any]:
    """Return the graph with models in place of groups of supported nodes.

    `freeze`: parameters and buffers are constants of the models, until they change.
    """
    support = _Support()
    partitioner = CapabilityBasedPartitioner(module, support, allows_single_node_partition=True)
    proposed = partitioner.propose_partitions()
    partitions = [each for each in proposed if any(operator_name(node) not in _VIEWS for node in each.nodes)]
    parts = {node for partition in partitions for node in partition.nodes}
    record = _Record(_eager_nodes(module, support.checker, parts))
    static = _static_placeholders(module) if freeze else frozenset()
    fused = partitioner.fuse_partitions(partitions, prefix="roller_")
    for node in fused.graph.nodes:
        if node.op == "call_module" and str(node.target).startswith("roller_"):
            constants = [i for i, each in enumerate(node.args) if each.name in static]
            part = _Part(fused.get_submodule(node.target), constants, options)
            fused.add_submodule(node.target, part)
            record.parts.append(part)
    _RECORDS.append(record)
    _warn_of_nothing(record)
    fused.recompile()
    run: Callable[..., Any] = make_boxed_func(fused.forward)
    return run


def _warn_of_nothing(record: _Record) -> None:
    """Warn if no part of a graph is compiled, although it has more than views. Python shows the same warning once."""
    reasons = {f"{node.operator}: {node.reason}" for node in record.eager if node.reason != VIEW}
    if reasons and not record.parts:
        text = "; ".join(sorted(reasons)[:_SHOWN_REASONS])
        warnings.warn(f"nothing of a graph is compiled, torch runs it ({text})", LeftToTorchWarning, stacklevel=2)


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
    context = torch._guards.TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    indices = set() if metadata is None else set(metadata.static_input_indices)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    return frozenset(node.name for i, node in enumerate(placeholders) if i in indices)


@dataclass(slots=True)
class _Built:
    """A compiled part, with the identity of the constants that it has."""

    run: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
    identity: tuple[tuple[int, int], ...]


class _Part(torch.nn.Module):
    """A group of nodes that is compiled at its first call, and again when its constants have changed."""

    def __init__(self, source: fx.GraphModule, constants: Sequence[int], options: SearchOptions) -> None:
        super().__init__()
        self.source = source
        self.constants = tuple(constants)
        self.options = options
        self.failure: str | None = None
        self._built: _Built | None = None
        self._builds = 0
        self._lock = Lock()
        self._layouts = [_Layout.of(node.meta["val"]) for node in result_nodes(source)]
        (output,) = (node for node in source.graph.nodes if node.op == "output")
        self._single = isinstance(output.args[0], fx.Node)

    def described(self) -> CompiledPart:
        count = sum(node.op == "call_function" for node in self.source.graph.nodes)
        return CompiledPart(count, len(self.constants), self.failure)

    def forward(self, *tensors: torch.Tensor) -> Any:
        if self.failure is not None:
            return self.source(*tensors)
        built = self._current(tensors)
        if built is None:
            return self.source(*tensors)
        results = [layout.laid(x) for layout, x in zip(self._layouts, built.run(tensors), strict=True)]
        return results[0] if self._single else tuple(results)

    def _current(self, tensors: Sequence[torch.Tensor]) -> _Built | None:
        """Return the model for these tensors, built if it is not there; None if it cannot be built."""
        built = self._built
        if built is not None and built.identity == self._identity(tensors):
            return built
        with self._lock:
            if self._builds > MAX_REBUILDS or any(tensors[i].is_inference() for i in self.constants):
                self.constants = ()
            self._builds += 1
            try:
                self._built = _Built(self._build(tensors), self._identity(tensors))
            except (InputError, BuildError) as error:
                self.failure = str(error)
                return None
            return self._built

    def _identity(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, int], ...]:
        """Return what differs once a constant is replaced or written in place."""
        return tuple((tensors[i].data_ptr(), tensors[i]._version) for i in self.constants)

    def _build(self, tensors: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
        weights = Weights()
        graph = import_partition(self.source, {i: tensors[i] for i in self.constants}, weights, reference)
        model = _build(graph, weights, self.options)
        positions = [int(name.removeprefix("input")) for name, _ in graph.inputs]

        def run(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            results = model.run({f"input{i}": array_of(given[i]) for i in positions})
            return [tensor_of(results[f"output{i}"]) for i in range(len(graph.outputs))]

        return run


@dataclass(frozen=True, slots=True)
class _Layout:
    """The strides that the rest of a graph expects of a result."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # None: dense, in order

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Layout:
        return cls(tuple(tensor.shape), None if tensor.is_contiguous() else tuple(tensor.stride()))

    def laid(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor with these strides."""
        if self.strides is None:
            return tensor
        return torch.empty_strided(self.shape, self.strides, dtype=tensor.dtype).copy_(tensor)


def _build(graph: Graph, weights: Weights, options: SearchOptions) -> CpuModel:
    """Return a loaded model."""
    calibrate_at_first_use((devices.LOCAL,), log.warning)
    chosen = ModelOptions(devices.load(devices.LOCAL), **asdict(options))
    built = build_model(graph, weights, chosen, KernelCache(settings().cache_folder))
    plan = built.plan
    arrays = [(p.type, p.offset_bytes, weights.array(Constant(p.type, p.digest))) for p in plan.weights]
    return CpuModel(plan, MODEL, built.link(MODEL), weights_block(arrays, plan.weights_bytes))
