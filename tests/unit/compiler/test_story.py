"""Stories: every tile of a candidate was found somewhere, and terms combine to the seconds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import roller_svc
from roller_svc import hardware
from roller_svc.compiler.explain import explain_request
from roller_svc.errors import ArgumentError, NoCandidateError
from roller_svc.ir.canonical import from_json, to_json
from roller_svc.ir.estimate import Combines, RateSource, Term, combine_terms
from roller_svc.ir.report import BuildRequest
from roller_svc.ir.story import Story, StoryKernel, StorySearch, StoryStep
from roller_svc.verify.corpus import Case, Run, case_request, parse_cases

PUBLIC = Path(__file__).parents[3] / "bench" / "data" / "public.json"
TARGETS = ("nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "amd-mi300x", "cpu-x86-avx512")
QUICK_CASES, MORE_CASES = 240, 20  # one of so many
MATMUL = "C[m, n] +=! A[m, k] * B[k, n]"
WIDE = {"A": ("bfloat16", (4096, 64)), "B": ("bfloat16", (64, 4096))}
FEW_ROWS = {"A": ("float16", (1, 4096)), "B": ("float16", (4096, 4096))}
CONVOLUTION = "Y = conv2d(X, W, padding=1)"
IMAGES = {"X": ("float32", (1, 64, 56, 56)), "W": ("float32", (64, 64, 3, 3))}
ATTENTION = "Y = attention(Q, K, V, causal=true)"
HEADS = dict.fromkeys("QKV", ("bfloat16", (1, 8, 1024, 64)))
SCAN = "y = cumsum(x, axis=1)"
ROWS = {"x": ("float32", (512, 4096))}


def public_cases(every: int) -> list[Case]:
    return parse_cases(json.loads(PUBLIC.read_text()), small=False, every=every)


def request_of(case: Case, target: str) -> BuildRequest:
    return replace(case_request(case, Run(target)), top_k=10)


def check_story(story: Story) -> None:
    """Assert what holds of every story."""
    for search in story.searches:
        check_search(search)
    for program in story.programs:
        assert program.seconds == pytest.approx(sum(kernel.seconds for kernel in program.kernels if not kernel.runs_once))
        for kernel in program.kernels:
            assert combine_terms(kernel.terms) == pytest.approx(kernel.seconds, rel=1e-3)
            check_found(story, kernel)


def check_search(search: StorySearch) -> None:
    for number, step in enumerate(search.steps):
        assert step.parent is None or step.parent < number
        assert (step.decision == "accepted") or (step.limit is not None and step.limit.needs > step.limit.has)
        assert step.footprint_bytes > 0
        if step.axis is not None:
            assert step.parent is not None
            before, after = search.steps[step.parent].tile, step.tile
            assert [axis for axis in range(len(after)) if before[axis] != after[axis]] == [step.axis]
        for growth in step.growth:
            assert growth.extent > step.tile[growth.axis]


def check_found(story: Story, kernel: StoryKernel) -> None:
    """Assert that a kernel's block tile, and the thread's tile that it is made of, are in the story."""
    *_, (search, step) = places(story, kernel)
    block, thread = (tuple(tile[axis] for axis in search.axes) for tile in kernel.program["tiles"].values())
    assert step.tile == block
    assert (step.base or search.base) == thread
    assert step.seconds is not None
    assert step.seconds <= kernel.seconds * (1 + 1e-12)
    assert search.unit == kernel.program["unit"]
    assert search.view == kernel.view


def places(story: Story, kernel: StoryKernel) -> Iterator[tuple[StorySearch, StoryStep]]:
    for found in kernel.found:
        search = story.searches[found.search]
        yield search, search.steps[found.step]


def check_traffic(story: Story) -> None:
    """Assert that no term of a kernel moves less than the compulsory bytes of its level, but for prepacked weights."""
    (kernel,) = story.programs[0].kernels
    least = {bound["level"]: bound.get("bytes", 0) for bound in story.roofline}
    for term in kernel.terms:
        if term.unit == "B":
            assert term.amount >= 0.99 * least[term.name.removesuffix(" floor")], term


@pytest.mark.parametrize("target", TARGETS)
def test_public_cases_tell_where_their_tiles_are_from_and_what_they_cost(target: str) -> None:
    for case in public_cases(QUICK_CASES):
        story = explain_request(request_of(case, target))
        check_story(story)
        if len(story.programs[0].kernels) == 1:
            check_traffic(story)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_more_public_cases_tell_where_their_tiles_are_from(target: str) -> None:
    for case in public_cases(MORE_CASES):
        try:
            story = explain_request(request_of(case, target))
        except NoCandidateError:
            continue
        check_story(story)
        if len(story.programs[0].kernels) == 1:
            check_traffic(story)


@pytest.mark.parametrize(
    ("expression", "inputs", "target"),
    [
        (MATMUL, WIDE, "nvidia-h200-sxm"),
        (CONVOLUTION, IMAGES, "cpu-x86-avx512"),
        (ATTENTION, HEADS, "nvidia-a100-sxm-80gb"),
        (ATTENTION, HEADS, "nvidia-h200-sxm"),
        (MATMUL, FEW_ROWS, "nvidia-h200-sxm"),
        (SCAN, ROWS, "nvidia-h200-sxm"),
        (SCAN, ROWS, "cpu-x86-avx512"),
        ("Y = softmax(x)", ROWS, "nvidia-h200-sxm"),
        ("y[j, i] = x[i, j]", ROWS, "cpu-x86-avx2"),
    ],
)
def test_story_is_data(expression: str, inputs: dict[str, tuple[str, tuple[int, ...]]], target: str) -> None:
    story = roller_svc.explain(expression, inputs, target=target)
    check_story(story)
    assert from_json(Story, json.loads(json.dumps(to_json(story)))) == story


def test_terms_contain_the_results_that_their_cost_counts() -> None:
    """L2 delivers the operands and takes the results: 32 MiB here."""
    (kernel,) = roller_svc.explain(MATMUL, WIDE, target="nvidia-h200-sxm").programs[0].kernels
    (level,) = (term for term in kernel.terms if term.name == "l2")
    assert level.amount > 2 * 4096 * 4096
    assert level.seconds == pytest.approx(level.amount / level.rate)


def test_operations_are_those_of_the_algorithm_beside_those_of_the_definition() -> None:
    story = roller_svc.explain(CONVOLUTION, IMAGES, target="cpu-x86-avx512", constants=["W"], winograd="always")
    (kernel,) = story.programs[0].kernels
    assert kernel.view.startswith("Winograd")
    assert kernel.operations.executed < kernel.operations.definition / 2
    (causal,) = roller_svc.explain(ATTENTION, HEADS, target="nvidia-h200-sxm").programs[0].kernels
    assert causal.operations.executed < 0.6 * causal.operations.definition


def test_first_program_says_what_limits_it() -> None:
    story = roller_svc.explain(MATMUL, WIDE, target="nvidia-h200-sxm")
    limits = story.programs[0].limited_by
    assert limits is not None
    assert [each.time_saved_fraction for each in limits] == sorted((each.time_saved_fraction for each in limits), reverse=True)
    assert all(program.limited_by is None for program in story.programs[1:])


def test_another_spec_has_another_story() -> None:
    """A sliders' question: with twice the bandwidth, DRAM takes half the time."""
    spec = hardware.load("nvidia-h200-sxm")
    text = "y[i, j] = x[i, j] + 1.0"
    before, after = (
        roller_svc.explain(text, {"x": ("float32", (8192, 8192))}, hardware=each) for each in (spec, faster_memory(spec))
    )
    assert after.device.levels[0].bandwidth_bytes_per_s == 2 * before.device.levels[0].bandwidth_bytes_per_s
    assert after.programs[0].seconds < 0.6 * before.programs[0].seconds


