"""The Python API of whole models: compile_model, load_model, and the Model class."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import logging
import math
import os
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Never, Unpack

from roller_svc import hardware
from roller_svc.api import Kernel, Stage, TensorInfo
from roller_svc.calibration import calibrate_at_first_use
from roller_svc.codegen.c.model import model_header
from roller_svc.compiler.artifact import floor_seconds, load_plan
from roller_svc.compiler.cards import draw_timeline, make_card
from roller_svc.compiler.kernel_cache import SERIAL, KernelCache
from roller_svc.compiler.pipeline import StageTimer
from roller_svc.compiler.request import (
    check_emulable,
    read_options,
    reject_emulation,
    reject_unknown,
    shows_options,
    validate_target,
)
from roller_svc.errors import ArgumentError, InputError, InvariantError, RollerWarning, require
from roller_svc.fork_lock import ForkLock
from roller_svc.frontend.lang.input_types import kind_of, short_repr, tensor_types, whole_number
from roller_svc.frontend.torch.arguments import Arrays, run_with_tensors, share_arrays
from roller_svc.graph.choose import AUTO, EAGER
from roller_svc.graph.compile import (
    BuiltModel,
    ModelOptions,
    Progress,
    build_model,
    check_device,
    check_plan_kind,
    check_tuning,
    may_tune,
    no_progress,
    rebuild_model,
)
from roller_svc.graph.devices.labels import Placed, check_labels, place_nodes
from roller_svc.graph.devices.plan import ACROSS, COPIES_RATIO, MERGED, MixedPlan
from roller_svc.graph.estimate import GraphEstimate, estimate_graph
from roller_svc.graph.load import load_graph, prepare_source
from roller_svc.graph.lowerings import LOWERING_KINDS
from roller_svc.graph.lowerings.cuda_graph import CUDA_GRAPH
from roller_svc.graph.lowerings.programs import Program, read_programs
from roller_svc.graph.model_story import StorySource, tell_model_story, tell_schedule
from roller_svc.graph.objects import link_kernels
from roller_svc.graph.padding import LEAST_COMPARED, PaddedAxes, PaddingError, padded_axes
from roller_svc.graph.passes.dead import remove_dead_nodes
from roller_svc.graph.states import pair_states
from roller_svc.graph.weights import Weights
from roller_svc.graph.wiring.drift import WatchedModel
from roller_svc.graph.wiring.kernels import TuneOptions, Tuning
from roller_svc.graph.wiring.online import Assignment, OnlineSource, OnlineTuning, explore_online
from roller_svc.graph.wiring.tree import KINDS
from roller_svc.graph.wiring.wirer import Wirer
from roller_svc.hardware.catalog import restrict_cores
from roller_svc.ir.canonical import to_json
from roller_svc.ir.graph import Graph
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.model_plan import CopyStep, KernelStep, LoopStep, ModelPlan, Step, VDeviceStep
from roller_svc.ir.model_schedule import ModelSchedule
from roller_svc.ir.model_story import ModelStory
from roller_svc.ir.options import NamedArguments, NamedOptions, RuntimeChoice, SelectionMode
from roller_svc.ir.program import TensorType
from roller_svc.ir.quantities import format_seconds
from roller_svc.ir.symbol_names import default_name
from roller_svc.ir.vdevice import Barrier
from roller_svc.modes.events import Event
from roller_svc.modes.loading import load_built, load_variant
from roller_svc.modes.mixed import DATAFLOW, ORDERS, MixedModel, MixedSteps, build_parts, estimate_parts
from roller_svc.modes.registration import register_python_ops
from roller_svc.modes.saved import MixedBundle, is_mixed, load_mixed, save_mixed
from roller_svc.modes.stepping import PrepareSteps, Stepper, prepare_steps
from roller_svc.runtime.binding import ELEMENT_ALIGNMENT, Array, Binding, NumpyArrays, check_names
from roller_svc.runtime.graphs.buffers import bind_call, call_buffers
from roller_svc.runtime.graphs.cpu import CpuModel
from roller_svc.runtime.graphs.gpu import GpuModel
from roller_svc.runtime.graphs.padding import Padding, check_dtypes, write_results
from roller_svc.runtime.saved import models as saved
from roller_svc.runtime.saved.launchers import check_model_launchers
from roller_svc.runtime.saved.models import ModelBundle, VariantBundle, variant_name
from roller_svc.runtime.saved.plan_json import plan_to_json
from roller_svc.runtime.saved.serialization import KernelBundle
from roller_svc.settings import settings

log = logging.getLogger(__name__)

MAX_VARIANTS = 64
SHOWN_KERNELS = 8  # in a notebook
TUNE_KINDS = ("off", "background", "online", "now")
SINK_KINDS = ("auto", "require")


@dataclass(frozen=True, slots=True)
class ModelEstimate:
    """The performance model's estimate of a call."""

    seconds: float  # of all kernels that a call runs; on a GPU also of launches, copies and fills
    stages: tuple[Stage, ...]  # one for each kernel, by its digest


class ModelKernel(Kernel):
    """A kernel of a model. It computes `uses` nodes."""

    def __init__(self, parts: KernelBundle, uses: int) -> None:
        super().__init__(parts, load_plan(parts), ())
        self.uses = uses


class ProfiledStep(NamedTuple):
    """One step of a profiled call."""

    operator: str  # the node's name in the model
    kernel: str  # the kernel's digest; "copy" for a copy; over several devices the device, or the link of a copy
    start_s: float
    end_s: float
    veu: int  # 0: the step uses all threads; over several devices the number of the device or link


class Profile(list[ProfiledStep]):
    """The steps of one call, in order of their start."""

    def save_trace(self, file: str | os.PathLike[str]) -> Path:
        """Write the steps in Chrome's trace event format, which chrome://tracing and Perfetto show."""
        events = [
            {
                "name": step.operator,
                "cat": "copy" if step.kernel == "copy" else "kernel",
                "ph": "X",
                "ts": step.start_s * 1e6,
                "dur": (step.end_s - step.start_s) * 1e6,
                "pid": 0,
                "tid": step.veu,
                "args": {"kernel": step.kernel},
            }
            for step in self
        ]
        path = Path(file)
        document = {"traceEvents": events, "displayTimeUnit": "ms"}
        try:
            path.write_text(json.dumps(document) + "\n", encoding="utf-8")
        except OSError as failure:
            raise ArgumentError(f"cannot write to {path}: {failure.strerror}", code="unwritable-file") from failure
        return path

    def seconds_by_operator(self) -> dict[str, float]:
        """Return the seconds of each operator, the longest first."""
        totals: dict[str, float] = {}
        for step in self:
            totals[step.operator] = totals.get(step.operator, 0.0) + step.end_s - step.start_s
        return dict(sorted(totals.items(), key=lambda item: -item[1]))


_Loaded = CpuModel | GpuModel | MixedModel | Wirer | WatchedModel


