"""roller model run --step: a model one node after the other."""

from __future__ import annotations

import argparse
import json
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from roller_svc.cli import format as show
from roller_svc.cli import options as common
from roller_svc.errors import ArgumentError, WrongAnswerError
from roller_svc.model import Model
from roller_svc.modes.events import Event

VALUES, STEPS = "values.npz", "steps.json"  # what --dump writes
# What numpy and zipfile raise for damaged files.
UNREADABLE = (
    OSError, ValueError, EOFError, KeyError, TypeError, OverflowError, MemoryError, RuntimeError, SyntaxError,
    TokenError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
_FLAGS = {"fused": "--fused", "break_at": "--break", "dump": "--dump", "bisect": "--bisect", "stop_at_nan": "--stop-at-nan"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step", action="store_true", help="run one operator after the other, and show each")
    parser.add_argument("--fused", action="store_true", help="with --step: the fused nodes that the model runs")
    parser.add_argument("--break", dest="break_at", metavar="NODE", help="with --step: stop after a node, and show its arrays")
    parser.add_argument("--dump", metavar="DIR", help=f"with --step: write all tensors to DIR/{VALUES}, and DIR/{STEPS}")
    parser.add_argument(
        "--bisect", metavar="FILE.npz", help="with --step: name the first node whose results differ from those of the file"
    )
    parser.add_argument("--stop-at-nan", action="store_true", help="with --step: stop after the first node with a NaN in a result")


def check_options(options: argparse.Namespace, *, is_saved: bool) -> None:
    """Refuse options that need --step, and a model that has no nodes."""
    given = [flag for name, flag in _FLAGS.items() if getattr(options, name)]
    if given and not options.step:
        raise ArgumentError(f"{given[0]} needs --step", code="invalid-option")
    if options.step and (is_saved or common.server_url(options)):
        where = f"{options.file} is a saved one" if is_saved else "a service has it"
        raise ArgumentError(f"--step is for the source of a model, and {where}", code="not-steppable")


def run_steps(
    model: Model, arrays: Mapping[str, Any], states: Mapping[str, Any], options: argparse.Namespace, tolerance: float
) -> tuple[dict[str, Any], str]:
    """Run the nodes, and return what is known of each. Raises WrongAnswerError at the first that differs."""
    reference = None if options.bisect is None else read_reference(options.bisect)
    rows: list[dict[str, Any]] = []
    values: dict[str, Any] = {}
    stopped: str | None = None
    compared = 0
    with ExitStack() as end:
        if options.dump is not None:  # what there is, also where a node differs or fails
            end.callback(_dump, Path(options.dump), values, rows)
        for event in model.step(arrays, states, fused=options.fused):
            rows.append(_facts(event))
            if options.dump is not None:
                values |= {tensor: array.copy() for tensor, array in event.outputs.items()}
            if reference is not None:
                compared += _compare(event, reference, tolerance)
            if options.check:
                _compare(event, {tensor: a for member in event.members() for tensor, a in member.outputs.items()}, tolerance)
            if options.stop_at_nan and rows[-1]["nans"]:
                stopped = f"stopped after {event.node}: {rows[-1]['nans']} values are NaN"
            if options.break_at == event.node:
                stopped = f"stopped after {event.node}\n{_show_arrays(event)}"
            if stopped is not None:
                break
    if options.break_at is not None and stopped is None:
        known = ", ".join(row["node"] for row in rows[:20])
        raise ArgumentError(f"--break: no node is called {options.break_at!r}; the first are {known}", code="unknown-argument")
    if reference is not None and not compared:
        raise ArgumentError(
            f"--bisect: {options.bisect} has no array of a name of this model's tensors or nodes",
            code="unknown-argument",
            hint=f"roller model run {options.file} --step --dump DIR writes one with all names",
        )
    facts: dict[str, Any] = {"digest": model.digest, "nodes": rows, "stopped": stopped}
    table = [
        (show.format_seconds(row["seconds"]), row["operator"], row["node"][:60], _shape(row), row["nans"] or "") for row in rows
    ]
    lines = [show.format_table(("first call", "operator", "node", "result", "NaN"), table)]
    if options.dump is not None:
        facts["dumped"] = str(Path(options.dump))
        lines.append(f"{len(values)} tensors written to {facts['dumped']}")
    if reference is not None:
        facts["compared"] = compared
        lines.append(f"{compared} tensors agree with {options.bisect}")
    if options.check:
        lines.append("each node agrees with the interpreter on its own inputs")
    return facts, "\n".join([*lines, *([stopped] if stopped else [])])


def _facts(event: Event) -> dict[str, Any]:
    outputs = [{"name": t, "dtype": str(a.dtype), "shape": list(a.shape)} for t, a in event.outputs.items()]
    return {
        "node": event.node, "operator": event.operator, "device": event.device, "seconds": event.seconds,
        "outputs": outputs, "nans": sum(_count_nans(array) for array in event.outputs.values()),
    }  # fmt: skip


def _count_nans(array: Any) -> int:
    return int(np.isnan(array.astype(np.float64)).sum()) if array.dtype.kind not in "iub" else 0


def _shape(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{each['dtype']}{each['shape']}" for each in row["outputs"])


def _show_arrays(event: Event) -> str:
    rows = [
        (kind, name, f"{array.dtype}{list(array.shape)}", *_statistics(array))
        for kind, arrays in (("input", event.inputs), ("result", event.outputs))
        for name, array in arrays.items()
    ]
    return show.format_table(("", "tensor", "type", "least", "mean", "largest", "NaN"), rows)


def _statistics(array: Any) -> tuple[str, ...]:
    wide = array.astype(np.float64)
    numbers = wide[~np.isnan(wide)]
    if not numbers.size:
        return "", "", "", str(wide.size)
    with np.errstate(invalid="ignore", over="ignore"):
        return *(f"{each:.6g}" for each in (numbers.min(), numbers.mean(), numbers.max())), str(wide.size - numbers.size)


def _compare(event: Event, reference: Mapping[str, Any], tolerance: float) -> int:
    """Return how many results the reference has. Raises WrongAnswerError for one that differs.

    A node with one result may have its name there.
    """
    compared = 0
    for tensor, array in event.outputs.items():
        name = event.node if tensor not in reference and len(event.outputs) == 1 else tensor
        if name not in reference:
            continue
        want = reference[name]
        if want.dtype.kind == "V" and want.dtype.itemsize == array.dtype.itemsize:
            want = want.view(array.dtype)  # numpy writes bfloat16 and float8 as bytes
        if want.dtype != array.dtype and want.dtype.kind not in "biuf":
            raise ArgumentError(f"--bisect: {name} has type {want.dtype}, expected {array.dtype}", code="dtype-mismatch")
        if want.shape != array.shape:
            raise ArgumentError(
                f"--bisect: {name} has shape {list(want.shape)}, and {list(array.shape)} in the model", code="shape-mismatch"
            )
        difference, scale = compare_arrays(array, want)
        if not difference <= tolerance * scale:
            raise WrongAnswerError(
                f"node {event.node} ({event.operator}): {tensor} differs by {difference:.3g}, with values up to {scale:.3g}; "
                "all results before agree"
            )
        compared += 1
    return compared


def compare_arrays(got: Any, want: Any) -> tuple[float, float]:
    """Return the largest difference and the largest finite value; NaN and infinities have to be in the same places."""
    first, second = got.astype(np.float64), want.astype(np.float64)
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    with np.errstate(invalid="ignore"):
        differences = np.abs(first - second)[~same]
    finite = np.abs(second[np.isfinite(second)])
    difference = 0.0 if not differences.size else float("inf") if np.isnan(differences).any() else float(differences.max())
    return difference, max(1e-30, float(finite.max()) if finite.size else 0.0)


def read_reference(file: str) -> dict[str, Any]:
    """Return the arrays of a file, by name. Raises ArgumentError."""
    try:
        with Path(file).open("rb") as opened:
            loaded = np.load(opened, allow_pickle=False)
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                raise ArgumentError(f"--bisect: {file} is a single array, expected an archive of arrays", code="unreadable-file")
            read = {name: loaded[name] for name in loaded.files}
    except UNREADABLE as failure:
        reason = str(failure) or type(failure).__name__
        raise ArgumentError(f"--bisect: cannot read {file}: {reason}", code="unreadable-file") from failure
    for name, array in read.items():
        if not isinstance(array, np.ndarray):
            raise ArgumentError(f"--bisect: {name} in {file} is not an array of numpy", code="unreadable-file")
    return read


def _dump(folder: Path, values: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(folder / VALUES, "w") as archive:  # np.savez has no tensor called file
            for name, array in values.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
        (folder / STEPS).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    except OSError as failure:
        raise ArgumentError(f"--dump: cannot write to {folder}: {failure.strerror}", code="unwritable-file") from failure
