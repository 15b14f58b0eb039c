"""The Python API: compile, estimate, targets, reference, load, and the kernel one gets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Never, Protocol

from roller_svc import hardware as devices
from roller_svc import toolchain
from roller_svc.compiler.artifact import load_plan, package_kernel
from roller_svc.compiler.backends import load_emulated, reject_load
from roller_svc.compiler.estimates.batch import Item, estimate_item
from roller_svc.compiler.pipeline import build_kernel
from roller_svc.compiler.request import build_request, validate_expression, validate_outputs, validate_top_k
from roller_svc.errors import ArgumentError, BuildError
from roller_svc.frontend.lang.input_types import tensor_types
from roller_svc.frontend.parse import parse
from roller_svc.ir import estimate as ir_estimate
from roller_svc.ir.estimate import Roof
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import Buffer, CompiledKernel, Language, LaunchSpec, Measurement, Resources, Role
from roller_svc.ir.report import BuildReport, CandidateResult, Plan, RuntimeChoice
from roller_svc.ir.rprogram import RProgram
from roller_svc.reference.interpreter import reference as interpret
from roller_svc.runtime.binding import bind, check_names
from roller_svc.runtime.cpu import CpuModule
from roller_svc.runtime.cuda.module import CudaModule
from roller_svc.runtime.saved import serialization as saved

Inputs = Mapping[str, tuple[str, Sequence[int]]]


class Stage(NamedTuple):
    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the model says of a plan. `program` is the rProgram of its longest kernel; `plan` has them all. `roofline`:
    what no plan of the program on that device goes below; a kernel's own estimate has none."""

    seconds: float
    stages: tuple[Stage, ...]
    bound: str
    occupancy: float
    waves: int
    uncertainty: float
    program: RProgram
    plan: Plan
    roofline: tuple[Roof, ...] = ()

    @classmethod
    def from_plan(cls, plan: Plan, roofline: tuple[Roof, ...] = ()) -> Estimate:
        total: ir_estimate.Estimate = plan.estimate
        stages = tuple(Stage(stage.name, stage.seconds) for stage in total.stages)
        return cls(
            total.seconds, stages, total.bound, total.occupancy, total.waves, total.uncertainty, plan.dominant_choice.program,
            plan, roofline,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of the plans that were tried; `measurement` is None where it was not timed, `error` where it built."""

    program: RProgram
    estimate: Estimate
    measurement: Measurement | None
    error: BuildError | None

    @classmethod
    def from_result(cls, result: CandidateResult) -> Candidate:
        return cls(
            result.plan.dominant_choice.program, Estimate.from_plan(result.plan), result.measurement, result.error
        )


class Call(Protocol):
    """A kernel bound to arrays: calling it runs all launches, `finish` gives the results."""

    def __call__(self) -> None: ...

    def finish(self) -> dict[str, Any]: ...


class Runner(Protocol):
    """A kernel on its device."""

    def run(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> dict[str, Any]: ...

    def bind(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> Call: ...


class Kernel:
    """A compiled kernel: call it with arrays, look at how it was made, save it."""

    def __init__(
        self,
        parts: saved.SavedKernel,
        plan: Plan | None,
        results: tuple[CandidateResult, ...],
        runtime: RuntimeChoice = RuntimeChoice.AUTO,
    ) -> None:
        self.parts = parts
        self.runtime = runtime
        self._runner: Runner | None = None
        self._lock = Lock()
        self.digest = parts.digest
        self.target = parts.target
        self.expression = parts.expression
        self.source = parts.compiled.source.text
        self.binary = parts.compiled.binary
        self.language = parts.compiled.source.language.value
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
        """The outputs by name. `out` gives arrays to write them to."""
        if unnamed:
            raise ArgumentError("arrays are given by name: kernel(A=a, B=b)", code="unknown-argument")
        return self.run(arrays, out)

    def run(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> dict[str, Any]:
        """The same call for names that are no Python argument."""
        return self.runner().run(*_checked_mappings(arrays, out))

    def prepare(self, /, *unnamed: Never, **constants: object) -> Prepared:
        """The kernel with the inputs that were named `constants` when it was compiled: what it makes of them alone,
        packed weights for instance, is made now and not again in every call.

        The arrays must stay as they are for as long as the result is in use. On CPUs; elsewhere constants are only
        kept.
        """
        if unnamed:
            raise ArgumentError("arrays are given by name: kernel.prepare(W=w)", code="unknown-argument")
        runner = self.runner()
        if isinstance(runner, CpuModule):
            return Prepared(runner.prepare(constants))
        names = self.parts.compiled.source.constants
        check_names("argument", list(names), constants, complete=True)
        return Prepared(_UnpreparedKernel(runner, dict(constants)))

    def runner(self) -> Runner:
        """The kernel loaded on its device, or in the emulator, at first use."""
        with self._lock:
            if self._runner is None:
                self._runner = load_runner(self.parts.compiled, self.runtime)
            return self._runner

    def ptx(self) -> str:
        """The PTX of a CUDA kernel, made anew from its text."""
        return toolchain.ptx(self._cuda("PTX").source)

    def sass(self) -> str:
        """The machine code of a CUDA kernel in words; takes nvdisasm, which `[cuda]` brings."""
        return toolchain.sass_text(self._cuda("SASS").binary)

    def _cuda(self, what: str) -> CompiledKernel:
        compiled = self.parts.compiled
        if compiled.source.language is not Language.CUDA or not compiled.binary:
            raise ArgumentError(f"only a compiled CUDA kernel has {what}", code="unknown-artifact")
        return compiled

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write text, binary and metadata.json: enough to launch the kernel without this project."""
        return saved.save(self.parts, folder)

    def __repr__(self) -> str:
        return f"<roller_svc.Kernel {self.digest[:19]} for {self.target}: {self.expression.splitlines()[0][:60]}>"


class Prepared:
    """A kernel that has its constants: call it with the other arrays."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def __call__(self, /, *unnamed: Never, out: Mapping[str, object] | None = None, **arrays: object) -> dict[str, Any]:
        """The outputs by name. `out` gives arrays to write them to."""
        if unnamed:
            raise ArgumentError("arrays are given by name: prepared(A=a)", code="unknown-argument")
        return self.run(arrays, out)

    def run(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> dict[str, Any]:
        """The same call for names that are no Python argument."""
        return self._runner.run(*_checked_mappings(arrays, out))


@dataclass(frozen=True, slots=True)
class _UnpreparedKernel:
    """A kernel on a device where nothing is prepared: its constants are given again in every call."""

    runner: Runner
    constants: Mapping[str, object]

    def run(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> dict[str, Any]:
        return self.runner.run(self._with_constants(arrays), out)

    def bind(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> Call:
        return self.runner.bind(self._with_constants(arrays), out)

    def _with_constants(self, arrays: Mapping[str, object]) -> dict[str, object]:
        if twice := sorted(self.constants.keys() & arrays.keys()):
            raise ArgumentError(f"{twice[0]} is a constant, and is there already", code="unknown-argument")
        return {**arrays, **self.constants}


def compile(  # a name and options, as docs/api.md has them
    expression: str,
    inputs: Inputs | None = None,
    *,
    target: str = "local",
    outputs: Sequence[str] | None = None,
    top_k: int = 10,
    select: str = "measure",
    runtime: str = "auto",
    allow_tf32: bool = False,
    hardware: HardwareSpec | str | None = None,
    family: str | None = None,
    tiles: Mapping[str, int] | None = None,
    constants: Sequence[str] = (),
    **unknown: Never,
) -> Kernel:
    """The fastest kernel found for an expression. `hardware`, a spec or YAML text, stands in place of `target`.

    `family` ("simt", "mma", "wgmma") and `tiles` ({"split_k": 4}) narrow down what is chosen from. `constants`: inputs
    that stay the same from call to call; see Kernel.prepare.
    """
    if unknown:
        raise ArgumentError(f"compile has no option {next(iter(unknown))!r}", code="invalid-option")
    request = build_request(
        expression, inputs, target=target, outputs=outputs, top_k=top_k, select=select, runtime=runtime,
        allow_tf32=allow_tf32, hardware=hardware, family=family, tiles=tiles, constants=constants,
    )  # fmt: skip
    return Kernel.from_report(build_kernel(request))


def estimate(
    expression: str,
    inputs: Inputs | None = None,
    targets: Sequence[str | HardwareSpec] = ("nvidia-h200-sxm",),
    outputs: Sequence[str] | None = None,
    top_k: int = 1,
    *,
    allow_tf32: bool = False,
) -> dict[str, list[Estimate]]:
    """The model's best plans for every target, best first; no compiler and no device is touched."""
    count = validate_top_k(top_k)
    if isinstance(targets, str) or not isinstance(targets, Sequence) or not targets:
        raise ArgumentError(f"targets must be a list of device ids, not {targets!r}", code="invalid-option")
    item = Item(expression, inputs, outputs, allow_tf32)
    estimates = estimate_item(item, targets, count)
    if duplicates := [a.spec.id for a in estimates for b in estimates if a.spec.id == b.spec.id and a.spec != b.spec]:
        raise ArgumentError(f"two of the targets are {duplicates[0]}, which answers are named by", code="invalid-option",
                            hint="give each spec an id of its own: dataclasses.replace(spec, id=...)")  # fmt: skip
    return {each.spec.id: [Estimate.from_plan(plan, each.roofline) for plan in each.plans] for each in estimates}


def targets() -> tuple[HardwareSpec, ...]:
    """Every device there is a spec for, the CPU at hand among them."""
    return devices.all_specs()


def reference(
    expression: str, inputs: Inputs, arrays: Mapping[str, Any], outputs: Sequence[str] | None = None
) -> dict[str, Any]:
    """What the interpreter makes of the arrays: slow, and right by definition."""
    _check_mapping("arrays", arrays)
    types = tensor_types(inputs)
    program = parse(validate_expression(expression), dict(types), validate_outputs(outputs))
    buffers = [Buffer(name, name, Role.INPUT, kind.dtype, kind.shape) for name, kind in types]
    return dict(interpret(program, bind(buffers, arrays).memory))


def load(folder: str | os.PathLike[str]) -> Kernel:
    """A kernel that was saved; needs no compiler.

    Loading runs nothing. Calling the kernel runs the machine code in its folder as this process: for another's folder
    that is as running another's program.
    """
    parts = saved.load(folder)
    return Kernel(parts, load_plan(parts), ())


def load_runner(compiled: CompiledKernel, runtime: RuntimeChoice = RuntimeChoice.AUTO) -> Runner:
    """The kernel's runtime with the binary in it; the emulator takes the text."""
    if runtime is RuntimeChoice.EMULATOR:
        return load_emulated(compiled)
    match compiled.source.language:
        case Language.C:
            return CpuModule(compiled)
        case Language.CUDA:
            return CudaModule(compiled)
        case Language.HIP:
            return reject_load(compiled)


def _checked_mappings(
    arrays: Mapping[str, object], out: Mapping[str, object] | None
) -> tuple[Mapping[str, object], Mapping[str, object] | None]:
    _check_mapping("arrays", arrays)
    if out is not None:
        _check_mapping("out", out)
    return arrays, out


def _check_mapping(argument: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise ArgumentError(f"{argument} must map names to arrays, not {type(value).__qualname__}", code="not-an-array")
