"""Options that several verbs share, and what they mean."""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path
from typing import Any

from roller_svc import hardware
from roller_svc.compiler.request import build_request
from roller_svc.errors import ArgumentError
from roller_svc.ir.constraints import TILE_FIELDS
from roller_svc.ir.report import BuildRequest
from roller_svc.settings import settings

_INPUT = re.compile(r"\s*(?P<name>[^=\[\]]+?)\s*=\s*(?P<dtype>\w+)\s*(?:\[(?P<shape>[^\[\]]*)\])?\s*")
MAX_FILE_BYTES = 64 << 20
MAX_SECONDS = 3600.0  # of measuring: samples are kept, and nobody waits longer


def add_program(parser: argparse.ArgumentParser) -> None:
    """The expression, its inputs and outputs."""
    parser.add_argument("expression", help="the program; - reads it from stdin, @FILE from a file")
    parser.add_argument(
        "--input", action="append", default=[], metavar="A=float32[1024,1024]", help="an input's type; once for each"
    )
    parser.add_argument(
        "--output", action="append", default=[], metavar="NAME", help="an output; default: all that is left"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout, nothing else")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", metavar="ID", help="the device (roller targets lists them); default: local")
    parser.add_argument("--hardware", metavar="FILE", help="a device's spec in YAML, in place of --target")


def add_build(parser: argparse.ArgumentParser, select: str) -> None:
    """How a kernel is chosen."""
    parser.add_argument("--top-k", type=int, default=10, metavar="K", help="candidates to build (default: %(default)s)")
    parser.add_argument(
        "--select",
        default=select,
        metavar="HOW",
        help="measure: time the candidates; model: trust the ranking (default: %(default)s)",
    )
    parser.add_argument("--allow-tf32", action="store_true", help="float32 products may be rounded to TF32")
    add_family(parser)
    parser.add_argument(
        "--constant", action="append", default=[], metavar="NAME",
        help="an input that stays the same from call to call; may be repeated",
    )  # fmt: skip
    parser.add_argument("--emulate", action="store_true", help="run a GPU's kernel on the CPU")


def add_family(parser: argparse.ArgumentParser) -> None:
    """For experiments: a part of what there is to choose from."""
    parser.add_argument("--family", metavar="NAME", help="what contractions on a GPU run on: simt, mma or wgmma")
    parser.add_argument(
        "--tiles", metavar="split_k=4,stages=3", help=f"values that some of {', '.join(TILE_FIELDS)} must have"
    )


def add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--server", metavar="URL", help="a service to build on, in place of this process")


def server_url(options: argparse.Namespace) -> str:
    return options.server or settings().server


def read_expression(options: argparse.Namespace) -> str:
    """The program's text, remembered for errors that point into it."""
    argument: str = options.expression
    if argument == "-":
        text = _decode(sys.stdin.buffer.read(MAX_FILE_BYTES), "stdin")
    elif argument.startswith("@"):
        text = read_text_file(argument[1:])
    else:
        text = argument
    options.texts.expression = text
    return text


def read_text_file(name: str) -> str:
    """A file that the caller names."""
    try:
        with Path(name).open("rb") as file:
            return _decode(file.read(MAX_FILE_BYTES), name)
    except OSError as failure:
        raise ArgumentError(f"cannot read {name}: {failure.strerror or failure}", code="unreadable-file") from failure


def parse_inputs(options: argparse.Namespace) -> dict[str, tuple[str, list[int]]]:
    """--input A=float32[4,4] → {"A": ("float32", [4, 4])}; A=float32 is a scalar."""
    inputs: dict[str, tuple[str, list[int]]] = {}
    for text in options.input:
        match = _INPUT.fullmatch(text)
        if match is None:
            raise ArgumentError(f"--input {text}: expected NAME=DTYPE[EXTENT,...]", code="invalid-inputs")
        if match["name"] in inputs:
            raise ArgumentError(f"--input {match['name']} is given twice", code="invalid-inputs")
        inputs[match["name"]] = (match["dtype"], _parse_extents(text, match["shape"] or ""))
    return inputs


def parse_request(options: argparse.Namespace) -> BuildRequest:
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
        **parse_device(options),
    )


def parse_tiles(options: argparse.Namespace) -> dict[str, int]:
    """--tiles split_k=4,stages=3 → {"split_k": 4, "stages": 3}."""
    parts = [part.partition("=") for part in (options.tiles or "").split(",") if part.strip()]
    try:
        return {name.strip(): int(value) for name, _, value in parts}
    except ValueError as failure:
        raise ArgumentError(f"--tiles {options.tiles}: expected NAME=NUMBER,...", code="invalid-option") from failure


def runtime_name(options: argparse.Namespace) -> str:
    return "emulator" if options.emulate else "auto"


def parse_device(options: argparse.Namespace) -> dict[str, Any]:
    """target or hardware, as build_request takes them."""
    if options.hardware is None:
        return {"target": options.target or "local"}
    if options.target:
        raise ArgumentError("--target and --hardware exclude each other", code="invalid-option")
    return {"hardware": hardware.load_yaml(read_text_file(options.hardware), options.hardware)}


def check_positive(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        if not 0 < getattr(options, name) < math.inf:
            raise ArgumentError(f"--{name} must be positive and finite", code="invalid-option")


def check_seconds(options: argparse.Namespace) -> None:
    """--seconds, how long to measure."""
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
