"""A group of a graph's nodes that is compiled as a model, at its first call."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from time import perf_counter
from typing import Any

import torch
from torch import fx

from roller_svc import hardware as devices
from roller_svc.calibration import calibrate_at_first_use
from roller_svc.codegen.c.model import MODEL
from roller_svc.compiler.kernel_cache import KernelCache
from roller_svc.errors import BuildError, InputError
from roller_svc.frontend.torch.convert import operator_name
from roller_svc.frontend.torch.partition import import_partition, result_nodes
from roller_svc.frontend.torch.tensors import memory_order
from roller_svc.graph.compile import ModelOptions, build_model
from roller_svc.graph.weights import Weights, place_weights
from roller_svc.hardware.catalog import restrict_cores
from roller_svc.ir.graph import Graph
from roller_svc.ir.options import SearchOptions
from roller_svc.runtime.graphs.cpu import CpuModel
from roller_svc.semantics.interpreter import reference
from roller_svc.settings import settings
from roller_svc.torch_backend.reports import PartState, warn

log = logging.getLogger(__name__)

# Constants that change more often than this become inputs.
MAX_REBUILDS = 3
# A comparison with torch takes turns until COMPARISON_S is over, with MIN_ROUNDS to MAX_ROUNDS. Slow calls take fewer rounds.
MIN_ROUNDS, MAX_ROUNDS, COMPARISON_S, LONGEST_COMPARISON_S = 5, 50, 0.2, 2.0
# Batch normalization in inference, with the positions of its running statistics among its arguments.
_NORMALIZATION, _STATISTICS = "aten._native_batch_norm_legit_no_training.default", (3, 4)

Run = Callable[[Sequence[torch.Tensor]], Any]  # returns a tensor, or a tuple of tensors
Identity = tuple[object, ...]  # the address and version of each constant, and the elements of running statistics


@dataclass(slots=True)
class _Built:
    """A compiled part, with the identity of the constants that it has.

    It keeps the memory of the constants, so that no other tensor can have the same address and version.
    """

    run: Run
    identity: Identity
    constants: tuple[torch.Tensor, ...]


class Part:
    """A group of nodes that is compiled at its first call, and again when its constants have changed.

    The first call times it and torch in turns, on the call's tensors. If torch is faster, torch runs the group. The nodes
    have no effects, so they may run often.
    """

    def __init__(self, source: fx.GraphModule, constants: Sequence[int], options: SearchOptions, *, strict: bool) -> None:
        """Take a group.

        Args:
            source: the nodes, with placeholders and results that have types.
            constants: positions of inputs that are parameters or buffers.
            options: of the kernels.
            strict: raise an error if the group cannot be built, and use it without a comparison.
        """
        self.source = source
        self.constants = tuple(constants)
        self.options = options
        nodes = sum(node.op == "call_function" and operator_name(node) != "getitem" for node in source.graph.nodes)
        self.state = PartState(nodes, len(self.constants))
        self._statistics = _running_statistics(source, self.constants)
        self._strict = strict
        self._built: _Built | None = None
        self._builds = 0
        self._lock = Lock()
        self._results = [node.meta["val"] for node in result_nodes(source)]
        (output,) = source.graph.find_nodes(op="output")
        self._single = isinstance(output.args[0], fx.Node)

    def run(self, *tensors: torch.Tensor) -> Any:
        """Return the results of the nodes."""
        if self.state.failure is not None:
            return self.source(*tensors)
        built = self._built
        if built is None or built.identity != self._identity(tensors):
            built = self._rebuilt(tensors)
            if built is None:
                return self.source(*tensors)
        return built.run(tensors)

    def _rebuilt(self, tensors: Sequence[torch.Tensor]) -> _Built | None:
        """Return the model for these tensors; None if it cannot be built or torch is faster."""
        with self._lock:
            if self.state.failure is not None:
                return None
            if self._built is not None and self._built.identity == self._identity(tensors):
                return self._built  # another thread has just built it
            if self._builds > MAX_REBUILDS or any(tensors[i].is_inference() for i in self.constants):
                self.constants, self._statistics, self.state.constants = (), (), 0
            self._builds += 1
            identity, constants = self._identity(tensors), tuple(tensors[i].detach() for i in self.constants)
            try:
                built = _Built(self._build(tensors), identity, constants)
            except (InputError, BuildError) as error:
                if self._strict:
                    raise
                self._warn_and_leave(str(error))
                return None
            if not self._strict:
                seconds = time_interleaved(lambda: built.run(tensors), lambda: self.source(*tensors))
                self.state.seconds = seconds
                if seconds[0] > seconds[1]:
                    self._warn_and_leave(slower(seconds))
                    return None
            self._built = built
            return built

    def leave(self, reason: str) -> None:
        """Leave the nodes to torch."""
        self._built, self.state.failure = None, reason

    def _warn_and_leave(self, reason: str) -> None:
        self.leave(reason)
        warn(f"a part of {self.state.nodes} nodes runs with torch: {reason}")

    def _identity(self, tensors: Sequence[torch.Tensor]) -> Identity:
        """Return what differs once a constant is replaced or written in place."""
        places = [(tensors[i].data_ptr(), tensors[i]._version) for i in self.constants]
        return (*places, *[_elements(tensors[i]) for i in self._statistics])

    def _build(self, tensors: Sequence[torch.Tensor]) -> Run:
        weights = Weights()
        graph = import_partition(self.source, {i: tensors[i] for i in self.constants}, weights, reference)
        model = build(graph, weights, self.options)
        positions = [int(name.removeprefix("input")) for name, _ in graph.inputs]
        orders = [memory_order(tensor) for tensor in self._results]
        # Results with gaps or repeated elements are copied to such memory; others are computed in their order of dimensions.
        kinds = [(t.shape, None if order is None else t.stride(), t.dtype) for t, order in zip(self._results, orders, strict=True)]
        copied = [i for i, order in enumerate(orders) if order is None]

        def run(given: Sequence[torch.Tensor]) -> Any:
            plain = [given[i].resolve_neg() for i in positions]
            dense = [x if x.is_contiguous() else x.contiguous() for x in plain]
            results = [
                torch.empty(shape, dtype=dtype) if strides is None else torch.empty_strided(shape, strides, dtype=dtype)
                for shape, strides, dtype in kinds
            ]
            model.run_at([x.data_ptr() for x in dense], [x.data_ptr() for x in results])
            for i in copied:
                expected = self._results[i]
                spread = torch.empty_strided(expected.shape, expected.stride(), dtype=expected.dtype)
                # Elements that share memory are written once.
                once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in expected.stride())
                spread[once].copy_(results[i][once])
                results[i] = spread
            return results[0] if self._single else tuple(results)

        return run


def _running_statistics(source: fx.GraphModule, constants: Sequence[int]) -> tuple[int, ...]:
    """Return the positions of constants that are running statistics, which torch's training writes without a new version."""
    placeholders = source.graph.find_nodes(op="placeholder")
    normalizations = [node for node in source.graph.nodes if operator_name(node) == _NORMALIZATION]
    read = {node.args[position] for node in normalizations for position in _STATISTICS}
    return tuple(i for i in constants if placeholders[i] in read)


