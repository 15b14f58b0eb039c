"""roller estimate: what the model expects on one or more devices; no compiler and no device is touched."""

from __future__ import annotations

import argparse
from typing import Any

from roller_svc import hardware
from roller_svc.cli import format as show
from roller_svc.cli import options as common
from roller_svc.cli import remote
from roller_svc.client.client import error_of
from roller_svc.client.schemas import EstimateBody
from roller_svc.compiler.estimates.batch import Item, estimated, what_if_json
from roller_svc.compiler.estimates.worker import estimated_json
from roller_svc.compiler.request import checked_top_k
from roller_svc.errors import ArgumentError

CHANGES = ("target", "resource", "saves")
ROOFS = ("target", "level", "seconds", "operations", "bytes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_program(parser)
    parser.add_argument("--target", action="append", default=[], metavar="ID", help="a device; may be repeated")
    parser.add_argument(
        "--hardware", action="append", default=[], metavar="FILE", help="a device's spec in YAML; may be repeated"
    )
    parser.add_argument(
        "--top-k", type=int, default=1, metavar="K", help="plans for each device (default: %(default)s)"
    )
    parser.add_argument("--what-if", action="store_true", help="what a tenth more of each resource would save")
    parser.add_argument("--allow-tf32", action="store_true", help="float32 products may be rounded to TF32")
    common.add_server(parser)


def execute(options: argparse.Namespace) -> int:
    server = common.server_of(options)
    answers = _asked(options, server) if server else _computed(options)
    if options.json:
        show.as_json({"estimates": answers})
    else:
        print(show.table(("target", "", "estimated", "bound", "occupancy", "waves", "unit", "tiles"), _rows(answers)))
        print(f"\nNo tiles go below\n{show.table(ROOFS, _roofs(answers))}")
        if options.what_if:
            print(f"\nA tenth more of a resource, the tiles left as they are\n{show.table(CHANGES, _changes(answers))}")
    return 0


def _computed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """In this process. What is wrong with the program or a device's name is an error here, not a row."""
    item = Item(common.expression_of(options), common.inputs_of(options), options.output or None, options.allow_tf32)
    count = checked_top_k(options.top_k)
    specs = [hardware.load_yaml(common.text_file(name), name) for name in options.hardware]
    found = estimated(item, [*options.target, *specs] or ["local"], count)
    answers = [{"item": 0, "target": one.spec.id} | estimated_json(one) for one in found]
    if options.what_if:
        for answer, one in zip(answers, found, strict=True):
            answer["sensitivity"] = what_if_json(item, one.spec, one.plans[0])
    return answers


def _asked(options: argparse.Namespace, server: str) -> list[dict[str, Any]]:
    if options.what_if:
        raise ArgumentError("--what-if does not go with --server", code="invalid-option")
    if options.hardware:
        message = "--hardware does not go with --server: a service estimates for devices it knows"
        raise ArgumentError(message, code="invalid-option")
    item = remote.program_fields(options)
    body = {"items": [item], "targets": options.target or ["local"], "top_k": options.top_k}
    body |= {"allow_tf32": options.allow_tf32}
    with remote.connected(server) as service:
        answers = service.estimates(remote.checked(EstimateBody, body))
    for answer in answers:
        if problem := answer.get("error"):
            raise error_of(problem)
    return answers


def _roofs(answers: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    return [
        (answer["target"], roof["level"], show.duration(roof["seconds"]), roof.get("operations", ""),
         roof.get("bytes", ""))
        for answer in answers
        for roof in answer["roofline"]
    ]  # fmt: skip


def _changes(answers: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    return [
        (answer["target"], change["resource"], f"{change['saved']:.1%}")
        for answer in answers
        for change in answer["sensitivity"]
    ]


def _rows(answers: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for answer in answers:
        for number, plan in enumerate(answer["candidates"], 1):
            rows.append(
                (answer["target"], number, show.duration(plan["seconds"]), plan["bound"], f"{plan['occupancy']:.2f}",
                 plan["waves"], plan["unit"], show.plan_tiles(plan))
            )  # fmt: skip
    return rows
