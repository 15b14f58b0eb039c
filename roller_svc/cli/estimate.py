"""roller estimate: estimate a program on one or more devices, without a compiler or device."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from roller_svc.cli import format as show
from roller_svc.cli import options as common
from roller_svc.errors import ArgumentError
from roller_svc.ir.options import EstimateOptions
from roller_svc.ir.schedule_cost import ScheduledEstimate
from roller_svc.on_use import OnUse

if TYPE_CHECKING:
    from roller_svc import hardware
    from roller_svc.cli import remote
    from roller_svc.client.problems import error_from_problem
    from roller_svc.client.schemas import EstimateRequest
    from roller_svc.compiler.estimates.batch import Item, estimate_item, plan_sensitivity_json
    from roller_svc.compiler.estimates.worker import target_estimate_json
    from roller_svc.compiler.request import read_top_k
else:
    EstimateRequest = OnUse("roller_svc.client.schemas:EstimateRequest")
    hardware = OnUse("roller_svc.hardware")
    remote = OnUse("roller_svc.cli.remote")
    error_from_problem = OnUse("roller_svc.client.problems:error_from_problem")
    Item = OnUse("roller_svc.compiler.estimates.batch:Item")
    estimate_item = OnUse("roller_svc.compiler.estimates.batch:estimate_item")
    plan_sensitivity_json = OnUse("roller_svc.compiler.estimates.batch:plan_sensitivity_json")
    target_estimate_json = OnUse("roller_svc.compiler.estimates.worker:target_estimate_json")
    read_top_k = OnUse("roller_svc.compiler.request:read_top_k")


COLUMNS = ("target", "", "estimated", "rate", "floor", "kernels", "bound", "unit and tiles")
SENSITIVITY_COLUMNS = ("target", "resource", "saves")
ROOFLINE_COLUMNS = ("target", "level", "seconds", "operations", "bytes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_program(parser)
    parser.add_argument("--target", action="append", default=[], metavar="ID", help="device; may be repeated")
    parser.add_argument("--hardware", action="append", default=[], metavar="FILE", help="YAML spec of a device; may be repeated")
    parser.add_argument("--top-k", type=int, default=1, metavar="K", help="plans for each device (default: %(default)s)")
    sensitivity = "print the sensitivity of the estimate to each resource (+10 %%)"
    parser.add_argument("--sensitivity", "--what-if", action="store_true", dest="sensitivity", help=sensitivity)
    common.add_options(parser, EstimateOptions)
    common.add_calibration(parser)
    common.add_server(parser)


def execute(options: argparse.Namespace) -> int:
    common.check_program(options)
    server = common.server_url(options)
    estimates = _estimate_remotely(options, server) if server else _estimate_locally(options)
    parts = [
        show.format_table(COLUMNS, _rows(estimates)),
        f"Roofline (lower bounds)\n{show.format_table(ROOFLINE_COLUMNS, _roofline_rows(estimates))}",
        "\n".join(_floor_lines(estimates)),
    ]
    if options.sensitivity:
        table = show.format_table(SENSITIVITY_COLUMNS, _sensitivity_rows(estimates))
        parts.append(f"Sensitivity to each resource (+10 %), for the same tiles\n{table}")
    for estimate in estimates:
        common.print_notes(f"{estimate['target']}: {note}" for note in estimate["notes"])
    show.print_result(options, {"estimates": estimates}, "\n\n".join(parts))
    return 0


def _estimate_locally(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Estimate in this process. Raises InputError for an invalid program or device id."""
    item = Item(
        common.read_expression(options),
        common.parse_inputs(options),
        options.output or None,
        common.option_values(options, EstimateOptions),
    )
    count = read_top_k(options.top_k)
    specs = [hardware.load_yaml(common.read_text_file(name), name) for name in options.hardware]
    targets = [*hardware.expand_targets(options.target), *specs] or [hardware.LOCAL]
    common.calibrate_local(options, *targets)
    if options.sensitivity and options.schedule is not None:
        raise ArgumentError("--sensitivity is of tiles, which a schedule by hand does not have", code="invalid-option")
    results = estimate_item(item, targets, count)
    estimates = [{"item": 0, "target": result.spec.id} | target_estimate_json(result) for result in results]
    if options.sensitivity:
        for estimate, result in zip(estimates, results, strict=True):
            if not isinstance(result, ScheduledEstimate):
                estimate["sensitivity"] = plan_sensitivity_json(item, result.spec, result.plans[0])
    return estimates


def _estimate_remotely(options: argparse.Namespace, server: str) -> list[dict[str, Any]]:
    if options.sensitivity:
        raise ArgumentError("--sensitivity is not available with --server", code="invalid-option")
    if len(options.hardware) > 1:
        raise ArgumentError("--hardware may be given once with --server", code="invalid-option")
    item = remote.program_fields(options)
    body = {"items": [item], "top_k": options.top_k}
    if options.target or not options.hardware:
        body["targets"] = options.target or ["local"]
    for name in options.hardware:
        body["hardware"] = hardware.to_mapping(hardware.load_yaml(common.read_text_file(name), name))
    body |= common.option_values(options, EstimateOptions)
    with remote.open_client(server) as service:
        estimates = service.estimates(remote.validate_body(EstimateRequest, body))
    for estimate in estimates:
        if problem := estimate.get("error"):
            raise error_from_problem(problem)
    return estimates


def _roofline_rows(estimates: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    return [
        (estimate["target"], roof["level"], show.format_seconds(roof["seconds"]), roof.get("operations", ""), roof.get("bytes", ""))
        for estimate in estimates
        for roof in estimate["roofline"]
    ]


def _floor_lines(estimates: list[dict[str, Any]]) -> list[str]:
    lines = []
    for estimate in estimates:
        first = estimate["candidates"][0]
        why = f"; {first['above_floor']}" if first["above_floor"] else ""
        share = f"{first['floor_share']:.0%} of the estimate{why}"
        lines.append(show.wrap(f"Floor of the program on {estimate['target']}: {show.format_floor(estimate['floor'])}, {share}"))
    return lines


def _sensitivity_rows(estimates: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    return [
        (estimate["target"], change["resource"], f"{change['saved']:.1%}")
        for estimate in estimates
        for change in estimate["sensitivity"]
    ]


def _rows(estimates: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for estimate in estimates:
        for number, plan in enumerate(estimate["candidates"], 1):
            rows.append(
                (
                    estimate["target"],
                    number,
                    show.format_seconds(plan["seconds"]),
                    show.format_rate(plan, estimate["floor"]),
                    f"{plan['floor_share']:.0%}",
                    len(plan["kernels"]) or len(plan["launches"]),
                    plan["bound"],
                    f"{plan['unit']} | {show.format_plan_tiles(plan)}" if plan["kernels"] else "scheduled by hand",
                )
            )
    return rows
