"""Baselines for CPU kernels: the fastest expert translation of a program to numpy, torch or TVM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from numpy.typing import NDArray

from roller_bench.baselines.baseline import EXPECTED_ERRORS, Baseline, check, error_summary, fastest
from roller_bench.baselines.calls import Calls
from roller_bench.baselines.library import no_baseline
from roller_bench.baselines.translate.program import Style, Translation, translate
from roller_svc.errors import ArgumentError
from roller_svc.ir.program import TensorProgram
from roller_svc.semantics.interpreter import Value

DEFAULT_BASELINES = ("numpy", "torch")
BASELINES = (*DEFAULT_BASELINES, "tvm")
Finder = Callable[[TensorProgram, Mapping[str, NDArray[Any]], Mapping[str, Value]], Baseline]


@dataclass(frozen=True, slots=True)
class BaselineLibrary:
    """A baseline library."""

    versions: Mapping[str, str]
    find: Finder  # the baseline of a program that agrees with the reference; raises BuildError (no-peer)
    context: Callable[[], AbstractContextManager[object]]  # active during its calls


def library_of(name: str, threads: int) -> BaselineLibrary:
    """Load a library and set its threads. Raises ArgumentError if it is not installed."""
    if name == "tvm":
        try:
            module = import_module(f"{__name__}.tvm_library")
        except ImportError as failure:
            raise _not_installed(name, failure) from failure
        return BaselineLibrary(module.versions(), module.TvmFinder(threads), nullcontext)
    calls = calls_of(name, threads)
    return BaselineLibrary(calls.library.versions, partial(_find, calls), partial(inference, name))


def calls_of(name: str, threads: int) -> Calls:
    """Load numpy or torch and set its threads. Raises ArgumentError if it is not installed."""
    if name == "numpy":
        module = import_module(f"{__name__}.numpy_library")
        return Calls(module.NumpyLibrary(), module.row_call)
    try:
        module = import_module(f"{__name__}.torch_library")
    except ImportError as failure:
        raise _not_installed(name, failure) from failure
    return Calls(module.TorchLibrary(threads), module.row_call, module.convolve, module.pool)


def _not_installed(name: str, failure: ImportError) -> ArgumentError:
    return ArgumentError(f"{name} is not installed: {failure}", code="no-peer")


def inference(name: str) -> AbstractContextManager[object]:
    """Return the context of a library's calls: no gradients for torch."""
    if name != "torch":
        return nullcontext()
    mode: AbstractContextManager[object] = import_module("torch").inference_mode()
    return mode


def baseline_of(
    program: TensorProgram, arrays: Mapping[str, NDArray[Any]], calls: Calls, expected: Mapping[str, Value]
) -> Baseline:
    """Return the fastest translation of a program that agrees with `expected`.

    Raises BuildError (no-peer) with the reasons if there is none.
    """
    translations = matching_translations(program, arrays, calls, expected)
    return fastest([Baseline(way.trace.run, tuple(way.trace.names), way) for way in translations])


def _find(calls: Calls, program: TensorProgram, arrays: Mapping[str, NDArray[Any]], expected: Mapping[str, Value]) -> Baseline:
    """Find the baseline of a program; the Finder of numpy and torch."""
    return baseline_of(program, arrays, calls, expected)


def matching_translations(
    program: TensorProgram, arrays: Mapping[str, NDArray[Any]], calls: Calls, expected: Mapping[str, Value]
) -> list[Translation]:
    """Return the translations that agree with the reference, of the first stage that has any.

    Raises BuildError (no-peer) with the reasons if no stage has one.
    """
    reasons: dict[str, None] = {}
    for styles in _STAGES:
        translations: dict[tuple[str, ...], Translation] = {}
        for style in styles:
            try:
                way = translate(program, arrays, calls, style)
                check(way.trace.names, program, way.results(calls), expected)
            except EXPECTED_ERRORS as error:
                reasons[error_summary(error)] = None
            else:
                translations.setdefault(tuple(way.trace.names), way)
        if translations:
            return list(translations.values())
    raise no_baseline("; ".join(reasons) or "no translation")


# Styles of translation that are compared, and the fallbacks if none of them is right.
_STAGES = (
    (
        Style(), Style(windows=False), Style(vectors=True), Style(windows=False, vectors=True), Style(swapped=True),
        Style(patterns=False),
    ),
    (Style(written_out=True), Style(patterns=False, written_out=True)),
    (Style(patterns=False, trusting=False, windows=False, written_out=True),),
)  # fmt: skip
