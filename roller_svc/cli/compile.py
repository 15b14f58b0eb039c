"""roller compile: compile an expression; print or save the kernel."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import TYPE_CHECKING, Any

from roller_svc.cli import format as show
from roller_svc.cli import options as common
from roller_svc.errors import ArgumentError
from roller_svc.ir.options import LAUNCHERS, KernelOptions
from roller_svc.on_use import OnUse

if TYPE_CHECKING:
    from roller_svc.api import Kernel
    from roller_svc.api import build as build_kernel
    from roller_svc.cli.builds import print_builds
    from roller_svc.compiler.serialize import kernel_json
else:
    print_builds = OnUse("roller_svc.cli.builds:print_builds")
    build_kernel = OnUse("roller_svc.api:build")
    kernel_json = OnUse("roller_svc.compiler.serialize:kernel_json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_program(parser)
    common.add_device(parser)
    common.add_options(parser, KernelOptions)
    common.add_server(parser)
    parser.add_argument("--targets", metavar="ID,ID", help="devices: build for each on the service, and print a table")
    parser.add_argument("--save", metavar="DIR", help="write source, binary and metadata.json to DIR")
    launchers = f"with --save: write what launches the kernel by some of {','.join(LAUNCHERS)}"
    common.offer_values(parser.add_argument("--launcher", metavar="NAMES", help=launchers), LAUNCHERS)
    parser.add_argument("--source", action="store_true", help="print the kernel's source")
    parser.add_argument("--ptx", action="store_true", help="print a CUDA kernel's PTX; with --save also write it")
    parser.add_argument("--sass", action="store_true", help="print a CUDA kernel's SASS; with --save also write it")


def execute(options: argparse.Namespace) -> int:
    if options.targets:
        return _build_for_targets(options)
    if options.launcher and not options.save:
        raise ArgumentError("--launcher needs --save", code="invalid-option", hint="name the folder: --save DIR")
    common.check_program(options)
    kernel = build(options)
    facts = kernel_facts(kernel)
    common.print_notes(facts["notes"])
    listings = {kind: make() for kind, make in (("ptx", kernel.ptx), ("sass", kernel.sass)) if getattr(options, kind)}
    if options.save:
        folder = kernel.save(options.save, common.parse_names(options.launcher) if options.launcher else ())
        for kind, listing in listings.items():
            (folder / f"kernel.{kind}").write_text(listing, encoding="utf-8")
        facts["saved"] = options.save
    shown = [summary(facts), *([kernel.source] if options.source else []), *listings.values()]
    show.print_result(options, facts | {"source": kernel.source} | listings, "\n\n".join(shown))
    return 0


def _build_for_targets(options: argparse.Namespace) -> int:
    """Have the service compile for several devices. Return 1 if it fails for one of them."""
    server, only_files = common.server_url(options), ("save", "source", "ptx", "sass", "target", "hardware")
    if not server or any(getattr(options, name) for name in only_files):
        raise ArgumentError(
            f"--targets needs --server, and excludes {', '.join(f'--{name}' for name in only_files)}", code="invalid-option"
        )
    remote = import_module("roller_svc.cli.remote")
    targets = common.parse_targets(options.targets)
    options.target = targets[0]
    with remote.open_client(server) as service:
        results = service.compile_for_targets(remote.compile_request(options), targets)
    return print_builds(options, {"": results})


def build(options: argparse.Namespace) -> Kernel:
    """Compile the kernel by the service of --server, or in this process, which needs no HTTP client."""
    if server := common.server_url(options):
        kernel: Kernel = import_module("roller_svc.cli.remote").kernel(options, server)
        return kernel
    return build_kernel(common.parse_request(options))


def kernel_facts(kernel: Kernel) -> dict[str, Any]:
    return kernel_json(
        kernel.parts.compiled,
        {
            "name": kernel.name,
            "target": kernel.target,
            "expression": kernel.expression,
            "estimate": kernel.parts.estimate,
            "candidates": kernel.report.get("attempts", []),
            "notes": kernel.report.get("notes", []),
        },
    )


def summary(facts: dict[str, Any]) -> str:
    lines = [
        f"{facts['digest']}",
        facts["expression"],
        f"for {facts['target']}, {facts['language']}:",
        show.format_launches(facts),
    ]
    estimate = facts["estimate"]
    if estimate:
        seconds, stages = show.format_seconds(estimate["seconds"]), show.format_stages(estimate)
        lines.append(f"estimate: {seconds}, bound by {estimate['bound']} ({stages})")
    if facts["candidates"]:
        if revised := show.format_compiled_estimate(facts["candidates"][0]):
            lines.append(revised)
        lines += ["", candidates_table(facts["candidates"])]
    if "saved" in facts:
        lines.append(f"saved to {facts['saved']}: all that it exports begins with {facts['name']}")
    return "\n".join(lines)


def candidates_table(attempts: list[dict[str, Any]]) -> str:
    """Format the candidates, best first: estimate, measurement, tiles, and kernels if these differ."""
    kernels_by_plan = [", ".join(group["as"] for group in attempt.get("groups", ())) for attempt in attempts]
    kernels_differ = len(set(kernels_by_plan)) > 1
    rows = []
    for number, (attempt, kernels) in enumerate(zip(attempts, kernels_by_plan, strict=True), 1):
        plan, measured, error = attempt["plan"], attempt["measurement"], attempt["error"]
        result = show.format_seconds(measured["min_s"]) if measured else error["code"] if error else "-"
        rows.append(
            (
                number,
                show.format_seconds(plan["seconds"]),
                result,
                plan["bound"],
                plan["unit"],
                *([kernels] if kernels_differ else []),
                show.format_plan_tiles(plan),
            )
        )
    return show.format_table(
        ("", "estimated", "measured", "bound", "unit", *(["kernels"] if kernels_differ else []), "tiles"), rows
    )
