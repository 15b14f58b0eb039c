"""The Python API: compile, estimate, targets, reference, load, and the Kernel class."""

from __future__ import annotations

import logging
import os
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Never, Protocol, Unpack

from roller_svc.compiler.request import (
    build_request,
    read_top_k,
    reject_unknown,
    resolve_spec,
    shows_options,
    split_arguments,
    validate_expression,
    validate_outputs,
)
from roller_svc.errors import ArgumentError, BuildError, RollerWarning
from roller_svc.fork_lock import ForkLock
from roller_svc.frontend.lang.input_types import tensor_types
from roller_svc.frontend.parse import parse
from roller_svc.frontend.torch.arguments import Call, bind_tensors, run_with_tensors, share_arrays
from roller_svc.ir import estimate as ir_estimate
from roller_svc.ir.estimate import ProgramFloor, RooflineBound
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import Buffer, CompiledKernel, KernelSource, Language, LaunchSpec, Measurement, Resources, Role
from roller_svc.ir.options import EstimateArguments, EstimateOptions, KernelOptions, RuntimeChoice
from roller_svc.ir.quantities import format_seconds
from roller_svc.ir.report import BuildReport, BuildRequest, CandidateResult, Plan
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule_cost import ScheduleCost, ScheduledEstimate
from roller_svc.ir.story import Story
from roller_svc.on_use import OnUse
from roller_svc.runtime import thread_pool
from roller_svc.runtime.binding import NumpyArrays, bind, check_names
from roller_svc.runtime.cpu import CpuModule, PreparedCpu
from roller_svc.runtime.measure import measure

if TYPE_CHECKING:
    from roller_svc import hardware as devices
    from roller_svc import settings, toolchain
    from roller_svc.calibration import calibrate_at_first_use
    from roller_svc.compiler.artifact import load_plan, package_kernel
    from roller_svc.compiler.backends import load_emulated, reject_load
    from roller_svc.compiler.cards import describe_tiles, draw_plan, make_card
    from roller_svc.compiler.estimates.batch import Item, estimate_item
    from roller_svc.compiler.explain import explain_request
    from roller_svc.compiler.kernel_cache import KernelCache
    from roller_svc.compiler.pipeline import build_kernel
    from roller_svc.compiler.plans import TargetEstimate
    from roller_svc.compiler.scheduled import build_scheduled
    from roller_svc.runtime.cuda.module import CudaModule
    from roller_svc.runtime.saved import serialization as saved
    from roller_svc.semantics.interpreter import reference as interpret
else:
    devices = OnUse("roller_svc.hardware")
    settings = OnUse("roller_svc.settings")
    toolchain = OnUse("roller_svc.toolchain")
    calibrate_at_first_use = OnUse("roller_svc.calibration:calibrate_at_first_use")
    load_plan = OnUse("roller_svc.compiler.artifact:load_plan")
    package_kernel = OnUse("roller_svc.compiler.artifact:package_kernel")
    describe_tiles = OnUse("roller_svc.compiler.cards:describe_tiles")
    draw_plan = OnUse("roller_svc.compiler.cards:draw_plan")
    make_card = OnUse("roller_svc.compiler.cards:make_card")
    load_emulated = OnUse("roller_svc.compiler.backends:load_emulated")
    reject_load = OnUse("roller_svc.compiler.backends:reject_load")
    Item = OnUse("roller_svc.compiler.estimates.batch:Item")
    estimate_item = OnUse("roller_svc.compiler.estimates.batch:estimate_item")
    explain_request = OnUse("roller_svc.compiler.explain:explain_request")
    KernelCache = OnUse("roller_svc.compiler.kernel_cache:KernelCache")
    build_kernel = OnUse("roller_svc.compiler.pipeline:build_kernel")
    build_scheduled = OnUse("roller_svc.compiler.scheduled:build_scheduled")
    CudaModule = OnUse("roller_svc.runtime.cuda.module:CudaModule")
    saved = OnUse("roller_svc.runtime.saved.serialization")
    interpret = OnUse("roller_svc.semantics.interpreter:reference")


log = logging.getLogger(__name__)


class TypedArray(Protocol):
    """An array of numpy, CuPy or torch, for its type."""

    @property
    def dtype(self) -> Any: ...

    @property
    def shape(self) -> Sequence[int]: ...


Inputs = Mapping[str, tuple[Any, Sequence[int]] | TypedArray]