class _Variant:
    """The model for one set of shapes. It is loaded at the first use."""

    def __init__(
        self,
        dims: tuple[tuple[str, int], ...],
        name: str,
        plan: ModelPlan,
        kernels: tuple[int, ...],
        load: Callable[[], _Loaded],
        binary: bytes,
        runtime: RuntimeChoice,
        prepare_steps: PrepareSteps | None = None,
        mixed: MixedPlan | None = None,
        parts: tuple[ModelPlan, ...] = (),
        story_source: StorySource | None = None,
    ) -> None:
        self.dims = dims
        self.name = name
        self.plan = plan
        self.kernels = kernels
        self.binary = binary
        self.mixed = mixed  # of a model over several devices
        self.parts = parts  # of such a model: the plans of its subgraphs
        self.is_on_device = not binary and mixed is None and runtime is not RuntimeChoice.EMULATOR
        self._load: Callable[[], _Loaded] | None = load
        self._loaded: _Loaded | None = None
        self.story_source = story_source  # None: of a saved model, or of one over several devices, which have no graph
        self._prepare_steps = prepare_steps  # None: of a saved model, which has no source
        self._steps: dict[bool, Stepper] = {}  # by whether nodes are fused
        self._lock = ForkLock()

    @property
    def loaded(self) -> _Loaded:
        with self._lock:
            if self._loaded is None:
                self._loaded = require(self._load, "way to load the model")()
                self._load = None  # it holds arrays of weights
            return self._loaded

    def steps(self, *, fused: bool) -> Stepper:
        """Return the nodes as calls, which are compiled at the first use. Raises ArgumentError for a saved model."""
        with self._lock:
            if fused not in self._steps:
                if self._prepare_steps is None:
                    raise ArgumentError(
                        "a saved model has no nodes to step through",
                        code="not-steppable",
                        hint="compile its source by roller_svc.compile_model, and step through that",
                    )
                self._steps[fused] = self._prepare_steps(fused=fused)
            return self._steps[fused]

    def load_as(self, loaded: _Loaded) -> None:
        """Let calls run another one that computes the same."""
        with self._lock:
            self._loaded, self._load = loaded, None

    @property
    def loaded_on_cpu(self) -> CpuModel:
        """The model of a variant for CPUs whose calls measure nothing."""
        loaded = self.loaded
        if not isinstance(loaded, CpuModel):
            raise InvariantError(f"{self.name} is not a model for CPUs")
        return loaded

    def add_wirer(self, share: float) -> Wirer:
        """Let calls measure, and return what has them. The model is loaded at the first call."""
        wirer = Wirer(lambda: copied.loaded_on_cpu, share)
        copied = copy(self)
        copied._lock = ForkLock()
        self.load_as(wirer)
        return wirer

    def with_kernels(self, kernels: tuple[int, ...]) -> _Variant:
        """Return this, of a model that has its kernels at other positions."""
        variant = copy(self)
        variant.kernels, variant._steps = kernels, {}
        return variant

    @property
    def weights_bytes(self) -> int:
        """Return the bytes of the weights of a saved model. A GPU packs them when it loads the model, a CPU before."""
        return self.plan.read_weights_bytes if self.binary else self.plan.weights_bytes

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return _shapes(self.plan)


