"""roller explain: explain how a kernel was constructed."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from roller_svc.cli import format as show
from roller_svc.cli import options as common
from roller_svc.cli.compile import candidates_table
from roller_svc.errors import ToolchainMissingError
from roller_svc.ir.options import KernelOptions
from roller_svc.on_use import OnUse

if TYPE_CHECKING:
    from roller_svc.compiler.notes import reject_notes
    from roller_svc.compiler.pipeline import assess_plan, build_kernel, parse_request, rank_request
    from roller_svc.compiler.plans import merge_ranked_plans, select_for_measurement
    from roller_svc.compiler.request import resolve_spec
    from roller_svc.compiler.sensitivity import analyze_sensitivity
    from roller_svc.compiler.serialize import report_json, sensitivity_json
    from roller_svc.ir.report import BuildReport, BuildRequest, CandidateResult
else:
    reject_notes = OnUse("roller_svc.compiler.notes:reject_notes")
    assess_plan = OnUse("roller_svc.compiler.pipeline:assess_plan")
    build_kernel = OnUse("roller_svc.compiler.pipeline:build_kernel")
    parse_request = OnUse("roller_svc.compiler.pipeline:parse_request")
    rank_request = OnUse("roller_svc.compiler.pipeline:rank_request")
    merge_ranked_plans = OnUse("roller_svc.compiler.plans:merge_ranked_plans")
    select_for_measurement = OnUse("roller_svc.compiler.plans:select_for_measurement")
    resolve_spec = OnUse("roller_svc.compiler.request:resolve_spec")
    analyze_sensitivity = OnUse("roller_svc.compiler.sensitivity:analyze_sensitivity")
    report_json = OnUse("roller_svc.compiler.serialize:report_json")
    sensitivity_json = OnUse("roller_svc.compiler.serialize:sensitivity_json")
    BuildReport = OnUse("roller_svc.ir.report:BuildReport")
    CandidateResult = OnUse("roller_svc.ir.report:CandidateResult")


DEFAULT_STEPS = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_program(parser)
    common.add_device(parser)
    common.add_options(parser, KernelOptions, select="model")
    parser.add_argument("--source", action="store_true", help="print the kernel's source too")
    parser.add_argument(
        "--steps",
        type=int,
        default=DEFAULT_STEPS,
        metavar="N",
        help="construction steps to print (default: %(default)s)",
    )


def execute(options: argparse.Namespace) -> int:
    common.check_program(options)
    request = common.parse_request(options)
    try:
        report = build_kernel(request)
    except ToolchainMissingError as missing:
        report = plan_without_building(request, missing)
    facts = report_json(report)
    changes = analyze_sensitivity(report.results[0].plan, report.groups, report.hardware)
    facts["sensitivity"] = sensitivity_json(changes)
    common.print_notes((*report.notes, *report.remarks))
    source = _source(report)
    shown = [format_report(facts, options.steps), *([source] if options.source and source is not None else [])]
    show.print_result(options, facts | {"source": source}, "\n\n".join(shown))
    return 0


def plan_without_building(request: BuildRequest, missing: ToolchainMissingError) -> BuildReport:
    """Create a report without compiling, for a device whose toolchain is missing."""
    forms, spec = parse_request(request), resolve_spec(request)
    program, groupings = forms[0], rank_request(request, forms, spec)
    shortlist = select_for_measurement(merge_ranked_plans(groupings, request.top_k), groupings, request.top_k)
    attempts = tuple(CandidateResult(grouped.plan, grouped.groups, None, None, None, None) for grouped in shortlist)
    first = groupings[0]
    floor, notes = assess_plan(program, spec, request.constraints, first, attempts[0].plan)
    if request.strict:
        reject_notes(notes)
    remarks = (missing.message,)
    return BuildReport(request, program, spec, first.groups, first.constructions, attempts, notes, remarks, floor=floor)


def format_report(facts: Mapping[str, Any], steps: int) -> str:
    """Format a report: groups, construction, candidates, costs."""
    lines = [
        "Program",
        *(f"  {line}" for line in facts["expression"].splitlines()),
        f"Device: {facts['target']} ({facts['arch']})",
    ]
    for number, (group, construction) in enumerate(zip(facts["groups"], _constructions_by_group(facts), strict=True), 1):
        lines += [
            "",
            f"Kernel {number}: {group['name']}, a {group['kind']} of {group['flops']:,} operations",
            *_axes(group),
        ]
        if construction is not None:
            lines += _construction(construction, steps)
    lines += ["", "Candidates, best first", candidates_table(facts["attempts"])]
    winner = facts["attempts"][0]["plan"]
    lines += ["", f"Estimate of the first: {show.format_seconds(winner['seconds'])}, bound by {winner['bound']}"]
    lines.append(show.format_table(("stage", "time", "share"), _stages(winner)))
    factor = f"{winner['uncertainty']:.3g}"
    lines.append(f"occupancy {winner['occupancy']:.2f}, {winner['waves']} waves, true within a factor of {factor}")
    changes = show.format_table(("resource +10 %", "saves"), _sensitivity_rows(facts))
    lines += ["", "Sensitivity of the estimate, for the same tiles", changes]
    if revised := show.format_compiled_estimate(facts["attempts"][0]):
        lines.append(revised)
    if facts["floor"] is not None:
        lines.append(f"Floor of the program: {show.format_floor(facts['floor'])}")
    if facts["stage_seconds"]:
        lines.append("time spent: " + ", ".join(f"{k} {show.format_seconds(v)}" for k, v in facts["stage_seconds"].items()))
    return "\n".join(line if "\n" in line else show.wrap(line, "    ") for line in lines)


def format_steps(steps: Sequence[Mapping[str, Any]]) -> str:
    """Format construction steps: level, tile, footprint, data-reuse score (null in JSON: free) and decision."""
    rows = [
        (
            step["level"],
            " ".join(f"{a}={n}" for a, n in step["tile"].items()),
            show.format_bytes(step["footprint_bytes"]) if step["footprint_bytes"] else "-",  # of a rejected tile it is not computed
            "free" if step["reuse"] is None else f"{step['reuse']:.3g}",
            step["outcome"],
        )
        for step in steps
    ]
    return show.format_table(("level", "tile", "footprint", "reuse", "outcome"), rows)


def _construction(construction: Mapping[str, Any], steps: int) -> list[str]:
    lines = [f"  {construction['tiles_visited']} tiles visited, {construction['programs']} programs found"]
    lines += [f"  {line}" for line in format_steps(construction["trace"][:steps]).splitlines()]
    rest = construction["trace_steps"] - min(steps, len(construction["trace"]))
    if rest > 0:
        lines.append(f"  ... and {rest} steps more (--steps)")
    if construction["rejections"]:
        lines.append("  rejected: " + ", ".join(f"{rule} {count}×" for rule, count in construction["rejections"].items()))
    lines += [f"  unsupported unit: {reason}" for reason in construction["refusals"]]
    return lines


def _axes(group: Mapping[str, Any]) -> list[str]:
    return ["  axes: " + ", ".join(f"{a['name']} ({a['role']}) {a['extent']}" for a in group["axes"])]


def _stages(plan: Mapping[str, Any]) -> list[tuple[object, ...]]:
    """Return rows of the stages' times and fractions, which may sum to more than 100 % because stages overlap."""
    whole = plan["seconds"]
    return [(s["name"], show.format_seconds(s["seconds"]), f"{s['seconds'] / whole:.0%}") for s in plan["stages"]]


def _sensitivity_rows(facts: Mapping[str, Any]) -> list[tuple[object, ...]]:
    return [(change["resource"], f"{change['saved']:.1%}") for change in facts["sensitivity"]]


def _constructions_by_group(facts: Mapping[str, Any]) -> list[Any]:
    """Return the construction of each group, or None if there are fewer."""
    constructions = list(facts["constructions"])
    return constructions + [None] * (len(facts["groups"]) - len(constructions))


def _source(report: BuildReport) -> str | None:
    source = report.winner.source
    return None if source is None else source.text
