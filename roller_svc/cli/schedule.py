"""roller schedule: check a schedule by hand, show its tree, or print the source that it makes."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from roller_svc.cli import format as show
from roller_svc.cli import options as common
from roller_svc.errors import ScheduleError
from roller_svc.on_use import OnUse

if TYPE_CHECKING:
    from roller_svc.compiler.parsing import parse_once
    from roller_svc.compiler.request import build_request, resolve_spec
    from roller_svc.compiler.scheduled import check_device, emit_schedule
    from roller_svc.ir.schedule_text import render
    from roller_svc.schedule.build_tree import build_tree
    from roller_svc.schedule.by_hand import schedule_by_hand
    from roller_svc.schedule.check_steps import Problem
else:
    parse_once = OnUse("roller_svc.compiler.parsing:parse_once")
    build_request = OnUse("roller_svc.compiler.request:build_request")
    resolve_spec = OnUse("roller_svc.compiler.request:resolve_spec")
    check_device = OnUse("roller_svc.compiler.scheduled:check_device")
    emit_schedule = OnUse("roller_svc.compiler.scheduled:emit_schedule")
    render = OnUse("roller_svc.ir.schedule_text:render")
    build_tree = OnUse("roller_svc.schedule.build_tree:build_tree")
    schedule_by_hand = OnUse("roller_svc.schedule.by_hand:schedule_by_hand")
    Problem = OnUse("roller_svc.schedule.check_steps:Problem")

VERBS = {
    "check": "say which step breaks which rule, and a step that would do",
    "show": "print the loops, buffers and computations of the scheduled program",
    "apply": "print the source of the kernel; roller compile --schedule compiles it",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, text in VERBS.items():
        each = verbs.add_parser(verb, help=text, description=text)
        each.add_argument("schedule", metavar="FILE", help="schedule as text or JSON; - reads stdin")
        common.add_program(each)
        if verb == "apply":
            common.add_device(each)


def execute(options: argparse.Namespace) -> int:
    device = common.parse_device(options) if options.verb == "apply" else {}
    request = build_request(common.read_expression(options), common.parse_inputs(options), outputs=options.output or None, **device)
    program = parse_once(request.expression, request.inputs, request.outputs)[0]
    text = common.read_text_file(options.schedule)
    try:
        schedule = schedule_by_hand(program, text)
    except ScheduleError as error:
        if options.verb != "check":
            raise
        show.print_result(options, {"problems": [asdict(Problem.from_error(error))]}, error.render(error.text))
        return 2
    match options.verb:
        case "check":
            show.print_result(options, {"problems": []}, "legal")
        case "show":
            tree = render(build_tree(schedule))
            show.print_result(options, {"tree": tree}, tree)
        case _:
            check_device(spec := resolve_spec(request))
            source = emit_schedule(schedule, spec).text
            show.print_result(options, {"source": source}, source)
    return 0