class Model:
    """A compiled model, which can be called, inspected, profiled and saved. Calls from several threads may overlap."""

    def __init__(
        self,
        digest: str,
        name: str,
        target: str,
        kernels: tuple[KernelBundle, ...],
        variants: tuple[_Variant, ...],
        report: Mapping[str, Any],
        tuning: Tuning | OnlineTuning | None = None,
    ) -> None:
        self._kernel_bundles = kernels
        self._kernels: tuple[ModelKernel, ...] | None = None
        self._variants = variants
        self._run_plain: Callable[[Arrays, Arrays | None], dict[str, Any] | None] | None = None  # of the only variant, once loaded
        self.digest = digest
        self.name = name
        self.target = target
        self.report: dict[str, Any] = dict(report)
        self.inputs = _infos(variants[0].plan.inputs)
        self.outputs = _infos(variants[0].plan.outputs)
        self.states = _infos(variants[0].plan.states)
        self._state_names = [info.name for info in self.states]
        self.buckets: tuple[dict[str, int], ...] = tuple(dict(variant.dims) for variant in variants)
        self.estimate = _estimate(variants[0], kernels, self.report)
        self.tuning = tuning

    def __call__(self, /, *unnamed: Never, out: Mapping[str, object] | None = None, **arrays: object) -> dict[str, Any]:
        """Run the model and return the outputs by name; write them to arrays in `out` if given."""
        if unnamed:
            words = ", ".join(f"{info.name}=..." for info in self.inputs)
            raise ArgumentError(f"arrays must be keyword arguments: model({words})", code="unknown-argument")
        return self.run(arrays, out)

    def run(
        self,
        arrays: Mapping[str, object],
        out: Mapping[str, object] | None = None,
        states: Mapping[str, object] | None = None,
    ) -> dict[str, Any]:
        """Run the model on arrays by name, including names that are not Python identifiers.

        The arrays of `states` have the values before the call, which updates them. If it fails, parts of them may be new.
        """
        _check_mapping("arrays", arrays)
        if out is not None:
            _check_mapping("out", out)
        if not self.states and states is None:
            return self._run_at(arrays, out)
        results = self._run_at(arrays, self._with_states(out, states))
        return {info.name: results[info.name] for info in self.outputs}

    def _with_states(self, out: Mapping[str, object] | None, states: Mapping[str, object] | None) -> dict[str, object]:
        """Return all arrays that a call writes. Raises ArgumentError for states that are missing or unknown."""
        given = {} if states is None else states
        _check_mapping("states", given)
        check_names("state", self._state_names, given, complete=True)
        written = {} if out is None else out
        check_names("output", [info.name for info in self.outputs], written, complete=False)
        return {**written, **given}

    def _run_at(self, arrays: Mapping[str, object], out: Mapping[str, object] | None) -> dict[str, Any]:
        results = None if self._run_plain is None else self._run_plain(arrays, out)  # without a look for tensors
        if results is not None:
            return results
        if self.takes_device_arrays:
            return self._run(arrays, out)
        return run_with_tensors(self._run, arrays, out, states=self._state_names)

    @property
    def takes_device_arrays(self) -> bool:
        """Whether arrays are on a device, and tensors of torch are taken as they are."""
        return self._variants[0].is_on_device

    def _run(self, arrays: Mapping[str, object], out: Mapping[str, object] | None) -> dict[str, Any]:
        variant, padded = self._padded(arrays, out or {})
        if padded is None:
            if len(self._variants) == 1 and isinstance(variant.loaded, CpuModel | WatchedModel):
                self._run_plain = variant.loaded.run_plain
            return variant.loaded.run(arrays, out)
        if self.takes_device_arrays:
            raise ArgumentError(
                f"no bucket has the shapes of these arrays, and arrays on a device are not padded; buckets are {self._buckets()}",
                code="shape-mismatch",
            )
        padding, extents = padded
        full = variant.loaded.run(self._pad(arrays, variant, padding))
        results = {name: padding.slice(name, array, extents) for name, array in full.items()}
        return results if out is None else write_results(results, out)

    def _pad(self, arrays: Mapping[str, Any], variant: _Variant, padding: Padding) -> dict[str, Any]:
        """Return the arrays in the variant's shapes."""
        check_names("argument", [name for name, _ in variant.plan.inputs], arrays, complete=True)
        check_dtypes(arrays, variant.plan.inputs)
        return {name: padding.pad(arrays[name], type_.shape) for name, type_ in variant.plan.inputs}

    def profile(self, inputs: Mapping[str, object], states: Mapping[str, object] | None = None) -> Profile:
        """Run the model once and return its steps with their times, in seconds since the first began."""
        _check_mapping("inputs", inputs)
        inputs = share_arrays("input", inputs)
        written = share_arrays("state", self._with_states(None, states), written=True)
        variant, padded = self._padded(inputs, written)
        if padded is not None:
            inputs = self._pad(inputs, variant, padded[0])
        loaded = variant.loaded
        if isinstance(loaded, MixedModel):
            moments = loaded.profile(inputs, written)
            places = sorted({each.place for each in moments})
            return Profile(ProfiledStep(m.name, m.place, m.start_s, m.end_s, places.index(m.place)) for m in moments)
        digests = [self._kernel_bundles[position].digest for position in variant.kernels]
        return Profile(
            ProfiledStep(step.node, digests[step.kernel] if isinstance(step, KernelStep) else "copy", start, end, veu)
            for step, start, end, veu in sorted(loaded.profile(inputs, written), key=lambda moment: moment.start_s)
        )

    def step(
        self, arrays: Mapping[str, object], states: Mapping[str, object] | None = None, *, fused: bool = False
    ) -> Generator[Event, None, dict[str, Any]]:
        """Return a generator that runs one node after the other and yields an event after each.

        The nodes are compiled at the first use, from the model's source. The generator's value is the outputs by name.
        States are updated after the last node. With buckets, arrays have the shapes of the bucket.

        Args:
            arrays: the inputs by name.
            states: the arrays that the call updates, by name.
            fused: whether nodes are those that the model runs; `event.members()` has their operators. By default each
                operator is a node.
        """
        _check_mapping("arrays", arrays)
        given = share_arrays("input", arrays)
        written = share_arrays("state", self._with_states(None, states), written=True)
        if self.takes_device_arrays:
            raise ArgumentError(
                f"{self.target} is a GPU, whose models are stepped through in the emulator",
                code="unsupported-target",
                hint='runtime="emulator"',
            )
        variant, padded = self._padded(given, written)
        if padded is not None:
            given = self._pad(given, variant, padded[0])
        called, results = call_buffers(variant.plan), len(variant.plan.inputs) + len(variant.plan.outputs)
        buffers = (*called[: len(variant.plan.inputs)], *called[results:])  # an output may have the name of an input
        binding = bind_call(buffers, given, written, NumpyArrays(ELEMENT_ALIGNMENT))
        memory = {buffer.name: binding.memory[buffer.symbol] for buffer in buffers}
        return self._step(variant.steps(fused=fused), memory, binding, padded)

    def _step(
        self, steps: Stepper, memory: dict[str, Array], binding: Binding[Array], padded: tuple[Padding, dict[str, int]] | None
    ) -> Generator[Event, None, dict[str, Any]]:
        names = set(self._state_names)
        results = yield from steps.run({name: array.copy() if name in names else array for name, array in memory.items()})
        for name in names:
            memory[name][...] = results.pop(name)
        binding.copy_back()
        return results if padded is None else {n: padded[0].slice(n, array, padded[1]) for n, array in results.items()}

    @property
    def kernels(self) -> tuple[ModelKernel, ...]:
        """The kernels with their `uses`: one for each class of equal nodes, and other rKernels that the plan uses."""
        if self._kernels is None:
            uses = [0] * len(self._kernel_bundles)
            for variant in self._variants:
                for position, kernel in zip(variant.kernels, variant.plan.kernels, strict=True):
                    uses[position] += kernel.uses
            self._kernels = tuple(map(ModelKernel, _link_kernels(self._kernel_bundles), uses))
        return self._kernels

    @property
    def plan(self) -> dict[str, Any]:
        """The plan as JSON-compatible values: steps in order, memory, launches. With buckets, one for each.

        `kernels` has the rTasks of each phase of each launch; a launch without phases is one rTask.
        """
        kinds = [each["plan"] for each in self.report.get("buckets", ())] or [self.report.get("plan")] * len(self._variants)
        plans = [self._plan(variant, kind) for variant, kind in zip(self._variants, kinds, strict=True)]
        if len(plans) == 1:
            return plans[0]
        listed = [{"dims": dict(variant.dims)} | plan for variant, plan in zip(self._variants, plans, strict=True)]
        return {"kind": plans[0]["kind"], "buckets": listed}

    def programs(self) -> list[list[Program]]:
        """Return `prog[vEU][order]` of each launch of a persistent kernel on a GPU; nothing for other plans.

        An instruction is {"execute": [node, first rTask, rTasks]} or {"wait": [node]}. With buckets the first is shown.
        """
        first = self._variants[0]
        loaded = None if first.binary or first.mixed is not None else first.loaded
        return read_programs(first.plan, loaded.weights) if isinstance(loaded, GpuModel) else []

    @property
    def has_story(self) -> bool:
        """Whether the model has a story: it was compiled here, for one device."""
        return all(variant.story_source is not None for variant in self._variants)

    @property
    def story(self) -> dict[str, Any]:
        """The story as JSON-compatible values: nodes, when each core does what, and memory. With buckets, one for each.

        Times are the performance model's. Raises ArgumentError for a saved model and for one over several devices.
        """
        stories = [{"dims": dict(variant.dims)} | to_json(_tell(variant)) for variant in self._variants]
        return stories[0] if len(stories) == 1 else {"buckets": stories}

    @property
    def schedule(self) -> dict[str, Any] | None:
        """Return the schedules that `POST /v1/plans:check` reads, one for each bucket; None if vEUs execute none.

        Raises ArgumentError as `story` does.
        """
        schedules = [_scheduled(variant) for variant in self._variants]
        return None if schedules == [None] * len(schedules) else {"buckets": [each and to_json(each) for each in schedules]}

    def save(self, folder: str | os.PathLike[str], launcher: str | Iterable[str] = ()) -> Path:
        """Write the shared object, its C header, the weights and metadata.json, which suffice to run the model.

        Args:
            folder: the directory, which need not exist.
            launcher: also write launch.py, for callers that have some of ctypes and torch. A model for an NVIDIA device has
                "cpp" alone: model.h, model_host.c and plan.bin, a program for the CUDA driver.
        """
        launchers = [launcher] if isinstance(launcher, str) else list(launcher)
        loaded = self._variants[0].loaded if self._variants[0].mixed is not None else None
        if isinstance(loaded, MixedModel):
            if launchers:
                raise ArgumentError(
                    "launchers are of models for one device",
                    code="unknown-launcher",
                    hint="roller_svc.load_model loads the folder",
                )
            kernels = tuple(self._kernel_bundles[position] for position in self._variants[0].kernels)
            mixed = MixedBundle(self.digest, self.name, self.target, loaded.program, _link_kernels(kernels), self.report)
            return save_mixed(loaded, mixed, folder, model_header)
        if launchers and not self._variants[0].binary:
            check_model_launchers(launchers, self.target, hardware.load(self.target).family)
        variants = tuple(
            VariantBundle(
                each.dims, each.name, each.plan, each.kernels, each.binary,
                each.loaded.weights[: each.weights_bytes], each.loaded.packed[: each.plan.packed_bytes],
            )
            for each in self._variants
        )  # fmt: skip
        kernels = _link_kernels(self._kernel_bundles)
        bundle = ModelBundle(self.digest, self.name, self.target, kernels, variants, self.report)
        return saved.save_model(bundle, folder, model_header, launchers)

    def _padded(
        self, arrays: Mapping[str, object], written: Mapping[str, object]
    ) -> tuple[_Variant, tuple[Padding, dict[str, int]] | None]:
        """Return the variant for the shapes of inputs and states, and how to pad them to it and to which extents they belong.

        With a single variant and no padding, its call checks the arrays.
        """
        paddings = self.report.get("padding") or ()
        if len(self._variants) == 1 and not paddings:
            return self._variants[0], None
        infos = (*self.inputs, *self.states)
        given = [*(arrays.get(info.name) for info in self.inputs), *(written.get(info.name) for info in self.states)]
        if not all(hasattr(array, "shape") for array in given):
            return self._variants[0], None  # its call names the argument that is missing or not an array
        shapes = tuple(tuple(getattr(array, "shape", ())) for array in given)
        for variant in self._variants:
            if variant.shapes == shapes:
                return variant, None
        by_name = dict(zip((info.name for info in infos), shapes, strict=True))
        usable = [pair for pair in zip(self._variants, paddings, strict=False) if pair[1]]
        for variant, axes in sorted(usable, key=lambda pair: math.prod(dict(pair[0].dims).values())):
            padding = Padding(dict(variant.dims), axes)
            if (extents := padding.extents_of(by_name, variant.plan.inputs)) is not None:
                return variant, (padding, extents)
        shown = ", ".join(f"{name}{list(shape)}" for name, shape in by_name.items())
        hint = "; ".join(dict.fromkeys(self.report.get("not_padded") or ())) or None
        raise ArgumentError(f"no bucket has the shapes {shown}; buckets are {self._buckets()}", code="shape-mismatch", hint=hint)

    def _buckets(self) -> str:
        return "; ".join(", ".join(f"{name}={extent}" for name, extent in each.items()) for each in self.buckets)

    def _plan(self, variant: _Variant, kind: object) -> dict[str, Any]:
        plan = variant.plan
        if variant.mixed is not None:
            return {"kind": kind, "threads": self.report.get("threads"), **plan_to_json(plan), **variant.mixed.to_json()}
        launches, waits = _count_launches(plan.steps)
        if not variant.binary:
            launches = 1 if plan.lowering == CUDA_GRAPH.kind else _count_operations(plan)
        return {
            "kind": kind,
            "veus": max((step.plan.num_veus for step in plan.steps if isinstance(step, VDeviceStep)), default=1),
            "threads": self.report.get("threads"),
            "launches": launches,
            "waits": waits,
            "kernels": [
                {"digest": self._kernel_bundles[i].digest, "num_tasks": list(map(list, kernel.source.num_tasks))}
                for i, kernel in zip(variant.kernels, plan.kernels, strict=True)
            ],
            "arena": {"bytes": plan.arena_bytes, "tensor_bytes": plan.tensor_bytes},
            **plan_to_json(plan),
        }

    def _adopt(self, model: Model) -> None:
        """Become a model that computes the same by other kernels, and keep the name."""
        self._kernel_bundles, self._kernels = model._kernel_bundles, None
        self.digest, self.report, self.estimate = model.digest, model.report, model.estimate
        self._variants = model._variants
        self._run_plain = None

    def _wire(self, number: int, loaded: _Loaded) -> None:
        """Let calls of a bucket run a model that computes the same."""
        self._variants[number].load_as(loaded)
        self._run_plain = None

    def __reduce__(self) -> Never:
        """Raise ArgumentError: weights need an alignment that pickles do not keep."""
        raise ArgumentError(
            "a model cannot be pickled or copied",
            code="not-picklable",
            hint="model.save(folder), and roller_svc.load_model(folder) where it is needed",
        )

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the device, the estimate, the plan, and the kernels that take longest."""
        tensors = [f"{each.name}: {each.dtype}{list(each.shape)}" for each in (*self.inputs, *self.states, *self.outputs)]
        slowest = sorted(self.estimate.stages, key=lambda stage: -stage.seconds)[:SHOWN_KERNELS]
        kernels = [f"{format_seconds(stage.seconds)} {stage.name[:19]}" for stage in slowest]
        story = _tell(self._variants[0]) if self.has_story else None
        seconds, drawing = (self.estimate.seconds, "") if story is None else (story.seconds, draw_timeline(story))
        headline = f"for {self.target}: {format_seconds(seconds)} a call, {len(self.estimate.stages)} kernels"
        return make_card(self.name, headline, [", ".join(tensors), *kernels, f"digest {self.digest}"], drawing)

    def __repr__(self) -> str:
        inputs = ", ".join(f"{each.name}: {each.dtype}{list(each.shape)}" for each in (*self.inputs, *self.states))
        return f"<roller_svc.Model {self.digest[:19]} for {self.target}: {inputs}>"


@shows_options(NamedOptions)
def compile_model(
    source: object,
    target: str = "local",
    threads: int | None = None,
    inputs: Mapping[str, object] | None = None,
    *,
    plan: str | Mapping[str, Any] = "auto",
    tune: str | None = None,
    tune_options: Mapping[str, object] | None = None,
    runtime: str = "auto",
    dims: Mapping[str, int | str | Sequence[int]] | None = None,
    constants: Mapping[str, object] | None = None,
    states: Mapping[str, str] | None = None,
    devices: Mapping[str, str] | None = None,
    across: str = MERGED,
    order: str = DATAFLOW,
    sink: str = SINK_KINDS[0],
    progress: Progress = no_progress,
    **options: Unpack[NamedArguments],
) -> Model:
    """Compile a model to one program. Kernels are kept in a cache on disk, which later models use.

    Args:
        source: path or bytes of an ONNX file, onnx.ModelProto, torch.export.ExportedProgram, (torch.nn.Module, example
            inputs), or a JSON graph: a dict, or the path of a .json file or of a folder with graph.json.
        target: id of the device; "local" is the host CPU.
        threads: number of threads of a CPU; default: the cores of the device.
        inputs: dtype and shape of inputs that an ONNX model leaves open.
        plan: "serial" runs one operator after the other on all threads, "parallel" each operator on one thread and
            several side by side, "rammer" interleaves operators by RAMMER's policy; "auto" takes the fastest. "eager"
            is "serial" without fusion and keeps every tensor. A mapping is a plan of this model (`Model.plan`), perhaps
            edited. On a GPU: "launches" (also "serial") launches one kernel after the other, "graph" a CUDA graph of
            them, "waves" one kernel of all operators for each level of the graph, "persistent" one that executes all of
            them, "auto" the kind that the performance model prefers.
        tune: "now" chooses kernels by trials of the whole model on this machine, where each finds the caches as the others
            leave them; "online" makes callers' calls the trials; "background" does so too, begins with the kernels that
            the performance model chooses, and builds others in another process; "off" takes kernels that were chosen
            alone. `Model.tuning` says what was chosen. Default: "background" for this machine's CPU where `select` is not
            given (ROLLER_TUNE), else "off".
        tune_options: some of "budget_trials": 64 of a bucket at most, before models are compared; "budget_s", after which
            no trial begins; "exact": True, for kernels with the same bits alone; "share": 0.5 of calls at most are trials;
            "variables": ["kernel", "plan", "buffers"], the kinds of choices that are explored; "fusion" is another one.
        runtime: "emulator" runs a GPU's model on the CPU, "auto" on its device.
        dims: extents of symbolic dimensions; a list of extents makes a bucket for each, a range as "1..64" one for each of
            its powers of two and its end. Calls with extents between buckets are padded. For a torch program these are the
            names of its torch.export.Dim; their own ranges hold if none are given.
        constants: values of inputs of an ONNX model, as {"sr": 16000}. The compiled model does not have these inputs.
        states: inputs that calls update in place, each with the output that is its new value; a `*` in both stands for any
            text, as {"past_*": "present_*"}. They are states of the model, by the names of the inputs.
        devices: the devices of nodes, by a node's name or a pattern with `*`: an id, "cpu", "gpu", or "python:NAME" for a
            function that `roller_svc.python_op` registered. Other nodes have the label of the source, or the target.
        across: with several devices "merged" orders subgraphs and copies by data and effects alone, "split" runs one after
            the other.
        order: "dataflow" runs what can run at the same time, "serial" in the order of the plan.
        sink: "require" refuses a model whose call is more than one submission (`report["sinks"]`).
        progress: called with a stage, the number of its parts that are done, and the number of all.
        options: the fields of NamedOptions, for each kernel and the name of the model.

    Raises:
        UnsupportedModelError: nodes cannot be compiled; `nodes` has all of them.
    """
    reject_unknown(NamedOptions, options, "compile_model", inspect.signature(compile_model).parameters)
    checked = read_options(NamedOptions, options)
    runs_in = _runtime(runtime)
    target_id = validate_target(target)
    _check_modes(across, order, sink)
    labels = check_labels(devices)
    types = dict(tensor_types(inputs, least=0)) if inputs is not None else None
    _check_constants(constants)
    _check_states(states)
    register_python_ops()
    cache, weights = KernelCache(settings().cache_folder), Weights()
    clock = StageTimer()
    source, dims = prepare_source(source, dims)
    buckets = _buckets(dims)

    spec = hardware.load(target_id) if threads is None else device_spec(target, threads)

    def load_with(weights: Weights, extents: Mapping[str, int]) -> Graph:
        graph = load_graph(source, weights, types, extents, constants, byte_group=spec.byte_group)
        return pair_states(graph, states)

    def load(extents: Mapping[str, int]) -> Graph:
        return load_with(weights, extents)

    graphs = [load(extents) for extents in buckets]
    if any(place_nodes(graph, labels, spec) is not None for graph in graphs):
        if len(graphs) > 1 or tune not in (None, TUNE_KINDS[0]) or not isinstance(plan, str):
            raise ArgumentError(
                "a model over several devices has one bucket, and no tuning or plan by hand",
                code="invalid-option",
                hint='compile a model for each extent, as dims={"batch": 1}, with tune="off"' if len(graphs) > 1 else None,
            )
        calibrate_at_first_use((target_id,), log.warning)
        chosen = _options(target_id, threads, plan, checked)
        model = _mixed_model(graphs[0], labels, weights, chosen, cache, runs_in, across, order)
        _check_sink(model, sink)
        return model
    if runs_in is RuntimeChoice.EMULATOR:
        check_emulable(spec)
    if order == SERIAL and plan == AUTO:
        plan = SERIAL
    padding, not_padded = _padding(buckets, graphs, dims or {}, load, weights)
    clock.record("import")
    calibrate_at_first_use((target_id,), log.warning)  # after all that may be refused at once
    chosen = _options(target_id, threads, plan, checked)
    if tune is None:
        tune = settings().tune if "select" not in options and may_tune(chosen) else TUNE_KINDS[0]
    if tune == "background" and "select" not in options:
        chosen = replace(chosen, select=SelectionMode.MODEL)
    chosen = replace(chosen, tune=_tune_options(tune, tune_options))
    check_tuning(chosen)
    built = [(e, build_model(graph, weights, chosen, cache, progress)) for e, graph in zip(buckets, graphs, strict=True)]
    clock.record("build")
    import_s = sum(seconds for stage, seconds in clock.stages if stage == "import")
    steps = [partial(_step_source, load_with, extents, chosen, cache, runs_in) for extents in buckets]
    model = _model(built, weights, chosen, import_s, {"padding": padding, "not_padded": not_padded}, runs_in, steps)
    _check_sink(model, sink)
    return model


def _check_modes(across: object, order: object, sink: object) -> None:
    for name, value, known in (("across", across, ACROSS), ("order", order, ORDERS), ("sink", sink, SINK_KINDS)):
        if value not in known:
            listed = " or ".join(map(repr, known))
            raise ArgumentError(f"{name} must be {listed}, got {short_repr(value)}", code="invalid-option")


def _check_sink(model: Model, sink: str) -> None:
    sinks = model.report["sinks"]
    if sink == "require" and (sinks["submissions"] > 1 or sinks["outside"]):
        outside = "; ".join(f"{each['node']}: {each['reason']}" for each in sinks["outside"]) or "its device takes several"
        raise ArgumentError(f"a call is {sinks['submissions']} submissions: {outside}", code="not-sunk")


def _mixed_model(
    graph: Graph,
    labels: Mapping[str, str],
    weights: Weights,
    options: ModelOptions,
    cache: KernelCache,
    runtime: RuntimeChoice,
    across: str,
    order: str,
) -> Model:
    """Return a model over several devices. States are values, which are copied to the states after the last step."""
    placed = require(_place(graph, labels, options.hardware), "second device")
    parts = build_parts(placed, graph.states, weights, options, cache, runtime, across, order)
    listed = tuple(bundle for each in parts.built.values() for bundle in each.kernels)
    content = json.dumps(
        [options.name, parts.plan.to_json(), plan_to_json(parts.caller), list(dict.fromkeys(each.digest for each in listed)), order]
    )
    digits = hashlib.sha256(content.encode()).hexdigest()
    name = options.name or default_name(digits)
    copies_s = sum(copy.seconds for copy in parts.plan.copies)
    if copies_s > COPIES_RATIO * sum(step.seconds for step in parts.plan.steps):
        reasons = "; ".join(copy.reason for copy in parts.plan.copies)
        warnings.warn(
            f"copies between devices take {copies_s:.3g} s of {parts.plan.seconds:.3g} s by the model: {reasons}",
            RollerWarning,
            stacklevel=3,
        )

    def prepare(*, fused: bool) -> Stepper:
        return MixedSteps(parts, replace(options, fuse=fused and options.fuse), cache)

    report = {
        "plan": across, "plan_seconds": {across: parts.plan.seconds}, "plan_is_measured": False,
        "threads": options.hardware.num_cores if options.hardware.family is TargetKind.CPU else None,
        "order": order, "sinks": _sinks_of(parts.plan),
        "buckets": [], "lowerings": {}, **_report_builds(tuple(parts.built.values()), {}),
    }  # fmt: skip
    bundle = MixedBundle(f"sha256:{digits}", name, options.hardware.id, parts.program, listed, report)
    return _join_parts(bundle, prepare)


def _place(graph: Graph, labels: Mapping[str, str], spec: HardwareSpec) -> Placed | None:
    """Return the nodes that something needs with their devices, and states as values; None if all are the target."""
    placed = place_nodes(replace(graph, states=()), labels, spec)
    return None if placed is None else replace(placed, graph=remove_dead_nodes(placed.graph))


def _join_parts(bundle: MixedBundle, prepare: PrepareSteps | None) -> Model:
    """Return the model of subgraphs, which are loaded at the first call."""
    kernels = {kernel.digest: kernel for kernel in bundle.kernels}
    positions = {digest: position for position, digest in enumerate(kernels)}
    program = bundle.program
    variant = _Variant(
        (), bundle.name, program.caller, tuple(positions[kernel.digest] for kernel in bundle.kernels),
        lambda: MixedModel(program), b"", program.runtime, prepare, program.plan, tuple(program.plans.values()),
    )  # fmt: skip
    return Model(bundle.digest, bundle.name, bundle.target, tuple(kernels.values()), (variant,), bundle.report)


def _sinks_of(plan: MixedPlan) -> dict[str, Any]:
    """Return the submissions of a call, and the nodes outside of them."""
    outside = [{"node": each.nodes[0], "reason": f"it is {each.device}"} for each in plan.subgraphs if each.is_host]
    return {"submissions": len(plan.subgraphs) - len(outside), "outside": outside}


def _link_kernels(bundles: Sequence[KernelBundle]) -> tuple[KernelBundle, ...]:
    """Return kernels with their binaries, which calls of a model do not need."""
    return link_kernels(bundles, KernelCache(settings().cache_folder))


def _step_source(
    load: Callable[[Weights, Mapping[str, int]], Graph],
    extents: Mapping[str, int],
    options: ModelOptions,
    cache: KernelCache,
    runtime: RuntimeChoice,
    built: BuiltModel,
) -> PrepareSteps:
    """Return what reads a model's source again, and compiles its nodes. It keeps no weights before."""
    kernels, flipped = built.node_kernels, built.fused.flipped

    def prepare(*, fused: bool) -> Stepper:
        weights = Weights()
        chosen = replace(options, fuse=fused and options.fuse, flipped=flipped)
        return prepare_steps(load(weights, extents), weights, chosen, cache, runtime, kernels)

    return prepare


