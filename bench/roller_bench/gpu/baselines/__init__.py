"""Select the fastest variant of a baseline for a case, to be timed interleaved with our kernel."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from roller_bench.gpu.interleaved import TimedWork, screening_median
from roller_bench.gpu.samples import TimedCase
from roller_svc.errors import BuildError
from roller_svc.ir.program import TensorProgram
from roller_svc.runtime.cuda.arrays import DeviceBytes

Json = dict[str, Any]
BASELINES = ("library", "torch.compile", "triton")
_MAX_REASON_CHARS = 300


@dataclass(frozen=True, slots=True)
class Variant:
    """One implementation of a case."""

    name: str
    call: Callable[[], Any]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext  # active while the call is recorded


@dataclass(frozen=True, slots=True)
class BaselineWork:
    """The selected variant of a baseline."""

    row: Json  # empty if the baseline does not implement the case
    work: TimedWork | None = None  # None if there is nothing to time; then `row` has the reason


@dataclass(slots=True)
class _TriedVariants:
    works: dict[str, TimedWork] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def baseline_work(name: str, case: TimedCase, program: TensorProgram, arrays: Mapping[str, DeviceBytes]) -> BaselineWork:
    """Try all variants of a baseline.

    The row has `variants`, the seconds or the error of each, and `prepare_s`, the time of compiling and trying them.
    """
    if lack := missing(name):
        return BaselineWork({"name": name, "skipped": lack})
    from roller_bench.gpu.baselines.torch_timing import prepare, tensors_of

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
        return BaselineWork(
            {
                "name": name,
                "error": "; ".join(dict.fromkeys(tried.errors.values()))[:_MAX_REASON_CHARS],
                "variants": variant_columns,
                "prepare_s": seconds,
            }
        )
    best = min(tried.seconds, key=lambda variant: tried.seconds[variant])
    return BaselineWork({"name": best, "variants": variant_columns, "prepare_s": seconds}, tried.works[best])


def missing(name: str) -> str | None:
    """Return why a baseline cannot run here, or None."""
    for module in ("torch",) if name == "library" else ("torch", "triton"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
    if name != "library" and not any(shutil.which(compiler) for compiler in ("cc", "gcc", "clang")):
        return "Triton has no C compiler for its launchers"
    return None


def _variants(name: str, case: TimedCase, program: TensorProgram, tensors: Mapping[str, Any]) -> list[Variant]:
    if name == "library":
        from roller_bench.gpu.baselines.torch_library import library_variants

        return library_variants(case, program, tensors)
    if name == "triton":
        from roller_bench.gpu.baselines.triton_baseline import triton_variants

        return triton_variants(case, program, tensors)
    from roller_bench.gpu.baselines.torch_compile import compiled_variants

    return compiled_variants(program, tensors)


def _try_variants(variants: Iterable[Variant], program: TensorProgram) -> _TriedVariants:
    """Time a few samples of each variant and record the errors of those that fail."""
    from roller_bench.gpu.baselines.torch_timing import TorchWork

    expected_shapes = [list(program.types[out.tensor].shape) for out in program.outputs]
    tried = _TriedVariants()
    for variant in variants:
        try:
            with variant.context():
                result = variant.call()
                shapes = [list(part.shape) for part in (result if isinstance(result, tuple) else (result,))]
                if shapes != expected_shapes:
                    tried.errors[variant.name] = f"wrong shapes: expected {expected_shapes}, got {shapes}"
                    continue
                work = TorchWork(variant.call)
        except _expected_errors() as refusal:
            tried.errors[variant.name] = f"{type(refusal).__name__}: {refusal}".splitlines()[0][:_MAX_REASON_CHARS]
            continue
        tried.works[variant.name], tried.seconds[variant.name] = work, screening_median(work)
    return tried


def _expected_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that torch, its compiler and Triton raise for unsupported programs."""
    if importlib.util.find_spec("triton") is None:
        return (RuntimeError,)
    from triton.errors import TritonError

    return (RuntimeError, TritonError)