class TensorInfo(NamedTuple):
    """An input or output of a kernel or model."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Stage(NamedTuple):
    name: str
    seconds: float


@dataclass(frozen=True, slots=True, repr=False)
class Estimate:
    """The performance model's estimate of a plan, or of a schedule by hand."""

    seconds: float
    stages: tuple[Stage, ...]
    bound: str
    occupancy: float
    waves: int
    uncertainty: float
    program: RProgram | None  # of the plan's slowest kernel; None for a schedule by hand
    plan: Plan | None  # all kernels; None for a schedule by hand
    roofline: tuple[RooflineBound, ...] = ()  # lower bounds for every plan of these kernels; empty for a compiled kernel
    floor: ProgramFloor | None = None  # the least time of the program, whichever kernels compute it
    above_floor: str = ""  # why the estimate is more than three times the floor
    notes: tuple[str, ...] = ()  # on the first plan
    once_s: float = 0.0  # of launches that read constants alone and run once; not part of `seconds`
    schedule_cost: ScheduleCost | None = None  # of a schedule by hand

    @classmethod
    def from_plan(
        cls,
        plan: Plan,
        roofline: tuple[RooflineBound, ...] = (),
        floor: ProgramFloor | None = None,
        above_floor: str = "",
        notes: tuple[str, ...] = (),
    ) -> Estimate:
        program = plan.dominant_choice.program
        return cls._of(plan.estimate, program, plan, roofline, floor, above_floor, notes)

    @classmethod
    def from_schedule(cls, scheduled: ScheduledEstimate) -> Estimate:
        estimate = cls._of(scheduled.cost.estimate, None, None, scheduled.roofline, scheduled.floor, "", ())
        return replace(estimate, schedule_cost=scheduled.cost)

    @classmethod
    def _of(
        cls,
        total: ir_estimate.Estimate,
        program: RProgram | None,
        plan: Plan | None,
        roofline: tuple[RooflineBound, ...],
        floor: ProgramFloor | None,
        above_floor: str,
        notes: tuple[str, ...],
    ) -> Estimate:
        return cls(
            total.seconds,
            tuple(Stage(stage.name, stage.seconds) for stage in total.stages),
            total.bound,
            total.occupancy,
            total.waves,
            total.uncertainty,
            program,
            plan,
            roofline,
            floor,
            above_floor,
            notes,
            total.once_s,
        )

    def __repr__(self) -> str:
        by = "a schedule by hand" if self.program is None else self.program.tile_text
        return f"<roller_svc.Estimate {self.seconds:.4g} s, bound by {self.bound}: {by}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the seconds, and the terms of which they are made."""
        headline = f"{format_seconds(self.seconds)}, bound by {self.bound}, {self.waves} waves, true within ×{self.uncertainty:.2f}"
        return make_card("Estimate", headline, [*describe_tiles(self.plan), *self.notes], draw_plan(self.plan))

    @property
    def floor_share(self) -> float | None:
        """Return the floor as a share of the estimated time; None for a compiled kernel."""
        return None if self.floor is None else self.floor.seconds / self.seconds


@dataclass(frozen=True, slots=True, repr=False)
class Candidate:
    """A plan that was considered for a kernel."""

    program: RProgram  # of the plan's slowest kernel
    estimate: Estimate
    measurement: Measurement | None  # None if it was not timed
    error: BuildError | None  # None if it compiled

    def __repr__(self) -> str:
        if self.error is not None:
            return f"<roller_svc.Candidate {self.error.code}: {self.program.tile_text}>"
        seconds, how = (self.estimate.seconds, "estimated") if self.measurement is None else (self.measurement.median_s, "measured")
        return f"<roller_svc.Candidate {seconds:.4g} s {how}: {self.program.tile_text}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: measured and estimated seconds, or the error."""
        estimated = f"estimated {format_seconds(self.estimate.seconds)}, bound by {self.estimate.bound}"
        measured = "" if self.measurement is None else f"measured {format_seconds(self.measurement.median_s)}, "
        headline = f"{self.error.code}: {self.error.message}" if self.error is not None else measured + estimated
        return make_card("Candidate", headline, describe_tiles(self.estimate.plan), draw_plan(self.estimate.plan))

    @classmethod
    def from_result(cls, result: CandidateResult) -> Candidate:
        return cls(result.plan.dominant_choice.program, Estimate.from_plan(result.plan), result.measurement, result.error)


