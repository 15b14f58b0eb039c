"""Options shared by several subcommands."""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path
from typing import Any

from roller_svc import hardware
from roller_svc.calibration import calibrate_at_first_use, pin_calibration
from roller_svc.compiler.request import build_request
from roller_svc.errors import ArgumentError
from roller_svc.ir.constraints import TILE_FIELDS, WinogradMode
from roller_svc.ir.report import BuildRequest
from roller_svc.settings import settings, use

_INPUT = re.compile(r"\s*(?P<name>[^=\[\]]+?)\s*=\s*(?P<dtype>\w+)\s*(?:\[(?P<shape>[^\[\]]*)\])?\s*")
MAX_FILE_BYTES = 64 << 20
MAX_SECONDS = 3600.0  # of measuring: all samples are kept in memory


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add the expression, its inputs and outputs."""
    parser.add_argument("expression", help="program text; - reads stdin, @FILE reads a file")
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="A=float32[1024,1024]",
        help="type of an input; repeat for each input",
    )
    parser.add_argument(
        "--output",
        action="append",
        default=[],
        metavar="NAME",
        help="output tensor (default: tensors that are never read)",
    )
    parser.add_argument("--json", action="store_true", help="write JSON to stdout")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", metavar="ID", help="device; `roller targets` lists them (default: local)")
    parser.add_argument("--hardware", metavar="FILE", help="YAML spec of a device, instead of --target")
    add_calibration(parser)


def add_calibration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-calibrate", action="store_true",
        help="do not measure this CPU at its first use; use assumed rates (default: once, a few seconds)",
    )  # fmt: skip


def add_build(parser: argparse.ArgumentParser, select: str) -> None:
    """Add options for the selection of a kernel."""
    parser.add_argument("--top-k", type=int, default=10, metavar="K", help="candidates to build (default: %(default)s)")
    parser.add_argument(
        "--select",
        default=select,
        metavar="HOW",
        help="measure: time the candidates; model: trust the ranking (default: %(default)s)",
    )
    parser.add_argument("--allow-tf32", action="store_true", help="allow TF32 for float32 products")
    add_winograd(parser)
    add_family(parser)
    parser.add_argument(
        "--constant", action="append", default=[], metavar="NAME",
        help="an input that stays the same from call to call; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--donate", action="append", default=[], metavar="NAME",
        help="an input that a scatter may overwrite; may be repeated",
    )  # fmt: skip
    add_name(parser)
    parser.add_argument("--emulate", action="store_true", help="run a GPU's kernel on the CPU")


def add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--name", metavar="NAME",
        help="begins the names of all that the saved code exports (default: roller_ and digits of its digest)",
    )  # fmt: skip


def add_winograd(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--winograd", default=WinogradMode.AUTO.value, choices=[mode.value for mode in WinogradMode],
        help="3x3 convolutions on CPUs by Winograd's algorithm (default: %(default)s, where it is accurate)",
    )  # fmt: skip


def add_family(parser: argparse.ArgumentParser) -> None:
    """Add constraints on the candidates, for experiments."""
    parser.add_argument(
        "--kernel-family", "--family", dest="family", metavar="NAME",
        help="kernel family of GPU contractions: simt, mma or wgmma",
    )  # fmt: skip
    parser.add_argument(
        "--constrain", "--tiles", dest="tiles", metavar="split_k=4,stages=3",
        help=f"values of tile fields: {', '.join(TILE_FIELDS)}",
    )  # fmt: skip


def add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--server", metavar="URL", help="service that compiles, instead of this process")


def server_url(options: argparse.Namespace) -> str:
    return options.server or settings().server


def read_expression(options: argparse.Namespace) -> str:
    """Return the program text and store it in the context for error messages."""
    argument: str = options.expression
    if argument == "-":
        text = _decode(sys.stdin.buffer.read(MAX_FILE_BYTES), "stdin")
    elif argument.startswith("@"):
        text = read_text_file(argument[1:])
    else:
        text = argument
    options.context.expression = text
    return text


def read_text_file(name: str) -> str:
    """Read a UTF-8 file. Raises ArgumentError."""
    try:
        with Path(name).open("rb") as file:
            return _decode(file.read(MAX_FILE_BYTES), name)
    except OSError as failure:
        raise ArgumentError(f"cannot read {name}: {failure.strerror or failure}", code="unreadable-file") from failure


def parse_inputs(options: argparse.Namespace) -> dict[str, tuple[str, list[int]]]:
    """Parse --input: A=float32[4,4] → {"A": ("float32", [4, 4])}; A=float32 is a scalar."""
    inputs: dict[str, tuple[str, list[int]]] = {}
    for text in options.input:
        match = _INPUT.fullmatch(text)
        if match is None:
            raise ArgumentError(f"--input {text}: expected NAME=DTYPE[EXTENT,...]", code="invalid-inputs")
        if match["name"] in inputs:
            raise ArgumentError(f"--input {match['name']} is given twice", code="invalid-inputs")
        inputs[match["name"]] = (match["dtype"], _parse_extents(text, match["shape"] or ""))
    return inputs


def calibrate_local(options: argparse.Namespace, *targets: object) -> None:
    """Measure the host CPU if it is among the targets and this is its first use, unless --no-calibrate is given."""
    if options.no_calibrate:
        _disable_calibration()
    calibrate_at_first_use(targets, print_line)


def pin_local(options: argparse.Namespace) -> None:
    """Do the same for the target `local` of this process and its children, which use one spec of it."""
    if options.no_calibrate:
        _disable_calibration()
    pin_calibration(print_line)


def _disable_calibration() -> None:
    use(settings().model_copy(update={"calibrate": False}))


def print_line(line: str) -> None:
    print(f"roller: {line}", file=sys.stderr, flush=True)


def parse_request(options: argparse.Namespace) -> BuildRequest:
    """Return the request for a build in this process, after a calibration where `local` needs one."""
    device = parse_device(options)
    calibrate_local(options, device.get("target"))
    return build_request(
        read_expression(options),
        parse_inputs(options),
        outputs=options.output or None,
        top_k=options.top_k,
        select=options.select,
        runtime=runtime_name(options),
        allow_tf32=options.allow_tf32,
        family=options.family,
        tiles=parse_tiles(options),
        constants=options.constant,
        winograd=options.winograd,
        donate=options.donate,
        name=options.name,
        **device,
    )


def parse_tiles(options: argparse.Namespace) -> dict[str, int]:
    """Parse --constrain: split_k=4,stages=3 → {"split_k": 4, "stages": 3}."""
    parts = [part.partition("=") for part in (options.tiles or "").split(",") if part.strip()]
    try:
        return {name.strip(): int(value) for name, _, value in parts}
    except ValueError as failure:
        message = f"--constrain {options.tiles}: expected NAME=NUMBER,..."
        raise ArgumentError(message, code="invalid-option") from failure


def runtime_name(options: argparse.Namespace) -> str:
    return "emulator" if options.emulate else "auto"


def parse_device(options: argparse.Namespace) -> dict[str, Any]:
    """Return target or hardware as an argument of build_request."""
    if options.hardware is None:
        return {"target": options.target or "local"}
    if options.target:
        raise ArgumentError("--target and --hardware exclude each other", code="invalid-option")
    return {"hardware": hardware.load_yaml(read_text_file(options.hardware), options.hardware)}


def check_positive(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if not 0 < value < math.inf:
            message = f"--{name.replace('_', '-')} must be positive and finite, got {value:g}"
            raise ArgumentError(message, code="invalid-option")


def check_seconds(options: argparse.Namespace) -> None:
    """Validate --seconds, the duration of a measurement."""
    check_positive(options, "seconds")
    if options.seconds > MAX_SECONDS:
        raise ArgumentError(f"--seconds must be at most {MAX_SECONDS:g}", code="invalid-option")


def _parse_extents(text: str, shape: str) -> list[int]:
    try:
        return [int(extent) for extent in shape.split(",")] if shape.strip() else []
    except ValueError as failure:
        raise ArgumentError(f"--input {text}: extents must be whole numbers", code="invalid-shape") from failure


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as failure:
        raise ArgumentError(f"{where} is not UTF-8 text", code="unreadable-file") from failure
