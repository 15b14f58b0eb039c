"""roller explain: explain how a kernel was constructed."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from roller_svc.cli import format as show
from roller_svc.cli import options as common
from roller_svc.cli.compile import candidates_table
from roller_svc.cli.page_file import KERNEL, write_page
from roller_svc.errors import ArgumentError, ToolchainMissingError
from roller_svc.ir.options import KernelOptions
from roller_svc.on_use import OnUse

if TYPE_CHECKING:
    from roller_svc.compiler.as_schedule import explain_as_schedule, first_plan
    from roller_svc.compiler.explain import assess_plan, explored_of, parse_request, rank_request
    from roller_svc.compiler.notes import reject_notes
    from roller_svc.compiler.pipeline import build_kernel
    from roller_svc.compiler.plans import merge_ranked_plans, select_for_measurement
    from roller_svc.compiler.reports import report_json
    from roller_svc.compiler.request import resolve_spec
    from roller_svc.ir.report import BuildReport, BuildRequest, CandidateResult
else:
    explain_as_schedule = OnUse("roller_svc.compiler.as_schedule:explain_as_schedule")
    first_plan = OnUse("roller_svc.compiler.as_schedule:first_plan")
    reject_notes = OnUse("roller_svc.compiler.notes:reject_notes")
    assess_plan = OnUse("roller_svc.compiler.explain:assess_plan")
    build_kernel = OnUse("roller_svc.compiler.pipeline:build_kernel")
    explored_of = OnUse("roller_svc.compiler.explain:explored_of")
    parse_request = OnUse("roller_svc.compiler.explain:parse_request")
    rank_request = OnUse("roller_svc.compiler.explain:rank_request")
    merge_ranked_plans = OnUse("roller_svc.compiler.plans:merge_ranked_plans")
    select_for_measurement = OnUse("roller_svc.compiler.plans:select_for_measurement")
    resolve_spec = OnUse("roller_svc.compiler.request:resolve_spec")
    report_json = OnUse("roller_svc.compiler.reports:report_json")
    BuildReport = OnUse("roller_svc.ir.report:BuildReport")
    CandidateResult = OnUse("roller_svc.ir.report:CandidateResult")


DEFAULT_STEPS = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_program(parser)
    common.add_device(parser)
    common.add_options(parser, KernelOptions, select="model")
    parser.add_argument("--source", action="store_true", help="print the kernel's source too")
    parser.add_argument(
        "--as-schedule",
        action="store_true",
        help="print the model's first plan as a schedule by hand, and as options (--json)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help=f"construction steps to print (default: {DEFAULT_STEPS})",
    )
    parser.add_argument("--html", metavar="FILE", help="write the page of the kernel to FILE, which needs no service")


def execute(options: argparse.Namespace) -> int:
    common.check_program(options)
    if options.as_schedule:
        refuse_parts_of_a_report(options)
    request = common.parse_request(options)
    if options.as_schedule:
        found = explain_as_schedule(request, first_plan(request))
        show.print_result(options, found.to_json(), found.text())
        return 0
    try:
        report = build_kernel(request)
    except ToolchainMissingError as missing:
        report = plan_without_building(request, missing)
    facts = report_json(report, limits=True)
    common.print_notes((*report.notes, *report.remarks))
    source = _source(report)
    if options.html is not None:
        write_page(options.html, KERNEL, {"story": facts["story"], "source": source})
    steps = DEFAULT_STEPS if options.steps is None else options.steps
    shown = [format_report(facts, steps), *([source] if options.source and source is not None else [])]
    show.print_result(options, facts | {"source": source}, "\n\n".join(shown))
    return 0


def refuse_parts_of_a_report(options: argparse.Namespace) -> None:
    """Raise ArgumentError for an option that asks for what a schedule has not."""
    given = {
        "html": ("page", options.html is not None),
        "source": ("source", options.source),
        "steps": ("searches", options.steps is not None),
    }
    for name, (part, is_given) in given.items():
        if is_given:
            raise ArgumentError(f"--as-schedule and --{name} exclude each other: a schedule has no {part}", code="invalid-option")


def plan_without_building(request: BuildRequest, missing: ToolchainMissingError) -> BuildReport:
    """Create a report without compiling, for a device whose toolchain is missing."""
    forms, spec = parse_request(request), resolve_spec(request)
    program, groupings = forms[0], rank_request(request, forms, spec)
    shortlist = select_for_measurement(merge_ranked_plans(groupings, request.top_k), groupings, request.top_k)
    attempts = tuple(CandidateResult(grouped.plan, grouped.groups, None, None, None, None) for grouped in shortlist)
    first = next(ranked for ranked in groupings if ranked.groups is attempts[0].groups)
    floor, notes = assess_plan(program, spec, request.constraints, first, attempts[0].plan)
    if request.strict:
        reject_notes(notes)
    remarks = (missing.message,)
    return BuildReport(request, program, spec, explored_of(attempts, groupings), attempts, notes, remarks, floor=floor)


def format_report(facts: Mapping[str, Any], steps: int) -> str:
    """Format a report: groups, construction, candidates, costs."""
    story = facts["story"]
    best = story["programs"][0]
    lines = [
        "Program",
        *(f"  {line}" for line in story["expression"].splitlines()),
        f"Device: {facts['target']} ({facts['arch']})",
    ]
    for number, (kernel, construction) in enumerate(zip(best["kernels"], story["constructions"], strict=True), 1):
        operations = kernel["operations"]["definition"]
        lines += ["", f"Kernel {number}: {kernel['group']}, a {kernel['kind']} of {operations:,} operations", *_axes(kernel)]
        lines += _construction(construction, story["searches"], kernel["found"], steps)
    lines += ["", "Candidates, best first", candidates_table(facts["attempts"])]
    winner = facts["attempts"][0]["plan"]
    lines += ["", f"Estimate of the first: {show.format_seconds(winner['seconds'])}, bound by {winner['bound']}"]
    for kernel in best["kernels"]:
        once = " (once, before all calls)" if kernel.get("runs_once") else ""
        lines += [f"{kernel['group']}{once}:"] if len(best["kernels"]) > 1 else []
        lines += [show.format_table(("term", "time", "share", "amount", "rate", ""), _terms(kernel))]
    factor = f"{winner['uncertainty']:.3g}"
    lines.append(f"occupancy {winner['occupancy']:.2f}, {winner['waves']} waves, true within a factor of {factor}")
    if winner["once_s"]:
        lines.append(f"once, before all calls: {show.format_seconds(winner['once_s'])} of launches that read constants alone")
    changes = show.format_table(("resource +10 %", "saves"), _sensitivity_rows(best))
    lines += ["", "Sensitivity of the estimate, for the same tiles", changes]
    if revised := show.format_compiled_estimate(facts["attempts"][0]):
        lines.append(revised)
    if facts["floor"] is not None:
        lines.append(f"Floor of the program: {show.format_floor(facts['floor'])}")
    if facts["stage_seconds"]:
        lines.append("time spent: " + ", ".join(f"{k} {show.format_seconds(v)}" for k, v in facts["stage_seconds"].items()))
    return "\n".join(line if "\n" in line else show.wrap(line, "    ") for line in lines)


def format_search(search: Mapping[str, Any], steps: int, marked: int | None = None) -> str:
    """Format a search: its tiles with footprint, traffic, and what became of them. An arrow is at the marked step."""
    title = f"{search['kind']} of {search['level']} tiles on {search['unit']}, {search['family']}"
    if "base" in search:
        title += f", of threads with {_tile(search['axes'], search['base'])}"
    shown = [*range(min(steps, len(search["steps"])))]
    if marked is not None and marked not in shown:
        shown.append(marked)
    rows = [_step(search, number, is_marked=number == marked) for number in shown]
    lines = [f"{title}:", show.format_table(("", "tile", "footprint", "traffic", "outcome"), rows)]
    rest = len(search["steps"]) - len(shown)
    return "\n".join(lines + ([f"... and {rest} steps more (--steps)"] if rest else []))


def _step(search: Mapping[str, Any], number: int, *, is_marked: bool) -> tuple[object, ...]:
    step = search["steps"][number]
    tile, decision = _tile(search["axes"], step["tile"]), step["outcome"]
    if limit := step.get("limit"):
        decision += f": {limit['rule']}, needs {limit['needs']:,.6g}, has {limit['has']:,.6g}"
    return (
        "→" if is_marked else "",
        tile,
        show.format_bytes(step["footprint_bytes"]),
        show.format_bytes(step["traffic_bytes"]),
        decision,
    )


def _tile(axes: Sequence[str], extents: Sequence[int]) -> str:
    return " ".join(f"{axis}={extent}" for axis, extent in zip(axes, extents, strict=True))


def _construction(
    construction: Mapping[str, Any], searches: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, int]], steps: int
) -> list[str]:
    """Format how a kernel's tiles were found: the searches that found those of the first candidate."""
    own = [search for search in searches if search["group"] == construction["group"]]
    lines = [
        f"  {construction['tiles_visited']} tiles visited in {len(own)} searches, {construction['programs']} programs estimated"
    ]
    for place in found:
        lines += [f"  {line}" for line in format_search(searches[place["search"]], steps, place["step"]).splitlines()]
    if construction["rejections"]:
        lines.append("  rejected: " + ", ".join(f"{rule} {count}×" for rule, count in construction["rejections"].items()))
    lines += [f"  unsupported unit: {reason}" for reason in construction["refusals"]]
    return lines


def _axes(kernel: Mapping[str, Any]) -> list[str]:
    return ["  axes: " + ", ".join(f"{a['name']} ({a['role']}) {a['extent']}" for a in kernel["axes"])]


def _terms(kernel: Mapping[str, Any]) -> list[tuple[object, ...]]:
    """Return rows of the terms of a kernel, which combine to its seconds, and say how."""
    return [
        (
            term["name"],
            show.format_seconds(term["seconds"]),
            f"{term['seconds'] / kernel['seconds']:.0%}",
            _amount(term["amount"], term["unit"]),
            f"{_amount(term['rate'], term['unit'])}/s {term['source']}",
            term["combines"] + (f" {term['fraction']:.0%}" if "fraction" in term else ""),
        )
        for term in kernel["terms"]
    ]


def _amount(amount: float, unit: str) -> str:
    return show.format_bytes(amount) if unit == "B" else f"{amount:.3g} {unit}"


def _sensitivity_rows(program: Mapping[str, Any]) -> list[tuple[object, ...]]:
    return [(change["resource"], f"{change['saved']:.1%}") for change in program["limited_by"]]


def _source(report: BuildReport) -> str | None:
    source = report.winner.source
    return None if source is None else source.text
