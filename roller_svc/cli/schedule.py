"""roller schedule: check a schedule by hand, show its tree, print the source that it makes, or search one."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from roller_svc.cli import format as show
from roller_svc.cli import options as common
from roller_svc.cli.command import INTERRUPTED
from roller_svc.errors import ScheduleError
from roller_svc.on_use import OnUse

if TYPE_CHECKING:
    from roller_svc.cli.progress import report_stages
    from roller_svc.compiler.parsing import parse_once
    from roller_svc.compiler.request import build_request, resolve_spec
    from roller_svc.compiler.schedule_cost import price_schedule, schedule_cost_json
    from roller_svc.compiler.scheduled import emit_schedule
    from roller_svc.ir.schedule_text import render
    from roller_svc.schedule.build_tree import build_tree
    from roller_svc.schedule.check_steps import Problem
    from roller_svc.schedule.device_launches import schedule_for_device
    from roller_svc.schedules import TuneResult, tune
else:
    parse_once = OnUse("roller_svc.compiler.parsing:parse_once")
    build_request = OnUse("roller_svc.compiler.request:build_request")
    resolve_spec = OnUse("roller_svc.compiler.request:resolve_spec")
    price_schedule = OnUse("roller_svc.compiler.schedule_cost:price_schedule")
    schedule_cost_json = OnUse("roller_svc.compiler.schedule_cost:schedule_cost_json")
    emit_schedule = OnUse("roller_svc.compiler.scheduled:emit_schedule")
    schedule_for_device = OnUse("roller_svc.schedule.device_launches:schedule_for_device")
    render = OnUse("roller_svc.ir.schedule_text:render")
    build_tree = OnUse("roller_svc.schedule.build_tree:build_tree")
    Problem = OnUse("roller_svc.schedule.check_steps:Problem")
    tune = OnUse("roller_svc.schedules:tune")
    report_stages = OnUse("roller_svc.cli.progress:report_stages")

VERBS = {
    "check": "say which step breaks which rule, and a step that would do; with --target also what the device cannot run",
    "show": "print the loops, buffers and computations of the scheduled program",
    "apply": "print the source of the kernel; roller compile --schedule compiles it",
}
ON_DEVICES = ("check", "apply")
TUNE = "tune"
START_TEXT = "schedule that is mutated too"
TUNE_TEXT = "search the fastest schedule by trials; the same seed builds the same schedules"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, text in VERBS.items():
        each = verbs.add_parser(verb, help=text, description=text)
        each.add_argument("schedule", metavar="FILE", help="schedule as text or JSON; - reads stdin")
        common.add_program(each)
        if verb in ON_DEVICES:
            common.add_device(each)
    search = verbs.add_parser(TUNE, help=TUNE_TEXT, description=TUNE_TEXT)
    common.add_program(search)
    common.add_device(search)
    search.add_argument("--trials", type=int, default=100, metavar="N", help="schedules to build, 1 or more (default: %(default)s)")
    search.add_argument("--seed", type=int, default=0, metavar="N", help="of the search (default: %(default)s)")
    search.add_argument("--budget", type=float, default=60.0, metavar="S", help="seconds, above 0 (default: %(default)g)")
    search.add_argument("--start", metavar="FILE", help=START_TEXT)


def format_cost(cost: Mapping[str, Any]) -> str:
    """Format the price of a legal schedule."""
    columns = ("launch", "estimated", "bound", "operations", "stored", "moved", "threads")
    rows = [
        (
            launch["name"],
            show.format_seconds(launch["estimate"]["seconds"]),
            launch["estimate"]["bound"],
            launch["operations"],
            show.format_bytes(launch["stored_bytes"]),
            ", ".join(f"{level} {show.format_bytes(moved)}" for level, moved in launch["moved_bytes"].items()),
            launch["threads"],
        )
        for launch in cost["launches"]
    ]
    return f"legal, estimated {show.format_seconds(cost['seconds'])}\n{show.format_table(columns, rows)}"


def execute(options: argparse.Namespace) -> int:
    if options.verb == TUNE:
        return search_fastest(options)
    names_device = options.verb == "apply" or (options.verb == "check" and (options.target or options.hardware))
    device = common.parse_device(options) if names_device else {}
    request = build_request(common.read_expression(options), common.parse_inputs(options), outputs=options.output or None, **device)
    program = parse_once(request.expression, request.inputs, request.outputs)[0]
    spec = resolve_spec(request) if names_device else None
    text = common.read_text_file(options.schedule)
    try:
        schedule = schedule_for_device(program, text, spec)
    except ScheduleError as error:
        if options.verb != "check":
            raise
        show.print_result(options, {"problems": [asdict(Problem.from_error(error))]}, error.render(error.text))
        return 2
    match options.verb:
        case "check":
            cost = None if spec is None else schedule_cost_json(price_schedule(schedule, spec))
            show.print_result(options, {"problems": [], "cost": cost}, "legal" if cost is None else format_cost(cost))
        case "show":
            tree = render(build_tree(schedule))
            show.print_result(options, {"tree": tree}, tree)
        case _:
            source = emit_schedule(schedule, spec or resolve_spec(request)).text
            show.print_result(options, {"source": source}, source)
    return 0


def search_fastest(options: argparse.Namespace) -> int:
    """Search the fastest schedule, and print it; after Ctrl-C the fastest so far."""
    latest: list[TuneResult] = []
    with report_stages() as progress:

        def on_trial(found: TuneResult) -> None:
            latest[:] = [found]
            progress("trials", len(found.trials), options.trials)

        try:
            tune(
                common.read_expression(options),
                common.parse_inputs(options),
                outputs=options.output or None,
                trials=options.trials,
                seed=options.seed,
                budget_s=options.budget,
                start=common.read_text_file(options.start) if options.start else None,
                on_trial=on_trial,
                **common.parse_device(options),
            )
            code = 0
        except KeyboardInterrupt:
            if not latest:
                raise
            code = INTERRUPTED
    (found,) = latest
    fastest = min((trial.seconds for trial in found.trials if trial.seconds is not None), default=None)
    how = "not measured: cheapest by price" if fastest is None else show.format_seconds(fastest)
    stopped = ", interrupted" if code else ""
    text = f"# {how}, of {len(found.trials)} trials{stopped}\n{found.best.text().rstrip()}"
    show.print_result(options, {"best": found.best.to_json(), "seconds": fastest, "history": found.history}, text)
    return code