def _elements(tensor: torch.Tensor) -> bytes:
    dense = tensor.contiguous()
    return ctypes.string_at(dense.data_ptr(), dense.nbytes)


def time_interleaved(compiled: Callable[[], object], with_torch: Callable[[], object]) -> tuple[float, float]:
    """Return the least seconds of each. They run in turns, so both meet the same load."""
    least = [float("inf"), float("inf")]
    end = perf_counter() + COMPARISON_S
    for rounds in range(MAX_ROUNDS):
        for i, way in enumerate((compiled, with_torch)):
            start = perf_counter()
            way()
            least[i] = min(least[i], perf_counter() - start)
        past_end_s = perf_counter() - end
        if past_end_s > 0 and (rounds + 1 >= MIN_ROUNDS or past_end_s > LONGEST_COMPARISON_S):
            break
    return least[0], least[1]


def slower(seconds: tuple[float, float]) -> str:
    """Return why something is left to torch that takes so long, compiled and with torch."""
    return f"it takes {seconds[0] * 1e6:.1f} µs compiled, {seconds[1] * 1e6:.1f} µs with torch"


def build(graph: Graph, weights: Weights, options: SearchOptions) -> CpuModel:
    """Return a loaded model, for as many threads as torch uses."""
    calibrate_at_first_use((devices.LOCAL,), log.warning)
    spec = devices.load(devices.LOCAL)
    searched = {name: getattr(options, name) for name in SearchOptions.__dataclass_fields__}
    chosen = ModelOptions(restrict_cores(spec, min(torch.get_num_threads(), spec.num_cores)), **searched)
    built = build_model(graph, weights, chosen, KernelCache(settings().cache_folder))
    plan = built.plan
    return CpuModel(plan, MODEL, built.link(MODEL), place_weights(plan, weights))
