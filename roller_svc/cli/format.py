"""Formatting of results as text and JSON."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from roller_svc.ir.quantities import format_seconds as format_seconds
from roller_svc.on_use import OnUse
from roller_svc.terminal import color_labels, width_of

if TYPE_CHECKING:
    from roller_svc.compiler.reports import finite
else:
    finite = OnUse("roller_svc.compiler.reports:finite")


_GAP = "  "  # between columns
_BELOW = "    "  # before what does not fit in a row
MIN_COLUMN = 24  # characters: a narrower last column is shown below its row
_WHOLE_WORDS: Mapping[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def print_json(document: object) -> None:
    """Print a JSON document to stdout; infinities and NaN become null."""
    json.dump(finite(document), sys.stdout, indent=1, allow_nan=False)
    print()


def print_result(options: argparse.Namespace, facts: object, text: str) -> None:
    """Print a result as JSON where --json is given, else as text."""
    if options.json:
        print_json(facts)
    elif text:
        print(text)


def percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.1%}"


def format_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.4g} {unit}"
        count /= 1024
    return ""


def format_floor(floor: Mapping[str, Any]) -> str:
    """Format the least time of a program and what it consists of."""
    traffic = f"{format_bytes(floor['bytes'])} of {floor['level']} {format_seconds(floor['traffic_seconds'])}"
    arithmetic = f"{floor['operations']:,} operations on {floor['unit']} {format_seconds(floor['arithmetic_seconds'])}"
    return f"{format_seconds(floor['seconds'])} ({traffic}, {arithmetic}, launch {format_seconds(floor['launch_seconds'])})"


def format_rate(plan: Mapping[str, Any], floor: Mapping[str, Any]) -> str:
    """Format the rate of the resource that limits the program: its operations, or its bytes, over the plan's seconds."""
    if floor["arithmetic_seconds"] >= floor["traffic_seconds"]:
        return f"{floor['operations'] / plan['seconds'] / 1e12:.3g} TFLOP/s"
    return f"{float(format(floor['bytes'] / plan['seconds'] / 1e9, '.3g')):g} GB/s"


def print_message(text: str) -> None:
    """Print an error or a note to stderr, with its first word in colour where stderr has colours."""
    print(color_labels(text, sys.stderr), file=sys.stderr, flush=True)


def wrap(text: str, indent: str = "  ", stream: TextIO | None = None) -> str:
    """Break lines at spaces to the width of the stream's terminal (default: stdout); indent what follows a break."""
    width = width_of(stream or sys.stdout)
    return "\n".join(textwrap.fill(line, width, subsequent_indent=indent, **_WHOLE_WORDS) for line in text.splitlines())


def format_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format rows as aligned columns within the width of stdout's terminal.

    Cells of the last column that do not fit are broken at spaces, in their column or, if it is narrow, below the row.
    """
    lines = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    left = sum(widths[:-1]) + len(_GAP) * (len(widths) - 1)
    width = width_of(sys.stdout)
    free = width - left
    if widths[-1] <= free:
        return "\n".join(_join_cells(line, widths) for line in lines)
    widths[-1] = 0
    if free >= MIN_COLUMN:
        shown = (_join_cells([*line[:-1], _break_cell(line[-1], free, " " * left)], widths) for line in lines)
    else:
        rest = max(1, width - len(_BELOW))
        shown = (
            "\n".join([_join_cells(line[:-1], widths[:-1]), *([_BELOW + _break_cell(line[-1], rest, _BELOW)] if line[-1] else [])])
            for line in lines
        )
    return "\n".join(shown)


def _join_cells(cells: Sequence[str], widths: Sequence[int]) -> str:
    return _GAP.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _break_cell(cell: str, free: int, indent: str) -> str:
    return f"\n{indent}".join(textwrap.wrap(cell, free, **_WHOLE_WORDS))


def format_tiles(levels: Mapping[str, Mapping[str, int]]) -> str:
    """Format tiles as in "l2: m=64 n=256 | register: m=8 n=32"."""
    return " | ".join(f"{level}: " + " ".join(f"{a}={n}" for a, n in tile.items()) for level, tile in levels.items())


def format_plan_tiles(plan: Mapping[str, Any]) -> str:
    """Format the tiles of a plan's slowest kernel, with the splits of its reduction and its schedule."""
    kernel = max(plan["kernels"], key=lambda k: k["estimate"]["seconds"])
    fields = [f"{name}={kernel[name]}" for name in ("split_k", "cluster_k", "lanes") if kernel[name] > 1]
    fields += ["pingpong=1"] if kernel["pingpong"] else []
    return " | ".join([format_tiles(plan["tiles"]), *fields])


def format_stages(estimate: Mapping[str, Any]) -> str:
    return ", ".join(f"{stage['name']} {format_seconds(stage['seconds'])}" for stage in estimate["stages"])


def format_compiled_estimate(attempt: Mapping[str, Any]) -> str:
    """Format the estimate with the compiled kernel's resources; '' if there is none."""
    revised = attempt.get("estimate_compiled")
    if not revised:
        return ""
    seconds, planned = format_seconds(revised["seconds"]), attempt["estimate"]["occupancy"]
    return f"as compiled: {seconds}, occupancy {revised['occupancy']:.2f} (planned {planned:.2f})"


def format_launches(facts: Mapping[str, Any]) -> str:
    """Format the launches, one per line: grid, block, shared memory, registers, spills."""
    lines = []
    for launch, used in zip(facts["launches"], facts["resources"], strict=True):
        line = f"  {launch['name']}: grid {_format_extents(launch['grid'])}, block {_format_extents(launch['block'])}"
        if facts["language"] != "c":
            line += f", {used['registers_per_thread']} registers, {used['spill_bytes']} B spilled, {used['shared_bytes']} B shared"
        lines.append(line)
    return "\n".join(lines)


def _format_extents(extents: Sequence[int]) -> str:
    return "×".join(str(extent) for extent in extents)
