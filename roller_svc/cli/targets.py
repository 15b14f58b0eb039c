"""roller targets: list devices and their compilers; roller targets check: compare a spec with the local device."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from roller_svc import calibration, hardware
from roller_svc.cli import errors as tell
from roller_svc.cli import format as show
from roller_svc.cli import options as common
from roller_svc.cli import remote
from roller_svc.compiler.serialize import Json, device_json
from roller_svc.errors import ArgumentError
from roller_svc.ir.hardware import HardwareSpec

COLUMNS = ("value", "unit", "spec", "min", "median", "max", "ratio", "")
CHECK = "check"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=[CHECK], help="compare a spec with the local device")
    parser.add_argument("id", nargs="?", metavar="ID", help="device to check (default: local)")
    parser.add_argument("--hardware", metavar="FILE", help="YAML spec, instead of ID")
    common.add_seconds(parser)
    parser.add_argument("--json", action="store_true", help="write JSON to stdout")
    common.add_server(parser)


def execute(options: argparse.Namespace) -> int:
    if options.action == CHECK:
        return _check(options)
    if options.hardware:
        raise ArgumentError("--hardware requires `roller targets check`", code="invalid-option")
    server = common.server_url(options)
    if server:
        with remote.open_client(server) as service:
            rows = service.hardware()
    else:
        rows = [device_json(spec) for spec in hardware.all_specs()]
        if error := hardware.local_spec_error():
            show.print_message(tell.render_error(error, ""))
    table_rows = [(row["id"], row["arch"], "yes" if row["compiles"] else "no", row["toolchain"]) for row in rows]
    table = show.format_table(("target", "arch", "compiles", "with, or what is missing"), table_rows)
    show.print_result(options, {"targets": rows}, table)
    return 0


def _check(options: argparse.Namespace) -> int:
    """Return 0 if the spec agrees with the device, 1 if a value differs."""
    common.check_seconds(options)
    if options.server:
        raise ArgumentError("--server is not available with `roller targets check`", code="invalid-option")
    spec = _spec(options)
    comparisons = calibration.compare_spec(spec, options.seconds)
    agrees = all(comparison.agrees for comparison in comparisons)
    facts = {"target": spec.id, "name": spec.name, "agrees": agrees, "figures": [_json(f) for f in comparisons]}
    table = show.format_table(COLUMNS, [_row(comparison) for comparison in comparisons])
    show.print_result(options, facts, f"{table}\n{_format_verdict(spec, comparisons)}")
    return 0 if agrees else 1


def _spec(options: argparse.Namespace) -> HardwareSpec:
    if options.hardware is None:
        return hardware.load(options.id or hardware.LOCAL)
    if options.id:
        raise ArgumentError("ID and --hardware exclude each other", code="invalid-option")
    return hardware.load_yaml(common.read_text_file(options.hardware), options.hardware)


def _json(comparison: calibration.Comparison) -> Json:
    return {
        "figure": comparison.field,
        "unit": comparison.unit,
        "spec": comparison.spec,
        "min": comparison.min,
        "median": comparison.median,
        "max": comparison.max,
        "ratio": comparison.ratio,
        "agrees": comparison.agrees,
    }


def _row(comparison: calibration.Comparison) -> tuple[str, ...]:
    values = (f"{value:.4g}" for value in (comparison.spec, comparison.min, comparison.median, comparison.max))
    return (
        comparison.field,
        comparison.unit,
        *values,
        f"{comparison.ratio:.2f}",
        "agrees" if comparison.agrees else "differs",
    )


def _format_verdict(spec: HardwareSpec, comparisons: Sequence[calibration.Comparison]) -> str:
    differs = sum(not comparison.agrees for comparison in comparisons)
    if not differs:
        return f"{spec.id} agrees with this device"
    return f"{differs} of {len(comparisons)} values of {spec.id} differ; `roller calibrate` writes a spec of this device"