@shows_options(NamedOptions)
def estimate_model(  # what compile_model takes, apart from a way to show progress
    source: object,
    target: str = "local",
    threads: int | None = None,
    inputs: Mapping[str, object] | None = None,
    *,
    plan: str | Mapping[str, Any] = "auto",
    dims: Mapping[str, int | str | Sequence[int]] | None = None,
    constants: Mapping[str, object] | None = None,
    states: Mapping[str, str] | None = None,
    devices: Mapping[str, str] | None = None,
    across: str = MERGED,
    **options: Unpack[NamedArguments],
) -> dict[str, Any]:
    """Estimate a model by the performance model, without a compiler; for the first of several buckets.

    Returns the seconds of a call, the bucket's dims and the number of all, and the seconds of each class of equal nodes,
    as JSON-compatible values. Over several devices these are without functions of Python, whose seconds nobody knows, and
    `subgraphs` and `copies` have the parts of the sum. Raises as compile_model does.
    """
    checked = read_options(NamedOptions, options)
    target_id = validate_target(target)
    calibrate_at_first_use((target_id,), log.warning)
    chosen = _options(target_id, threads, plan, checked)
    types = dict(tensor_types(inputs, least=0)) if inputs is not None else None
    _check_constants(constants)
    _check_states(states)
    _check_modes(across, DATAFLOW, SINK_KINDS[0])
    labels = check_labels(devices)
    register_python_ops()
    weights = Weights()
    source, dims = prepare_source(source, dims)
    buckets = _buckets(dims)
    graph = load_graph(source, weights, types, buckets[0], constants, byte_group=chosen.hardware.byte_group)
    graph = pair_states(graph, states)
    head = {"target": chosen.hardware.id, "dims": buckets[0], "buckets": len(buckets)}
    placed = _place(graph, labels, chosen.hardware)
    if placed is not None:
        mixed, estimates = estimate_parts(placed, weights, chosen, across)
        listed = [row for each in estimates for row in _list_classes(each)]
        return head | mixed.to_json() | {"kernels": listed, "plan": across, "lowerings": {}}
    estimate = estimate_graph(graph, weights, chosen)
    return head | {
        "seconds": estimate.seconds,
        "kernels": _list_classes(estimate),
        "plan": None if estimate.lowering is None else estimate.lowering.kind,
        "lowerings": {} if estimate.lowering is None else estimate.lowering.to_json(),
    }


