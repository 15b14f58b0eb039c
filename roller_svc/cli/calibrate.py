"""roller calibrate: measure a local device by micro-benchmarks and print or write its spec."""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from roller_svc import calibration, hardware
from roller_svc.cli import format as show
from roller_svc.cli import options as common
from roller_svc.errors import ArgumentError
from roller_svc.ir.hardware import HardwareSpec, TargetKind

_CUDA = re.compile(r"cuda:(\d{1,3})")
COLUMNS = ("value", "unit", "taken", "min", "median", "max")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default=hardware.LOCAL, metavar="ID", help="device to measure; default: local, the host CPU")
    parser.add_argument("--output", metavar="FILE", help="write the spec to FILE as YAML, and print the measurements")
    common.add_seconds(parser)
    parser.add_argument("--json", action="store_true", help="write the spec as JSON to stdout")


def execute(options: argparse.Namespace) -> int:
    common.check_seconds(options)
    if options.output:
        _check_writable(Path(options.output))
    spec = _calibrate(options.target, options.seconds)
    if options.output:
        _write(Path(options.output), hardware.to_yaml(spec))
    text = show.format_table(COLUMNS, _rows(spec)) if options.output else hardware.to_yaml(spec).removesuffix("\n")
    show.print_result(options, hardware.to_mapping(spec), text)
    return 0


def _calibrate(target: str, seconds: float) -> HardwareSpec:
    """Calibrate the host CPU, a shipped spec with this machine's cores and caches, or an NVIDIA device by number."""
    if match := _CUDA.fullmatch(target):
        calibration.check_cuda(int(match[1]))
        return calibration.calibrate_cuda(int(match[1]), seconds)
    if target == hardware.LOCAL:
        return calibration.calibrate_spec(hardware.detect_local(), seconds=seconds)
    spec = hardware.load(target)
    calibration.check_present(spec)
    spec_here = calibration.adapt_to_this_machine(spec) if spec.family is TargetKind.CPU else spec
    return calibration.calibrate_spec(spec_here, seconds=seconds)


def _rows(spec: HardwareSpec) -> Iterator[tuple[str, ...]]:
    for measured in spec.measured:
        if measured.figure is not None:
            yield (
                measured.figure,
                measured.unit,
                *(f"{value:.4g}" for value in (measured.quiet, measured.min, measured.median, measured.max)),
            )


def _check_writable(path: Path) -> None:
    """Raise ArgumentError if the file cannot be written, before anything is measured."""
    with _temporary_sibling(path) as part:
        part.touch(exist_ok=False)


def _write(path: Path, text: str) -> None:
    """Write a file atomically."""
    with _temporary_sibling(path) as part:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    print(f"wrote {path}", file=sys.stderr)


@contextmanager
def _temporary_sibling(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same directory and remove it. Convert OSError to ArgumentError."""
    part = path.parent / f".roller-{os.getpid()}.part"
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        yield part
    except OSError as failure:
        raise ArgumentError(f"cannot write {path}: {failure.strerror or failure}", code="unwritable-file") from failure
    finally:
        with suppress(OSError):  # the directory may not exist
            part.unlink()
