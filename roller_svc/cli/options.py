"""Options shared by several subcommands."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roller_svc.cli import format as show
from roller_svc.cli.context import CommandContext
from roller_svc.errors import ArgumentError
from roller_svc.frontend.lang.input_types import tensor_types
from roller_svc.frontend.parse import parse
from roller_svc.ir.options import CommonOptions, InputNames, KernelOptions, Option, ScheduleText, Tiles, encode, options_of
from roller_svc.on_use import OnUse

if TYPE_CHECKING:
    from roller_svc import calibration, hardware
    from roller_svc.compiler.request import build_request
    from roller_svc.ir.report import BuildRequest
    from roller_svc.settings import settings, use
else:
    hardware = OnUse("roller_svc.hardware")
    calibration = OnUse("roller_svc.calibration")
    build_request = OnUse("roller_svc.compiler.request:build_request")
    settings = OnUse("roller_svc.settings:settings")
    use = OnUse("roller_svc.settings:use")


_INPUT = re.compile(r"\s*(?P<name>[^=\[\]]+?)\s*=\s*(?P<dtype>\w+)\s*(?:\[(?P<shape>[^\[\]]*)\])?\s*")
_OFFERED = "offered_values"  # of an argument
_NAMED_DEVICES = "named_devices"  # in parsed arguments: the devices so far, which may be the default one
MAX_FILE_BYTES = 64 << 20
MAX_SECONDS = 3600.0  # of measuring: all samples are kept in memory


def offer_values(action: argparse.Action, values: Iterable[str]) -> None:
    """Keep values of an argument that shells complete, and that argparse does not check."""
    setattr(action, _OFFERED, tuple(values))


def offered_values(action: argparse.Action) -> tuple[str, ...]:
    values: tuple[str, ...] = getattr(action, _OFFERED, ())
    return values


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


class _OneDevice(argparse.Action):
    """Stores a device. Raises ArgumentError for a second one: the last would win in silence."""

    def __call__(self, parser: argparse.ArgumentParser, options: argparse.Namespace, value: Any, flag: str | None = None) -> None:
        named = [*getattr(options, _NAMED_DEVICES, ()), *parse_names(value)]
        if len(named) > 1:
            raise ArgumentError(
                f"{flag} of `{parser.prog}` takes one device, got {' and '.join(named)}",
                code="invalid-option",
                hint="run it once for each; `roller estimate` takes several, and a service builds for several by --targets ID,ID",
            )
        setattr(options, _NAMED_DEVICES, named)
        setattr(options, self.dest, value)


def add_target(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    text = "device; `roller targets` lists them (default: local)"
    parser.add_argument("--target", metavar="ID", default=default, action=_OneDevice, help=text)


def add_device(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--hardware", metavar="FILE", help="YAML spec of a device, instead of --target")
    add_calibration(parser)


def add_calibration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-calibrate",
        action="store_true",
        help="do not measure this CPU at its first use; use assumed rates (default: once, a few seconds)",
    )


def add_options(parser: argparse.ArgumentParser, record: type[CommonOptions], **defaults: str) -> None:
    """Add the options of a record. `option_values` reads them."""
    for option in options_of(record).values():
        add_option(parser, option, defaults.get(option.name, encode(option.default)))


def add_option(parser: argparse.ArgumentParser, option: Option, default: Any) -> None:
    flags = _flags_of(option)
    text = f"{option.help} (default: %(default)s)" if default else option.help
    match option.type:
        case _ if option.switch is not None:
            details: dict[str, Any] = {"action": "store_const", "const": option.switch, "help": option.help}
        case kind if kind is bool:
            details = {"action": "store_true", "help": option.help}
        case kind if kind == InputNames:
            details = {"action": "append", "metavar": option.metavar, "help": f"{option.help}; may be repeated"}
            default = []
        case kind:
            details = {"type": int if kind is int else str, "metavar": option.metavar, "help": text}
    parser.add_argument(*flags, dest=option.name, default=default, **details)


def option_values(options: argparse.Namespace, record: type[CommonOptions]) -> dict[str, Any]:
    """Return the options of a record as callers give them in Python."""
    return {name: _option_value(option, getattr(options, name)) for name, option in options_of(record).items()}


def _option_value(option: Option, value: Any) -> Any:
    if option.type == Tiles:
        return parse_tiles(value)
    if option.type == InputNames and (lists := [each for each in value if "," in each]):
        flag = _flags_of(option)[0]
        raise ArgumentError(
            f"{flag} {lists[0]}: expected one name",
            code="invalid-option",
            hint=f"repeat the flag: {' '.join(f'{flag} {name}' for name in parse_names(lists[0]))}",
        )
    if option.type == ScheduleText and value is not None:
        return read_text_file(value)
    return value


def _flags_of(option: Option) -> tuple[str, ...]:
    return option.flags or (f"--{option.name.replace('_', '-')}",)


def add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--server", metavar="URL", help="service that compiles, instead of this process")


def server_url(options: argparse.Namespace) -> str:
    return options.server or settings().server


def parse_names(text: str) -> list[str]:
    """Return the names in a list that is separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def parse_targets(text: str) -> list[str]:
    """Return the devices in a list that is separated by commas, such as `h200,mi300x`, or in a word such as `cuda`."""
    return hardware.expand_targets([text])