def _list_classes(estimate: GraphEstimate) -> list[dict[str, Any]]:
    return [
        {"expression": each.expression, "uses": len(each.nodes), "seconds": each.runs * each.seconds} for each in estimate.classes
    ]


def find_devices(
    source: object,
    target: str,
    inputs: Mapping[str, object] | None = None,
    *,
    dims: Mapping[str, int | str | Sequence[int]] | None = None,
    constants: Mapping[str, object] | None = None,
    devices: Mapping[str, str] | None = None,
) -> set[str]:
    """Return the devices of a model's nodes, by its labels and the caller's; nothing if all are the target. Compiles nothing.

    A device is an id, or python:NAME. Raises as compile_model does.
    """
    types = dict(tensor_types(inputs, least=0)) if inputs is not None else None
    _check_constants(constants)
    source, dims = prepare_source(source, dims)
    hw = hardware.load(validate_target(target))
    graph = load_graph(source, Weights(), types, _buckets(dims)[0], constants, byte_group=hw.byte_group)
    placed = place_nodes(graph, check_labels(devices), hw)
    return set() if placed is None else set(placed.devices.values())


def load_model(folder: str | os.PathLike[str], runtime: str = "auto", *, tune: str = TUNE_KINDS[0]) -> Model:
    """Load a saved model, without a compiler.

    Loading runs no code. Calling the model runs the machine code in its directory with the rights of this process, so
    load only models from trusted sources. `runtime` is that of compile_model; the emulator needs a C++ compiler. A saved
    model has the kernels that trials have chosen, and cannot be tuned: `tune` must be "off".
    """
    runs_in = _runtime(runtime)
    if _tune_options(tune, None) is not None:
        raise ArgumentError(
            f'tune must be "off" for a saved model, got "{tune}": trials make plans of its graph and pack its weights, '
            "and it has kernels, packed weights and one plan",
            code="cannot-measure",
            hint=f'compile its source: roller_svc.compile_model(source, tune="{tune}") makes no trial that the cache knows',
        )
    if is_mixed(folder):
        register_python_ops()
        return _join_parts(load_mixed(folder, runs_in), None)
    bundle = saved.load_model(folder)
    if runs_in is RuntimeChoice.EMULATOR and bundle.variants[0].binary:
        reject_emulation(bundle.target)
    for each in bundle.variants:
        if not each.binary and each.plan.lowering not in LOWERING_KINDS:
            raise ArgumentError(
                f"{folder} is not a saved model: no lowering is called {each.plan.lowering[:80]!r}",
                code="damaged-kernel",
                hint="save the model again",
            )
    variants = tuple(_saved_variant(each, bundle, runs_in) for each in bundle.variants)
    return Model(bundle.digest, bundle.name, bundle.target, bundle.kernels, variants, bundle.report)