def faster_memory(spec: roller_svc.HardwareSpec) -> roller_svc.HardwareSpec:
    dram, *rest = spec.levels
    return replace(spec, levels=(replace(dram, bandwidth_bytes_per_s=2 * dram.bandwidth_bytes_per_s), *rest))


def test_demanded_tiles_are_found() -> None:
    story = roller_svc.explain(MATMUL, WIDE, target="nvidia-h200-sxm", tiles={"stages": 3})
    check_story(story)
    assert {kernel.program["stages"] for program in story.programs for kernel in program.kernels} == {3}


def test_schedule_by_hand_has_no_story() -> None:
    with pytest.raises(ArgumentError, match="schedule by hand"):
        roller_svc.explain("y[i] = x[i] + 1.0", {"x": ("float32", (64,))}, schedule="y: vectorise i")


def term(name: str, seconds: float, combines: Combines, fraction: float = 1.0) -> Term:
    return Term(name, seconds, combines, seconds, "cycles", 1.0, RateSource.MEASURED, fraction)


def test_terms_combine_as_they_say() -> None:
    overlapping = (term("mma", 3.0, Combines.OVERLAPS), term("l2", 5.0, Combines.OVERLAPS))
    assert combine_terms(overlapping) == 5.0
    assert combine_terms((*overlapping, term("exposed", 1.0, Combines.ADDS), term("launch", 2.0, Combines.AFTER))) == 8.0
    summed = (term("compute", 4.0, Combines.SUMS), term("packing", 3.0, Combines.SUMS))
    assert combine_terms((*summed, *overlapping)) == 7.0
    assert combine_terms((*summed, term("dram", 10.0, Combines.ADDS, 0.25))) == 9.5
    assert combine_terms((*summed, term("dram floor", 9.0, Combines.FLOOR), term("launch", 2.0, Combines.AFTER))) == 11.0