def read_expression(options: argparse.Namespace) -> str:
    """Return the program text and store it in the context for error messages."""
    context: CommandContext = options.context
    if context.expression:
        return context.expression
    argument: str = options.expression
    if argument == "-":
        text = _decode(sys.stdin.buffer.read(MAX_FILE_BYTES), "stdin")
    elif argument.startswith("@"):
        text = read_text_file(argument[1:])
    else:
        text = argument
    context.expression = text
    return text


def check_program(options: argparse.Namespace) -> None:
    """Parse the program, which takes a tenth of the time that a compiler takes to load. A service checks its own."""
    if not getattr(options, "server", None):
        parse(read_expression(options), dict(tensor_types(parse_inputs(options))), options.output or None)


def read_text_file(name: str) -> str:
    """Read a UTF-8 file, or standard input for -. Raises ArgumentError."""
    if name == "-":
        return _decode(sys.stdin.buffer.read(MAX_FILE_BYTES), "stdin")
    try:
        with Path(name).open("rb") as file:
            return _decode(file.read(MAX_FILE_BYTES), name)
    except OSError as failure:
        raise ArgumentError(
            f"cannot read {name}: {failure.strerror or failure}", code="unreadable-file", hint=_similar_files(Path(name))
        ) from failure


def _similar_files(path: Path) -> str:
    """Return a hint with the files in a path's folder whose names are similar."""
    folder = path.parent
    names: list[str] = []
    with suppress(OSError):  # a folder that cannot be listed
        names = sorted(each.name for each in folder.iterdir())
    near = [str(folder / name) for name in get_close_matches(path.name, names)]
    return f"did you mean {' or '.join(near)}?" if near else f"paths are relative to {Path.cwd()}"


def parse_inputs(options: argparse.Namespace) -> dict[str, tuple[str, list[int]]]:
    """Parse --input: A=float32[4,4] → {"A": ("float32", [4, 4])}; A=float32 is a scalar."""
    inputs: dict[str, tuple[str, list[int]]] = {}
    for text in options.input:
        match = _INPUT.fullmatch(text)
        if match is None:
            raise ArgumentError(
                f"--input {text}: expected NAME=DTYPE[EXTENT,...]", code="invalid-inputs", hint="write --input 'A=float32[64,32]'"
            )
        if match["name"] in inputs:
            raise ArgumentError(
                f"--input {match['name']} is given twice", code="invalid-inputs", hint="give each input once, with its own name"
            )
        inputs[match["name"]] = (match["dtype"], _parse_extents(text, match["shape"] or ""))
    return inputs


def calibrate_local(options: argparse.Namespace, *targets: object) -> None:
    """Measure the host CPU if it is among the targets and this is its first use, unless --no-calibrate is given."""
    set_calibration(options)
    calibration.calibrate_at_first_use(targets, print_line)


def set_calibration(options: argparse.Namespace) -> None:
    if options.no_calibrate:
        _disable_calibration()


def pin_local(options: argparse.Namespace) -> None:
    """Do the same for the target `local` of this process and its children, which use one spec of it."""
    set_calibration(options)
    calibration.pin_calibration(print_line)


def _disable_calibration() -> None:
    use(settings().model_copy(update={"calibrate": False}))


def print_notes(notes: Iterable[str]) -> None:
    """Print the notes on a program to stderr, each line within the terminal's width."""
    for note in notes:
        show.print_message(show.wrap(f"note: {note}", stream=sys.stderr))


def print_line(line: str) -> None:
    print(f"roller: {line}", file=sys.stderr, flush=True)


def parse_request(options: argparse.Namespace) -> BuildRequest:
    """Return the request for a build in this process, after a calibration where `local` needs one."""
    request = build_request(
        read_expression(options),
        parse_inputs(options),
        outputs=options.output or None,
        **option_values(options, KernelOptions),
        **parse_device(options),
    )
    calibrate_local(options, None if request.hardware else request.target)
    return request


def parse_tiles(text: str) -> dict[str, int]:
    """Parse --constrain: split_k=4,stages=3 → {"split_k": 4, "stages": 3}."""
    parts = [part.partition("=") for part in (text or "").split(",") if part.strip()]
    try:
        return {name.strip(): int(value) for name, _, value in parts}
    except ValueError as failure:
        message = f"--constrain {text}: expected NAME=NUMBER,..."
        raise ArgumentError(message, code="invalid-option") from failure


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


def add_seconds(parser: argparse.ArgumentParser) -> None:
    text = "approximate duration of the measurement (default: %(default)s)"
    parser.add_argument("--seconds", type=float, default=calibration.SECONDS, metavar="S", help=text)


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