def _tune_options(tune: object, options: object) -> TuneOptions | None:
    """Return how to tune; None for "off". Raises ArgumentError for options that do not exist, or have wrong values."""
    if not isinstance(tune, str) or tune not in TUNE_KINDS:
        listed = " or ".join(map(repr, TUNE_KINDS))
        raise ArgumentError(f"tune must be {listed}, got {short_repr(tune)}", code="invalid-option")
    given = {} if options is None else options
    if not isinstance(given, Mapping) or not given.keys() <= _TUNE_VALUES.keys():
        listed = ", ".join(_TUNE_VALUES)
        raise ArgumentError(f"tune_options must have some of {listed}, got {short_repr(given)}", code="invalid-option")
    for name, value in given.items():
        is_valid, expected = _TUNE_VALUES[name]
        if not is_valid(value):
            raise ArgumentError(f"{name} must be {expected}, got {short_repr(value)}", code="invalid-option")
    named: dict[str, Any] = {name: tuple(value) if name == "variables" else value for name, value in given.items()}
    return None if tune == TUNE_KINDS[0] else TuneOptions(**named | {"kind": tune})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


_TUNE_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "budget_trials": (lambda value: (whole_number(value) or 0) > 0, "a positive whole number"),
    "budget_s": (_is_number, "a positive number of seconds"),
    "exact": (lambda value: isinstance(value, bool), "True or False"),
    "share": (lambda value: _is_number(value) and value <= 1, "a number above 0, and at most 1"),
    "variables": (
        lambda value: isinstance(value, list | tuple) and all(isinstance(each, str) and each in KINDS for each in value),
        f"a list of some of {', '.join(KINDS)}",
    ),
}


def _options(target: object, threads: object, plan: object, checked: Mapping[str, Any]) -> ModelOptions:
    is_eager = plan == EAGER
    spec = device_spec(target, threads)
    check_device(spec)
    return ModelOptions(
        spec,
        fuse=not is_eager,
        share_memory=not is_eager,
        plan=SERIAL if is_eager else _plan(plan, spec),
        **checked,
    )


def _plan(plan: object, spec: HardwareSpec) -> str | Mapping[str, Any]:
    """Return a kind of plans of a device, or a plan by hand."""
    check_plan_kind(plan, spec)
    if isinstance(plan, Mapping | str):
        return plan
    raise InvariantError("a plan was checked that is none")


def _runtime(runtime: object) -> RuntimeChoice:
    try:
        return RuntimeChoice(runtime)
    except ValueError:
        listed = ", ".join(repr(each.value) for each in RuntimeChoice)
        raise ArgumentError(f"runtime must be one of {listed}, got {short_repr(runtime)}", code="invalid-option") from None


def device_spec(target: object, threads: object) -> HardwareSpec:
    """Return the spec of the target, for that number of threads. Raises InputError for invalid ones."""
    spec = hardware.load(validate_target(target))
    if threads is None:
        return spec
    if spec.family is not TargetKind.CPU:
        raise ArgumentError(f"threads are for CPUs, and {spec.id} is not one", code="invalid-option")
    number = whole_number(threads)
    if number is None or not 1 <= number <= spec.num_cores:
        raise ArgumentError(
            f"threads must be a whole number from 1 to {spec.num_cores}, the cores of {spec.id}, got {short_repr(threads)}",
            code="invalid-option",
        )
    return restrict_cores(spec, number)


def _buckets(dims: object) -> list[dict[str, int]]:
    """Return every combination of the extents of the symbolic dimensions."""
    if dims is None:
        return [{}]
    if not isinstance(dims, Mapping) or not all(isinstance(name, str) for name in dims):
        raise ArgumentError(f"dims must map names to extents, got {short_repr(dims)}", code="invalid-option")
    extents: list[list[int]] = []
    for name, value in dims.items():
        listed = list(value) if isinstance(value, list | tuple) else _range_buckets(name, value) if _is_range(value) else [value]
        numbers = [number for each in listed if (number := whole_number(each)) is not None and number >= 0]
        if not numbers or len(numbers) < len(listed) or len(set(numbers)) < len(numbers):
            forms = "a whole number, a list of different ones, or a range as '1..64'"
            raise ArgumentError(f"dims: {name} must be {forms}, got {short_repr(value)}", code="invalid-option")
        extents.append(numbers)
    if math.prod(map(len, extents)) > MAX_VARIANTS:
        raise ArgumentError(f"dims give more than {MAX_VARIANTS} buckets", code="invalid-option")
    return [dict(zip(dims, chosen, strict=True)) for chosen in itertools.product(*extents)]


