"""A case, whose kernels → the work to time in turns with ours: the fastest of the ways that they have for it."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from roller_svc.bench.gpu.interleaved import Work, screened
from roller_svc.bench.gpu.samples import TimedCase
from roller_svc.errors import BuildError
from roller_svc.ir.program import TensorProgram
from roller_svc.runtime.cuda.arrays import DeviceBytes

Json = dict[str, Any]
PEERS = ("library", "torch.compile", "triton")
_MOST_REASON = 300


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to do a case. `around`: what must be set while it is recorded."""

    name: str
    call: Callable[[], Any]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True, slots=True)
class Peer:
    """`work`: None where there is none to time; then `told` says why, or is empty: nobody has it in one call."""

    told: Json
    work: Work | None = None


@dataclass(slots=True)
class _Tried:
    works: dict[str, Work] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)


def peer_works(name: str, case: TimedCase, program: TensorProgram, arrays: Mapping[str, DeviceBytes]) -> Peer:
    """Of each way the seconds of a few samples, or why it does not run: `variants`. `prepare_s`: all that took."""
    if lack := missing(name):
        return Peer({"name": name, "skipped": lack})
    from roller_svc.bench.gpu.baselines.torch_timing import prepare, tensors_of  # noqa: PLC0415 - needs torch

    prepare()
    began = time.monotonic()
    try:
        variants = _variants(name, case, program, tensors_of(arrays))
    except BuildError as refusal:
        return Peer({"name": name, "skipped": refusal.message})
    if not variants:
        return Peer({})
    tried = _tried(variants, program)
    variants_told = tried.seconds | tried.refusals
    seconds = time.monotonic() - began
    if not tried.works:
        return Peer({"name": name, "error": "; ".join(dict.fromkeys(tried.refusals.values()))[:_MOST_REASON],
                     "variants": variants_told, "prepare_s": seconds})  # fmt: skip
    best = min(tried.seconds, key=lambda one: tried.seconds[one])
    return Peer({"name": best, "variants": variants_told, "prepare_s": seconds}, tried.works[best])


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


def _tried(variants: Iterable[Variant], program: TensorProgram) -> _Tried:
    """What one of them refuses leaves the others."""
    from roller_svc.bench.gpu.baselines.torch_timing import TorchWork  # noqa: PLC0415 - needs torch

    wanted = [list(program.types[out.tensor].shape) for out in program.outputs]
    tried = _Tried()
    for one in variants:
        try:
            with one.around():
                made = one.call()
                shapes = [list(part.shape) for part in (made if isinstance(made, tuple) else (made,))]
                if shapes != wanted:
                    tried.refusals[one.name] = f"it makes {shapes}, not {wanted}"
                    continue
                work = TorchWork(one.call)
        except _refusals() as refusal:
            tried.refusals[one.name] = f"{type(refusal).__name__}: {refusal}".splitlines()[0][:_MOST_REASON]
            continue
        tried.works[one.name], tried.seconds[one.name] = work, screened(work)
    return tried


def _refusals() -> tuple[type[Exception], ...]:
    """What torch, its compiler and Triton raise for what they do not take."""
    if importlib.util.find_spec("triton") is None:
        return (RuntimeError,)
    from triton.errors import TritonError  # noqa: PLC0415 - optional

    return (RuntimeError, TritonError)
