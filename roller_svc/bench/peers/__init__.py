"""The calls that an expert would write in numpy or torch for a program, and the fastest of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from numpy.typing import NDArray

from roller_svc.bench.peers.calls import Calls
from roller_svc.bench.peers.library import no_peer
from roller_svc.bench.peers.translate import Style, Translation, translate
from roller_svc.errors import ArgumentError, BuildError, WrongAnswerError
from roller_svc.ir.program import TensorProgram
from roller_svc.lang.compare import agrees
from roller_svc.lang.interpreter import Value

PEERS = ("numpy", "torch")
_TRIALS = 3
_REASON = 200  # characters of a refusal that are worth keeping
_TRIAL_S = 0.5  # a way so slow is tried once


@dataclass(frozen=True, slots=True)
class Peer:
    """The fastest way that gives the reference's values. `calls` names what is called."""

    run: Callable[[], None]
    calls: tuple[str, ...]
    translation: Translation


def calls_of(name: str, threads: int) -> Calls:
    """The library by its name, set to that many threads. ArgumentError where it is not installed."""
    if name == "numpy":
        library, rows = (import_module(f"{__name__}.numpy_{part}") for part in ("library", "rows"))
        return Calls(library.NumpyLibrary(), rows.row_call)
    try:
        library, rows, windows = (import_module(f"{__name__}.torch_{part}") for part in ("library", "rows", "windows"))
    except ImportError as failure:
        raise ArgumentError(f"{name} is not installed: {failure}", code="no-peer") from failure
    return Calls(library.TorchLibrary(threads), rows.row_call, windows.convolve, windows.pool)


def inference(name: str) -> AbstractContextManager[object]:
    """What a peer's calls are made under: no gradients for torch."""
    if name != "torch":
        return nullcontext()
    mode: AbstractContextManager[object] = import_module("torch").inference_mode()
    return mode


def peer_of(
    program: TensorProgram, arrays: Mapping[str, NDArray[Any]], calls: Calls, want: Mapping[str, Value]
) -> Peer:
    """The fastest of the ways to write the program that agree with the reference on `want`; BuildError no-peer, with
    the reasons, where there is none."""
    timed = [(_tried(way), number, way) for number, way in enumerate(ways(program, arrays, calls, want))]
    _, _, best = min(timed)
    return Peer(best.trace.run, tuple(best.trace.names), best)


def ways(
    program: TensorProgram, arrays: Mapping[str, NDArray[Any]], calls: Calls, want: Mapping[str, Value]
) -> list[Translation]:
    """The ways to write the program that agree with the reference, of the first stage that has any; BuildError no-peer
    with the reasons where none has."""
    reasons: dict[str, None] = {}
    for styles in _STAGES:
        found: dict[tuple[str, ...], Translation] = {}
        for style in styles:
            try:
                way = _checked(translate(program, arrays, calls, style), program, calls, want)
            except _REFUSALS as refusal:
                reasons[f"{type(refusal).__name__}: {refusal}".splitlines()[0][:_REASON]] = None
            else:
                found.setdefault(tuple(way.trace.names), way)
        if found:
            return list(found.values())
    raise no_peer("; ".join(reasons) or "no way to write it")


# The ways to write a program that are compared, and what is tried where none of them is right.
_STAGES = (
    (
        Style(), Style(windows=False), Style(vectors=True), Style(windows=False, vectors=True), Style(swapped=True),
        Style(patterns=False),
    ),
    (Style(written_out=True), Style(patterns=False, written_out=True)),
    (Style(patterns=False, trusting=False, windows=False, written_out=True),),
)  # fmt: skip


# What no_peer makes, and what numpy and torch raise for arguments that they do not take.
_REFUSALS = (BuildError, RuntimeError, ValueError, TypeError, IndexError)


def _checked(way: Translation, program: TensorProgram, calls: Calls, want: Mapping[str, Value]) -> Translation:
    """The same; WrongAnswerError where its results are not the reference's."""
    verdict = agrees(program, way.results(calls), want)
    if not verdict.ok:
        raise WrongAnswerError(f"{', '.join(way.trace.names)}: {verdict.detail}")
    return way


def _tried(found: Translation) -> float:
    """The least time of a few calls."""
    least = float("inf")
    for _ in range(_TRIALS):
        start = time.perf_counter()
        found.trace.run()
        least = min(least, time.perf_counter() - start)
        if least > _TRIAL_S:
            break
    return least
