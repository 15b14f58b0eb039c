"""roller estimate: what the model expects on one or more devices; no compiler and no device is touched."""

from __future__ import annotations

import argparse
from typing import Any

from roller_svc import hardware
from roller_svc.cli import options as common
from roller_svc.cli import remote, show
from roller_svc.client import error_of
from roller_svc.errors import ArgumentError
from roller_svc.estimates import Item, estimates_json, plans_of
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.wire import EstimateBody, ProgramBody, TensorTypeBody


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_program(parser)
    parser.add_argument("--target", action="append", default=[], metavar="ID", help="a device; may be repeated")
    parser.add_argument(
        "--hardware", action="append", default=[], metavar="FILE", help="a device's spec in YAML; may be repeated"
    )
    parser.add_argument(
        "--top-k", type=int, default=1, metavar="K", help="plans for each device (default: %(default)s)"
    )
    common.add_server(parser)


def execute(options: argparse.Namespace) -> int:
    item = Item(common.expression_of(options), common.inputs_of(options), options.output or None)
    server = common.server_of(options)
    answers = (
        _asked(options, item, server) if server else estimates_json([item], _targets(options, item), options.top_k)
    )
    if options.json:
        show.as_json({"estimates": answers})
    else:
        print(show.table(("target", "", "estimated", "bound", "occupancy", "waves", "unit", "tiles"), _rows(answers)))
    return 0


def _targets(options: argparse.Namespace, item: Item) -> list[str | HardwareSpec]:
    """The devices; what is wrong with the program or a device's name is an error here, not a row."""
    specs = [hardware.load_yaml(common.text_file(name), name) for name in options.hardware]
    targets: list[str | HardwareSpec] = [*options.target, *specs] or ["local"]
    for target in targets:
        plans_of(item, target, 1)
    return targets


def _asked(options: argparse.Namespace, item: Item, server: str) -> list[dict[str, Any]]:
    if options.hardware:
        raise ArgumentError(
            "--hardware does not go with --server: a service estimates for devices it knows", code="invalid-option"
        )
    types = {
        name: TensorTypeBody(dtype=dtype, shape=shape) for name, (dtype, shape) in common.inputs_of(options).items()
    }
    program = ProgramBody(expression=str(item.expression), inputs=types, outputs=options.output or None)
    body = EstimateBody(items=[program], targets=options.target or ["local"], top_k=options.top_k)
    with remote.connected(server) as service:
        answers = service.estimates(body)
    for answer in answers:
        if problem := answer.get("error"):
            raise error_of(problem)
    return answers


def _rows(answers: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for answer in answers:
        for number, plan in enumerate(answer["candidates"], 1):
            rows.append(
                (answer["target"], number, show.duration(plan["seconds"]), plan["bound"], f"{plan['occupancy']:.2f}",
                 plan["waves"], plan["unit"], show.plan_tiles(plan))
            )  # fmt: skip
    return rows
