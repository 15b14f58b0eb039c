"""HTML of results for notebooks: text and SVG without scripts, styles of their own, or addresses.

Terms that overlap are not stacked: the longest is the bar, the others are marks where they would end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from roller_svc.ir.estimate import Candidate, Combines, Term
from roller_svc.ir.model_story import WAIT, ModelStory
from roller_svc.ir.quantities import format_seconds
from roller_svc.ir.report import Plan

WIDTH, HEIGHT = 520, 18
# Readable on white and on black. Memory levels have one colour each, arithmetic and launches are grey.
_COLOURS = {"dram": "#3f7fe0", "shared": "#c97a00", "launch": "#8b93a1", "exposed": "#a7aebb"}
_CACHE, _WORK = "#0e9a8a", "#737a88"


def make_card(title: str, headline: str, lines: Iterable[str], drawing: str = "") -> str:
    """Return a card: a title in code, a headline, a drawing, and lines of text. All text is escaped."""
    small = "".join(f'<div style="font-size:11px;opacity:.8">{escape(line)}</div>' for line in lines)
    return (
        f'<div style="font-family:system-ui,sans-serif;font-size:13px"><code style="white-space:pre-wrap">{escape(title)}</code>'
        f'<div style="margin:4px 0">{escape(headline)}</div>{drawing}{small}</div>'
    )


def draw_plan(plan: Plan | None) -> str:
    """Return a bar of terms for each kernel of a call that has terms; nothing without a plan."""
    if plan is None:
        return ""
    whole = max(choice.estimate.seconds for choice in plan.calls)
    return "".join(_draw_kernel(choice, whole) for choice in plan.calls if choice.terms)


def draw_timeline(story: ModelStory) -> str:
    """Return what each core does when, the longest operators darkest. Boxes within a pixel are one."""
    most = max((node.seconds for node in story.nodes), default=0.0) or 1.0
    lanes: dict[int, float] = {}  # where the last box of each core ends
    parts = []
    for each in story.instructions:
        node = None if each.step is None else story.steps[each.step].node
        if each.kind == WAIT:
            continue
        x, end = (WIDTH * at / story.seconds for at in (each.start_s, each.end_s))
        veus = range(story.veus) if each.veu is None else (each.veu,)
        if end < min(lanes.get(veu, -1.0) for veu in veus) + 1:
            continue
        lanes |= dict.fromkeys(veus, end)
        share = 0.25 if node is None else 0.25 + 0.75 * story.nodes[node].seconds / most
        parts.append(
            f'<rect x="{x:.1f}" y="{veus[0] * HEIGHT}" width="{max(0.5, end - x - 0.5):.1f}" height="{len(veus) * HEIGHT - 2}" '
            f'fill="{_CACHE}" fill-opacity="{share:.2f}"/>'
        )
    label = f"{len(story.instructions)} instructions on {story.veus} cores in {format_seconds(story.seconds)}"
    return f'<svg width="{WIDTH}" height="{story.veus * HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def describe_tiles(plan: Plan | None) -> list[str]:
    """Return unit and tiles of each kernel, and the seconds of those that no call runs. None: of a schedule by hand."""
    if plan is None:
        return ["a schedule by hand"]
    return [f"{choice.program.unit.name}: {choice.program.tile_text}{_describe_once(choice)}" for choice in plan.choices]


def _describe_once(choice: Candidate) -> str:
    return f" (once, before all calls: {format_seconds(choice.estimate.seconds)})" if choice.runs_once else ""


def _draw_kernel(choice: Candidate, whole_s: float) -> str:
    stacked, marks = _arrange(choice.terms)
    parts, x = [], 0.0
    for term, seconds in stacked:
        width = WIDTH * seconds / whole_s
        parts.append(f'<rect x="{x:.1f}" width="{width:.1f}" height="{HEIGHT}" fill="{_colour(term)}"/>')
        x += width
    for term, seconds in marks:
        at = WIDTH * seconds / whole_s
        parts.append(f'<rect x="{at - 2:.1f}" y="3" width="4" height="{HEIGHT - 3}" fill="#fff"/>')
        parts.append(f'<rect x="{at - 1:.1f}" y="3" width="2" height="{HEIGHT - 3}" fill="{_colour(term)}"/>')
    said = ", ".join(f"{term.name} {format_seconds(term.seconds)}" for term in choice.terms)
    label = escape(f"{format_seconds(choice.estimate.seconds)}: {said}", quote=True)
    legend = "".join(
        f'<span style="margin-right:12px"><span style="color:{_colour(term)}">■</span> {escape(term.name)} '
        f"{format_seconds(term.seconds)}</span>"
        for term in choice.terms
    )
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
        f'<div style="font-size:11px">{legend}</div>'
    )


def _arrange(terms: Sequence[Term]) -> tuple[list[tuple[Term, float]], list[tuple[Term, float]]]:
    """Return the terms that make up the seconds, one after the other, and those that are hidden by them, with seconds."""
    counted = [(term, term.fraction * term.seconds) for term in terms]
    summed = [each for each in counted if each[0].combines is Combines.SUMS]
    overlapping = sorted((each for each in counted if each[0].combines is Combines.OVERLAPS), key=lambda each: -each[1])
    if sum(seconds for _, seconds in summed) < max((seconds for _, seconds in overlapping), default=0.0):
        stacked, marks = overlapping[:1], [*overlapping[1:], *summed]
    else:
        stacked, marks = summed, overlapping
    stacked += [each for each in counted if each[0].combines is Combines.ADDS]
    body_s = sum(seconds for _, seconds in stacked)
    stacked += [(term, seconds - body_s) for term, seconds in counted if term.combines is Combines.FLOOR and seconds > body_s]
    stacked += [each for each in counted if each[0].combines is Combines.AFTER]
    return stacked, marks


def _colour(term: Term) -> str:
    name = term.name.removesuffix(" floor")
    return _COLOURS.get(name, _CACHE if term.unit == "B" else _WORK)
