"""A case, whose kernels → the work to time in turns with ours: the fastest of the ways that they have for it."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from roller_svc.bench.gpu.interleaved import TimedWork, screening_median
from roller_svc.bench.gpu.samples import TimedCase
from roller_svc.errors import BuildError
from roller_svc.ir.program import TensorProgram
from roller_svc.runtime.cuda.arrays import DeviceBytes

Json = dict[str, Any]
BASELINES = ("library", "torch.compile", "triton")
_MAX_REASON_CHARS = 300


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to do a case. `around`: what must be set while it is recorded."""

    name: str
    call: Callable[[], Any]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True, slots=True)
class BaselineWork:
    """`work`: None where there is none to time; then `told` says why, or is empty: nobody has it in one call."""

    row: Json
    work: TimedWork | None = None


@dataclass(slots=True)
class _TriedVariants:
    works: dict[str, TimedWork] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def baseline_work(name: str, case: TimedCase, program: TensorProgram, arrays: Mapping[str, DeviceBytes]) -> BaselineWork:
    """Of each way the seconds of a few samples, or why it does not run: `variants`. `prepare_s`: all that took."""
    if lack := missing(name):
        return BaselineWork({"name": name, "skipped": lack})
    from roller_svc.bench.gpu.baselines.torch_timing import prepare, tensors_of  # noqa: PLC0415 - needs torch

    prepare()
    began = time.monotonic()
    try:
        variants = _variants(name, case, program, tensors_of(arrays))
    except BuildError as refusal:
        return BaselineWork({"name": name, "skipped": refusal.message})
    if not variants:
        return BaselineWork({})
    tried = _try_variants(variants, program)
    variant_columns = tried.seconds | tried.errors
    seconds = time.monotonic() - began
    if not tried.works:
        return BaselineWork({"name": name, "error": "; ".join(dict.fromkeys(tried.errors.values()))[:_MAX_REASON_CHARS],
                     "variants": variant_columns, "prepare_s": seconds})  # fmt: skip
    best = min(tried.seconds, key=lambda variant: tried.seconds[variant])
    return BaselineWork({"name": best, "variants": variant_columns, "prepare_s": seconds}, tried.works[best])


def missing(name: str) -> str | None:
    """What a peer needs and is not there, in words."""
    for module in ("torch",) if name == "library" else ("torch", "triton"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
    if name != "library" and not any(shutil.which(compiler) for compiler in ("cc", "gcc", "clang")):
        return "Triton has no C compiler for its launchers"
    return None


def _variants(name: str, case: TimedCase, program: TensorProgram, tensors: Mapping[str, Any]) -> list[Variant]:
    if name == "library":
        from roller_svc.bench.gpu.baselines.torch_library import library_variants  # noqa: PLC0415 - needs torch

        return library_variants(case, program, tensors)
    if name == "triton":
        from roller_svc.bench.gpu.baselines.triton_baseline import triton_variants  # noqa: PLC0415 - needs Triton

        return triton_variants(case, program, tensors)
    from roller_svc.bench.gpu.baselines.torch_compile import compiled_variants  # noqa: PLC0415 - needs torch

    return compiled_variants(program, tensors)


def _try_variants(variants: Iterable[Variant], program: TensorProgram) -> _TriedVariants:
    """What one of them refuses leaves the others."""
    from roller_svc.bench.gpu.baselines.torch_timing import TorchWork  # noqa: PLC0415 - needs torch

    expected_shapes = [list(program.types[out.tensor].shape) for out in program.outputs]
    tried = _TriedVariants()
    for variant in variants:
        try:
            with variant.context():
                result = variant.call()
                shapes = [list(part.shape) for part in (result if isinstance(result, tuple) else (result,))]
                if shapes != expected_shapes:
                    tried.errors[variant.name] = f"it makes {shapes}, not {expected_shapes}"
                    continue
                work = TorchWork(variant.call)
        except _expected_errors() as refusal:
            tried.errors[variant.name] = f"{type(refusal).__name__}: {refusal}".splitlines()[0][:_MAX_REASON_CHARS]
            continue
        tried.works[variant.name], tried.seconds[variant.name] = work, screening_median(work)
    return tried


def _expected_errors() -> tuple[type[Exception], ...]:
    """What torch, its compiler and Triton raise for what they do not take."""
    if importlib.util.find_spec("triton") is None:
        return (RuntimeError,)
    from triton.errors import TritonError  # noqa: PLC0415 - optional

    return (RuntimeError, TritonError)