def _is_range(value: object) -> bool:
    return isinstance(value, str) and ".." in value


def _range_buckets(name: str, text: str) -> list[int]:
    """Return the buckets of a range, as "1..64": its powers of two, and its end."""
    first, _, last = text.partition("..")
    if not (first.strip().isdecimal() and last.strip().isdecimal() and 1 <= int(first) <= int(last)):
        raise ArgumentError(f"dims: {name} must be a range as '1..64', got {short_repr(text)}", code="invalid-option")
    powers = [1 << i for i in range(int(last).bit_length())]
    return sorted({*(each for each in powers if int(first) <= each <= int(last)), int(last)})


def _padding(
    buckets: Sequence[dict[str, int]],
    graphs: Sequence[Graph],
    dims: Mapping[str, object],
    load: Callable[[Mapping[str, int]], Graph],
    weights: Weights,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return for each bucket the padded axes by dimension, and why dimensions of lists of extents cannot be padded.

    Raises ArgumentError if a dimension with a range cannot.
    """
    padding: list[dict[str, Any]] = [{} for _ in buckets]
    reasons: list[str] = []
    for name, value in dims.items():
        if not (_is_range(value) or (isinstance(value, list | tuple) and len(value) > 1)):
            continue
        found: list[Mapping[str, int]] = []
        try:
            for extents, graph in zip(buckets, graphs, strict=True):
                others = {
                    each[name]: other
                    for each, other in zip(buckets, graphs, strict=True)
                    if each | {name: 0} == extents | {name: 0}
                }
                found.append(_axes_of(name, extents, graph, others, load, weights))
        except PaddingError as error:
            message = f"{name!r} cannot be padded: {error}, so padding would change results"
            if _is_range(value):
                raise ArgumentError(
                    message, code="padding-changes-results", hint=f'give the extents that occur: dims={{"{name}": [1, 2]}}'
                ) from error
            reasons.append(message)
            continue
        for each, axes in zip(padding, found, strict=True):
            each[name] = dict(axes)
    return (padding if any(padding) else []), reasons


def _axes_of(
    name: str,
    extents: Mapping[str, int],
    graph: Graph,
    others: Mapping[int, Graph],
    load: Callable[[Mapping[str, int]], Graph],
    weights: Weights,
) -> PaddedAxes:
    """Return the padded axes of a bucket. An extent of 1 needs none: other extents have other programs.

    The bucket is compared with the largest other one, and with an extent that is padded to it. Buckets alone may all have
    a property that other extents lack: powers of two are even.
    """
    if graph.states:
        raise PaddingError("the model has states, which padding would update too")
    extent = extents[name]
    distant = max((each for each in others if LEAST_COMPARED <= each != extent), default=None)
    if extent < LEAST_COMPARED or (distant is None and extent == LEAST_COMPARED and 1 in others):
        return {}  # every extent has its bucket
    compared = {} if distant is None else {distant: others[distant]}
    near = extent - 1 if extent > LEAST_COMPARED else extent + 1
    if distant is None or (near < extent and near not in others):
        try:
            compared[near] = load({**extents, name: near})
        except InputError as error:
            if distant is None:
                raise PaddingError(f"the model does not take {near} of it: {error.message}") from error
    axes, *more = [padded_axes(graph, other, (extent, there), weights) for there, other in compared.items()]
    if any(each != axes for each in more):
        raise PaddingError("its tensors differ in other axes for other extents")
    return axes


def _check_constants(constants: object) -> None:
    if constants is not None and not (isinstance(constants, Mapping) and all(isinstance(n, str) for n in constants)):
        raise ArgumentError(
            f"constants must map names of inputs to values, got {short_repr(constants)}",
            code="invalid-option",
            hint='constants={"sr": 16000}',
        )


def _check_states(states: object) -> None:
    if states is not None and not isinstance(states, Mapping):
        raise ArgumentError(
            f"states must map inputs to outputs, got {short_repr(states)}",
            code="invalid-option",
            hint='states={"past_*": "present_*"}',
        )


def _model(
    built: Sequence[tuple[dict[str, int], BuiltModel]],
    weights: Weights,
    options: ModelOptions,
    import_s: float,
    padding: Mapping[str, Any],
    runtime: RuntimeChoice,
    steps: Sequence[Callable[[BuiltModel], PrepareSteps]],
) -> Model:
    if len({_shapes(each.plan) for _, each in built}) < len(built):
        raise ArgumentError("two buckets have the same shapes: a dimension in dims is not in the model", code="invalid-option")

    def assemble(built: Sequence[tuple[dict[str, int], BuiltModel]], known: Mapping[int, _Variant], name: str | None) -> Model:
        """Return the model of its buckets, some of which are those of an equal one of that name."""
        bundles: dict[str, KernelBundle] = {}
        for _, each in built:
            bundles |= {bundle.digest: bundle for bundle in each.kernels}
        positions = {digest: position for position, digest in enumerate(bundles)}
        digits = _digest(built, options)
        named = name or options.name or default_name(digits)
        variants = tuple(
            known[number].with_kernels(_positions(each, positions))
            if number in known
            else _built_variant(
                dims, variant_name(named, number), each, weights, _positions(each, positions), runtime, steps[number](each), options
            )
            for number, (dims, each) in enumerate(built)
        )
        report = {**_report(built, options, import_s), **padding}
        tuning = built[0][1].tuning
        return Model(f"sha256:{digits}", named, options.hardware.id, tuple(bundles.values()), variants, report, tuning)

    model = assemble(built, {}, None)
    parts, adopting = list(built), ForkLock()

    def adopt(model: Model, number: int, rebuilt: BuiltModel) -> CpuModel:
        """Let a model have another one of a bucket, which is loaded, and return it."""
        with adopting:
            parts[number] = parts[number][0], rebuilt
            others = {i: variant for i, variant in enumerate(model._variants) if i != number}
            changed = assemble(parts, others, model.name)
            loaded = changed._variants[number].loaded_on_cpu
            model._adopt(changed)
            return loaded

    explored = [
        _explore_bucket(model, number, each, each.online, adopt)
        for number, (_, each) in enumerate(built)
        if each.online is not None
    ]
    if explored:
        model.tuning, *explored[0].others = explored
    return model


def _explore_bucket(
    model: Model,
    number: int,
    built: BuiltModel,
    source: OnlineSource,
    adopt: Callable[[Model, int, BuiltModel], CpuModel],
) -> OnlineTuning:
    """Let the calls of a bucket choose its kernels and its plan. A model that nobody uses any more explores no more."""
    owner = weakref.ref(model)
    wirer = model._variants[number].add_wirer(source.options.share)

    def bind(assigned: Assignment) -> None:
        used = owner()
        if used is not None:
            wirer.use(adopt(used, number, rebuild_model(built, assigned, tuning.found)))

    def switch(loaded: Wirer | WatchedModel | CpuModel) -> None:
        used = owner()
        if used is not None:
            used._wire(number, loaded)

    reopens = source.options.exact or not source.options.is_background  # results of the default change their bits once at most
    tuning = OnlineTuning(wirer, partial(explore_online, source, wirer, bind), switch, reopens=reopens)
    weakref.finalize(model, tuning.stop)
    return tuning


def _digest(built: Sequence[tuple[dict[str, int], BuiltModel]], options: ModelOptions) -> str:
    parts: list[object] = [
        [list(dims.items()), plan_to_json(each.plan), [bundle.digest for bundle in each.kernels]] for dims, each in built
    ]
    content = json.dumps(parts if options.name is None else [options.name, *parts])
    return hashlib.sha256(content.encode()).hexdigest()


def _positions(built: BuiltModel, positions: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(positions[bundle.digest] for bundle in built.kernels)


def _built_variant(
    dims: dict[str, int],
    name: str,
    built: BuiltModel,
    weights: Weights,
    kernels: tuple[int, ...],
    runtime: RuntimeChoice,
    steps: PrepareSteps,
    options: ModelOptions,
) -> _Variant:
    plan, binary = built.plan, built.link(name)

    def load() -> CpuModel | GpuModel:
        return load_built(built, name, binary, weights, runtime)

    lowering = built.lowerings.get(plan.lowering) or {}
    story_source = StorySource(
        built.graph,
        built.classes,
        tuple(bundle.digest for bundle in built.kernels[: len(built.classes)]),
        tuple(floor_seconds(bundle) for bundle in built.kernels[: len(built.classes)]),
        plan,
        built.choice.kind if options.fuse else EAGER,
        built.passes,
        options.hardware,
        lowering.get("seconds"),
        built.joined,
    )
    return _Variant(tuple(dims.items()), name, plan, kernels, load, binary, runtime, steps, story_source=story_source)


def _tell(variant: _Variant) -> ModelStory:
    return tell_model_story(_story_source(variant))


def _scheduled(variant: _Variant) -> ModelSchedule | None:
    return tell_schedule(_story_source(variant))


def _story_source(variant: _Variant) -> StorySource:
    if variant.story_source is None:
        raise ArgumentError(
            f"{variant.name} has no story: it was saved, or runs on several devices",
            code="no-story",
            hint="compile its source for one device by roller_svc.compile_model",
        )
    return variant.story_source


def _saved_variant(bundle: VariantBundle, model: ModelBundle, runtime: RuntimeChoice) -> _Variant:
    load = partial(load_variant, bundle, model, runtime)
    return _Variant(bundle.dims, bundle.name, bundle.plan, bundle.kernels, load, bundle.binary, runtime)


def _report(built: Sequence[tuple[dict[str, int], BuiltModel]], options: ModelOptions, import_s: float) -> dict[str, Any]:
    first = built[0][1]
    kinds = [each.choice.kind if options.fuse else EAGER for _, each in built]
    buckets = [
        {"dims": dims, "plan": kind, "lowerings": dict(each.lowerings)} for kind, (dims, each) in zip(kinds, built, strict=True)
    ]
    plan = first.plan
    is_one = options.hardware.family is TargetKind.CPU or plan.lowering == CUDA_GRAPH.kind
    return {
        "sinks": {"submissions": 1 if is_one else _count_operations(plan), "outside": []},
        "plan": kinds[0],
        "plan_seconds": dict(first.choice.seconds),
        "plan_is_measured": first.choice.is_measured,
        "threads": options.hardware.num_cores if options.hardware.family is TargetKind.CPU else None,
        "lowerings": dict(first.lowerings),
        "buckets": buckets if len(buckets) > 1 else [],
        "tuning": None if first.tuning is None else first.tuning.to_json(),
        "select": options.select.value,
        **_report_builds([each for _, each in built], {"import": import_s}),
        **_report_passes([first]),
    }


def _report_builds(built: Sequence[BuiltModel], before: Mapping[str, float]) -> dict[str, Any]:
    """Return what the passes and the compilation of several graphs have done together, after the stages before them."""
    seconds = dict(before)
    for name, value in (stage for each in built for stage in each.stage_seconds):
        seconds[name] = seconds.get(name, 0.0) + value
    hits, classes = sum(each.cache_hits for each in built), sum(len(each.classes) for each in built)
    return {"seconds": seconds, "cache": {"hits": hits, "misses": classes - hits}, **_report_passes(built)}


def _report_passes(built: Sequence[BuiltModel]) -> dict[str, Any]:
    """Return the nodes of several graphs before and after each pass, and the classes of their kernels."""
    return {
        "passes": [
            {
                "name": reports[0].name,
                "nodes_before": sum(each.nodes_before for each in reports),
                "nodes_after": sum(each.nodes_after for each in reports),
            }
            for reports in zip(*(each.passes for each in built), strict=True)
        ],
        "classes": [
            {
                "kernel": bundle.digest,
                "expression": each.expression,
                "inputs": [[name, t.dtype.value, list(t.shape)] for name, t in each.inputs],
                "constants": list(each.constants),
                "nodes": [node.removeprefix("/") for node in each.nodes],
            }
            for graph in built
            for each, bundle in zip(graph.classes, graph.kernels, strict=False)
        ],
    }


def _estimate(variant: _Variant, bundles: Sequence[KernelBundle], report: Mapping[str, Any]) -> ModelEstimate:
    """Return the seconds of a call by its lowering, or the sum over its kernels: one with several launches counts once."""
    digests = [bundles[position].digest for position in variant.kernels]
    if variant.mixed is not None:
        sums: dict[str, float] = {}  # a kernel may be in several subgraphs
        for part in variant.parts:
            for stage in _stages(part, digests[: len(part.kernels)]):
                sums[stage.name] = sums.get(stage.name, 0.0) + stage.seconds
            digests = digests[len(part.kernels) :]
        return ModelEstimate(variant.mixed.seconds, tuple(Stage(*each) for each in sums.items()))
    stages = _stages(variant.plan, digests)
    lowering = (report.get("lowerings") or {}).get(variant.plan.lowering)
    seconds = sum(stage.seconds for stage in stages) if lowering is None else lowering["seconds"]
    return ModelEstimate(seconds, tuple(stages))


def _stages(plan: ModelPlan, digests: Sequence[str]) -> list[Stage]:
    """Return the seconds of each kernel in a call, by its digest."""
    kernels = plan.kernels
    first = [next((i for i, launch in enumerate(kernel.source.launches) if not launch.is_prepack), None) for kernel in kernels]
    runs: dict[int, int] = {}
    for step, number in _executions(plan.steps):
        if isinstance(step, KernelStep) and step.launch == first[step.kernel]:
            runs[step.kernel] = runs.get(step.kernel, 0) + number
    return [Stage(digests[kernel], number * kernels[kernel].estimate_s) for kernel, number in sorted(runs.items())]


def _executions(steps: Sequence[Step], times: int = 1) -> Iterable[tuple[KernelStep | CopyStep, int]]:
    """Yield each step that is not a loop, with the number of times that a call runs it."""
    for step in steps:
        if isinstance(step, LoopStep):
            yield from _executions(step.body, times * step.steps)
        elif isinstance(step, VDeviceStep):
            yield from ((each, times) for each in step.steps)
        else:
            yield step, times


def _count_launches(steps: Sequence[Step], times: int = 1) -> tuple[int, int]:
    """Return the launches of a call, and its waits: threads wait at the end of a launch, and vEUs in between."""
    launches = waits = 0
    for step in steps:
        if isinstance(step, LoopStep):
            inner, inner_waits = _count_launches(step.body, times * step.steps)
            launches += inner
            waits += inner_waits
        else:
            launches += times
            waits += times
            if isinstance(step, VDeviceStep):
                waits += times * sum(
                    len(each.waits) for program in step.plan.programs for each in program if isinstance(each, Barrier)
                )
    return launches, waits


def _count_operations(plan: ModelPlan) -> int:
    """Return the kernels, copies and fills with zeros of a call."""
    return sum(times * (1 + len(step.zeroed) if isinstance(step, KernelStep) else 1) for step, times in _executions(plan.steps))


def _shapes(plan: ModelPlan) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of inputs and states, which choose a bucket."""
    return tuple(type_.shape for _, type_ in (*plan.inputs, *plan.states))


def _infos(tensors: Iterable[tuple[str, TensorType]]) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(name, type_.dtype.value, type_.shape) for name, type_ in tensors)


def _check_mapping(argument: str, value: object) -> None:
    if type(value) is not dict and not isinstance(value, Mapping):
        raise ArgumentError(f"{argument} must map names to arrays, got {kind_of(value)}", code="not-an-array")