class Runner(Protocol):
    """A kernel loaded on its device."""

    @property
    def source(self) -> KernelSource: ...

    def run(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> dict[str, Any]: ...

    def bind(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> Call: ...


class Kernel:
    """A compiled kernel, which can be called, inspected and saved."""

    def __init__(
        self,
        parts: saved.KernelBundle,
        plan: Plan | None,
        results: tuple[CandidateResult, ...],
        runtime: RuntimeChoice = RuntimeChoice.AUTO,
    ) -> None:
        self.parts = parts
        self.runtime = runtime
        self._state = parts, plan, results, runtime  # to copy and pickle it: the loaded kernel stays in its process
        self._runner: Runner | None = None
        self._lock = ForkLock()
        self.digest = parts.digest
        self.name = parts.compiled.source.name
        self.target = parts.target
        self.expression = parts.expression
        self.source = parts.compiled.source.text
        self.binary = parts.compiled.binary
        self.language = parts.compiled.source.language.value
        self.inputs, self.outputs = (
            tuple(TensorInfo(b.name, b.dtype.value, b.shape) for b in parts.compiled.source.buffers_of(role))
            for role in (Role.INPUT, Role.OUTPUT)
        )
        self.launches: tuple[LaunchSpec, ...] = parts.compiled.source.launches
        self.resources: tuple[Resources, ...] = parts.compiled.resources
        self.estimate = None if plan is None else Estimate.from_plan(plan)
        self.program = None if plan is None else plan.dominant_choice.program
        self.candidates = tuple(Candidate.from_result(attempt) for attempt in results)
        report = parts.extra.get("report")
        self.report: dict[str, Any] = report if isinstance(report, dict) else {}

    @classmethod
    def from_report(cls, report: BuildReport) -> Kernel:
        return cls(package_kernel(report), report.winner.plan, report.results, report.request.runtime)

    def __call__(self, /, *unnamed: Never, out: Mapping[str, object] | None = None, **arrays: object) -> dict[str, Any]:
        """Run the kernel and return the outputs by name; write them to arrays in `out` if given."""
        if unnamed:
            words = ", ".join(f"{info.name}=..." for info in self.inputs)
            raise ArgumentError(f"arrays must be keyword arguments: kernel({words})", code="unknown-argument")
        if out is not None:
            _check_mapping("out", out)
        return _run(self._runner or self.runner(), arrays, out)

    def run(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> dict[str, Any]:
        """Run the kernel on arrays by name, including names that are not Python identifiers."""
        return _run(self.runner(), *_checked_mappings(arrays, out))

    def bind(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> Call:
        """Check arrays once, and return a function that runs the kernel on what they have at each call.

        Its `results()` returns the outputs by name. Inputs that the kernel cannot use as they are have been copied.
        """
        return _bind(self.runner(), *_checked_mappings(arrays, out))

    def prepare(self, /, *unnamed: Never, **constants: object) -> Prepared:
        """Bind the inputs declared as `constants` and compute what depends only on them, such as packed weights.

        The arrays must not change while the result is in use. Only CPU kernels are prepacked; elsewhere the constants
        are only stored.
        """
        if unnamed:
            raise ArgumentError("arrays must be keyword arguments: kernel.prepare(W=w)", code="unknown-argument")
        runner = self.runner()
        if isinstance(runner, CpuModule):
            return Prepared(runner.prepare(share_arrays("argument", constants)))
        names = self.parts.compiled.source.constants
        check_names("argument", list(names), constants, complete=True)
        return Prepared(_UnpreparedKernel(runner, dict(constants)))

    def runner(self) -> Runner:
        """Return the kernel loaded on its device or in the emulator; load it on first use."""
        with self._lock:
            if self._runner is None:
                self._runner = load_runner(self.parts.compiled, self.runtime)
            return self._runner

    def ptx(self) -> str:
        """Return the PTX of a CUDA kernel, compiled from its source."""
        return toolchain.ptx(self._cuda("PTX").source)

    def sass(self) -> str:
        """Return the SASS of a CUDA kernel. Needs nvdisasm, which the extra `[cuda]` installs."""
        return toolchain.sass_text(self._cuda("SASS").binary)

    def _cuda(self, artifact: str) -> CompiledKernel:
        compiled = self.parts.compiled
        if compiled.source.language is not Language.CUDA or not compiled.binary:
            raise ArgumentError(f"only a compiled CUDA kernel has {artifact}", code="unknown-artifact")
        return compiled

    def save(self, folder: str | os.PathLike[str], launcher: str | Sequence[str] = ()) -> Path:
        """Write source, binary and metadata.json, which suffice to launch the kernel without this project.

        Args:
            folder: the directory, which need not exist.
            launcher: also write files that do so, for callers that have some of ctypes, cupy, torch and cpp.
        """
        return saved.save(self.parts, folder, [launcher] if isinstance(launcher, str) else launcher)

    def time(self, /, **arrays: object) -> Measurement:
        """Measure the time of a call on these arrays, without the binding of arrays: median and minimum of samples."""
        return measure(self.runner().bind(share_arrays("argument", arrays)))

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the program, its device, the time and its terms, inputs and outputs."""
        tensors = [f"{each.name}: {each.dtype}{list(each.shape)}" for each in (*self.inputs, *self.outputs)]
        lines, drawing, headline = [", ".join(tensors), f"digest {self.digest}"], "", f"for {self.target}"
        if self.estimate is not None:
            headline += f": estimated {format_seconds(self.estimate.seconds)}, bound by {self.estimate.bound}"
            lines = [*describe_tiles(self.estimate.plan), *lines]
            drawing = draw_plan(self.estimate.plan)
        return make_card(self.expression, headline, lines, drawing)

    def __reduce__(self) -> tuple[type[Kernel], tuple[Any, ...]]:
        return Kernel, self._state

    def __repr__(self) -> str:
        return f"<roller_svc.Kernel {self.digest[:19]} for {self.target}: {self.expression.splitlines()[0][:60]}>"


class Prepared:
    """A kernel with bound constants: call it with the other arrays."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def __call__(self, /, *unnamed: Never, out: Mapping[str, object] | None = None, **arrays: object) -> dict[str, Any]:
        """Run the kernel and return the outputs by name; write them to arrays in `out` if given."""
        if unnamed:
            raise ArgumentError("arrays must be keyword arguments: prepared(A=a)", code="unknown-argument")
        if out is not None:
            _check_mapping("out", out)
        return _run(self._runner, arrays, out)

    def run(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> dict[str, Any]:
        """Run the kernel on arrays by name, including names that are not Python identifiers."""
        return _run(self._runner, *_checked_mappings(arrays, out))


@dataclass(frozen=True, slots=True)
class _UnpreparedKernel:
    """A kernel with constants on a device without prepacking: passes the constants in every call."""

    runner: Runner
    constants: Mapping[str, object]

    @property
    def source(self) -> KernelSource:
        return self.runner.source

    def run(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> dict[str, Any]:
        return _run(self.runner, self._with_constants(arrays), out)

    def bind(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> Call:
        return self.runner.bind(self._with_constants(arrays), out)

    def _with_constants(self, arrays: Mapping[str, object]) -> dict[str, object]:
        if duplicates := sorted(self.constants.keys() & arrays.keys()):
            raise ArgumentError(f"constant {duplicates[0]!r} is already bound", code="unknown-argument")
        return {**arrays, **self.constants}


MAX_CACHED_KERNELS = 128
_RESERVED = ("expression", "inputs", "target", "outputs", "hardware", "cache")  # names of compile's parameters
_cached: OrderedDict[BuildRequest, tuple[Kernel, HardwareSpec]] = OrderedDict()  # in this process, by use
_cached_lock = ForkLock()


@shows_options(KernelOptions)
def compile(
    expression: str,
    inputs: Inputs | None = None,
    *,
    target: str = "local",
    outputs: Sequence[str] | None = None,
    hardware: HardwareSpec | str | None = None,
    cache: bool = True,
    **arrays_and_options: Any,
) -> Kernel:
    """Compile an expression to the fastest kernel that is found, or return the kernel of an equal call.

    Args:
        expression: the program.
        inputs: dtype and shape of each input, or an array of any library that has them. They may also be given by
            name, as in compile("y[i] = exp(x[i])", x=array), unless the name is that of an option.
        target: id of the device; "local" is the host CPU.
        outputs: names of the outputs; default: tensors that are never read.
        hardware: a spec, or its YAML text, instead of `target`.
        cache: whether a kernel of this process or of the cache folder may be returned. One of the folder has no
            candidates.
        arrays_and_options: inputs, and the fields of KernelOptions.
    """
    given = {"inputs": inputs, "target": target, "outputs": outputs, "hardware": hardware, **arrays_and_options}
    request = _read_request(expression, given, "compile")
    if request not in _cached:
        parse(request.expression, dict(request.inputs), request.outputs)  # refuses a program before the compiler is loaded
    if request.hardware is None:
        calibrate_at_first_use((request.target,), log.warning)
    kernel = _find_or_build(request) if cache else build(request)
    remarks = kernel.report.get("remarks", ())
    _warn([note for note in kernel.report.get("notes", ()) if note not in remarks])
    return kernel


def build(request: BuildRequest) -> Kernel:
    """Build a kernel: by its schedule if the request has one, else by construction."""
    if request.schedule is not None:
        return Kernel(build_scheduled(request), None, (), request.runtime)
    return Kernel.from_report(build_kernel(request))


def _join_inputs(inputs: Inputs | None, arrays: Mapping[str, object]) -> object:
    if not arrays or not isinstance(inputs, Mapping | None):
        return {} if inputs is None else inputs
    if twice := [name for name in arrays if name in (inputs or ())]:
        raise ArgumentError(f"input {twice[0]!r} is given twice", code="invalid-inputs")
    return {**(inputs or {}), **arrays}


def _find_or_build(request: BuildRequest) -> Kernel:
    """Return the kernel of an equal request: of this process, else of the cache folder, else a new one."""
    with _cached_lock:
        cached = _cached.get(request)
        if cached is not None and cached[1] == resolve_spec(request):  # `local` is another spec after a calibration
            _cached.move_to_end(request)
            return cached[0]
    spec = resolve_spec(request)
    folder = KernelCache(settings.settings().cache_folder) if settings.settings().cache_kernels else None
    bundle = None if folder is None else folder.load_single(request)
    if bundle is not None:
        kernel = Kernel(bundle, load_plan(bundle), (), request.runtime)
    else:
        kernel = build(request)
        if folder is not None:
            folder.save_single(request, kernel.parts)
    with _cached_lock:
        _cached[request] = kernel, spec
        if len(_cached) > MAX_CACHED_KERNELS:
            _cached.popitem(last=False)
    return kernel


@shows_options(EstimateOptions)
def estimate(
    expression: str,
    inputs: Inputs | None = None,
    targets: str | HardwareSpec | Sequence[str | HardwareSpec] = "nvidia-h200-sxm",
    outputs: Sequence[str] | None = None,
    top_k: int = 1,
    **options: Unpack[EstimateArguments],
) -> dict[str, list[Estimate]]:
    """Return the estimates of the best plans for each target, best first.

    Uses no compiler and no device, except to measure the host CPU at the first use of "local".
    """
    reject_unknown(EstimateOptions, options, "estimate", ("inputs", "targets", "outputs", "top_k"))
    count = read_top_k(top_k)
    targets = [targets] if isinstance(targets, str | HardwareSpec) else targets
    if not isinstance(targets, Sequence) or not targets:
        raise ArgumentError(f"targets must be a list of device ids, got {targets!r}", code="invalid-option")
    item = Item(expression, inputs, outputs, options)
    targets = devices.expand_targets(targets)
    calibrate_at_first_use(targets, log.warning)
    estimates = estimate_item(item, targets, count)
    if duplicates := [a.spec.id for a in estimates for b in estimates if a.spec.id == b.spec.id and a.spec != b.spec]:
        raise ArgumentError(
            f"duplicate target {duplicates[0]!r} with different specs",
            code="invalid-option",
            hint="give each spec its own id: dataclasses.replace(spec, id=...)",
        )
    _warn([f"{each.spec.id}: {note}" for each in estimates for note in each.notes])
    return {each.spec.id: _estimates_of(each) for each in estimates}


def _estimates_of(found: TargetEstimate | ScheduledEstimate) -> list[Estimate]:
    """Return the estimates of one device as callers see them."""
    if isinstance(found, ScheduledEstimate):
        return [Estimate.from_schedule(found)]
    return [
        Estimate.from_plan(plan, found.roofline, found.floor, reason, found.notes if plan is found.plans[0] else ())
        for plan, reason in zip(found.plans, found.reasons, strict=True)
    ]


@shows_options(KernelOptions)
def explain(
    expression: str,
    inputs: Inputs | None = None,
    *,
    target: str = "local",
    outputs: Sequence[str] | None = None,
    hardware: HardwareSpec | str | None = None,
    **arrays_and_options: Any,
) -> Story:
    """Return how the kernels of a program are found and what they cost: searches for tiles, candidates, terms.

    Takes the arguments of `compile`, and builds nothing. Uses no compiler and no device, except to measure the host CPU
    at the first use of "local".
    """
    given = {"inputs": inputs, "target": target, "outputs": outputs, "hardware": hardware, **arrays_and_options}
    request = _read_request(expression, given, "explain")
    if request.hardware is None:
        calibrate_at_first_use((request.target,), log.warning)
    return explain_request(request)


def _read_request(expression: str, given: Mapping[str, Any], function: str) -> BuildRequest:
    """Return the request of a function that takes the arguments of `compile`."""
    arrays, options = split_arguments({**given, "inputs": None}, _RESERVED)
    options = {name: value for name, value in options.items() if name not in _RESERVED}
    reject_unknown(KernelOptions, options, function, _RESERVED)
    fixed = {name: given[name] for name in ("target", "outputs", "hardware")}
    return build_request(expression, _join_inputs(given["inputs"], arrays), **fixed, **options)


def _warn(notes: Sequence[str]) -> None:
    """Warn of notes at the caller of the function that calls this."""
    for note in notes:
        warnings.warn(note, RollerWarning, stacklevel=3)


def targets() -> tuple[HardwareSpec, ...]:
    """Return the specs of all known devices, including the host CPU."""
    return devices.all_specs()


def reference(expression: str, inputs: Inputs, arrays: Mapping[str, Any], outputs: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the program by the reference interpreter, which is slow and defines the correct result."""
    _check_mapping("arrays", arrays)
    types = tensor_types(inputs)
    program = parse(validate_expression(expression), dict(types), validate_outputs(outputs))
    buffers = [Buffer(name, name, Role.INPUT, kind.dtype, kind.shape) for name, kind in types]

    def run(plain: Mapping[str, object], _: Mapping[str, object] | None) -> dict[str, Any]:
        return dict(interpret(program, bind(buffers, plain, None, NumpyArrays()).memory))

    return run_with_tensors(run, arrays, None)


def load(folder: str | os.PathLike[str]) -> Kernel:
    """Load a saved kernel, without a compiler.

    Loading runs no code. Calling the kernel runs the machine code in its directory with the rights of this process, so
    load only kernels from trusted sources.
    """
    parts = saved.load(folder)
    return Kernel(parts, load_plan(parts), ())


def set_num_threads(threads: int) -> None:
    """Limit the threads of CPU kernels in this process, in place of OMP_NUM_THREADS. Applies to the next launches.

    Raises ArgumentError unless `threads` is positive.
    """
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads < 1 << 31:
        raise ArgumentError(f"the number of threads must be a positive int, got {threads!r}", code="invalid-option")
    thread_pool.set_num_threads(threads)


def get_num_threads() -> int:
    """Return the most threads that a CPU kernel called by this thread runs on."""
    return thread_pool.get_num_threads(settings.openmp_threads())


def load_runner(compiled: CompiledKernel, runtime: RuntimeChoice = RuntimeChoice.AUTO) -> Runner:
    """Load a kernel's binary on its device, or its source into the emulator."""
    if runtime is RuntimeChoice.EMULATOR:
        return load_emulated(compiled)
    match compiled.source.language:
        case Language.C:
            return CpuModule(compiled)
        case Language.CUDA:
            return CudaModule(compiled)
        case Language.HIP:
            return reject_load(compiled)


_CPU_RUNNERS = (CpuModule, PreparedCpu)


def _run(runner: Runner, arrays: Mapping[str, object], out: Mapping[str, object] | None) -> dict[str, Any]:
    """Run on arrays. Runners of CPUs take torch's tensors as arrays of numpy, that of GPUs takes them as they are."""
    if isinstance(runner, _CPU_RUNNERS):
        results = runner.run_plain(arrays, out)  # without a look for tensors
        if results is not None:
            return results
    if getattr(runner, "takes_tensors", False):
        return runner.run(arrays, out)
    return run_with_tensors(runner.run, arrays, out, _donated(runner))


def _bind(runner: Runner, arrays: Mapping[str, object], out: Mapping[str, object] | None) -> Call:
    if getattr(runner, "takes_tensors", False):
        return runner.bind(arrays, out)
    return bind_tensors(runner.bind, arrays, out, _donated(runner))


def _donated(runner: Runner) -> list[str]:
    return [buffer.name for buffer in runner.source.updated_buffers]


def _checked_mappings(
    arrays: Mapping[str, object], out: Mapping[str, object] | None
) -> tuple[Mapping[str, object], Mapping[str, object] | None]:
    _check_mapping("arrays", arrays)
    if out is not None:
        _check_mapping("out", out)
    return arrays, out


def _check_mapping(argument: str, value: object) -> None:
    if type(value) is not dict and not isinstance(value, Mapping):
        raise ArgumentError(f"{argument} must map names to arrays, got {type(value).__qualname__}", code="not-an-array")
