"""Modules of the page that need no browser, run by node."""

from __future__ import annotations

import json
import random
from typing import Any
from urllib.parse import quote

import pytest
from explorer_pages import SOURCE, run_node
from model_stories import make_profile, make_story

from roller_svc import hardware

pytestmark = [pytest.mark.needs("node")]

ADDRESS = "http://127.0.0.1:8000/"  # of the page


def call(module: str, function: str, *arguments: Any) -> Any:
    """Return what a function of a module returns."""
    program = (
        f"globalThis.location = new URL('{ADDRESS}'); import {{ {function} }} from '{(SOURCE / module).as_uri()}';"
        f"console.log(JSON.stringify({function}(...JSON.parse(process.argv[1])) ?? null));"
    )
    return run_node(program, json.dumps(arguments))


def program_of(tile: int) -> dict[str, Any]:
    return {"kernels": [{"group": "y", "program": {"unit": "avx2", "tiles": {"l1": {"i": tile}}}}]}


def estimate_of(seconds: float) -> dict[str, Any]:
    return {"seconds": seconds, "bound": "dram"}


def test_the_program_of_a_kernel_is_found_by_its_estimate() -> None:
    story = {"programs": [program_of(8), program_of(16)]}
    attempts = [{"estimate": estimate_of(1.0)}, {"estimate": estimate_of(2.0)}]
    report = {"extra": {"report": {"story": story, "attempts": attempts}}}
    assert call("built.js", "storyOf", report, {"estimate": estimate_of(2.0)}) == {"story": story, "number": 1}
    assert call("built.js", "storyOf", report, {"estimate": estimate_of(3.0)}) is None
    assert call("built.js", "storyOf", report, {"estimate": None}) is None  # a schedule by hand
    timed = {"extra": {"report": {"story": story, "attempts": [*attempts[:1], attempts[1] | {"measurement": {"median_s": 3.0}}]}}}
    assert call("built.js", "measuredOf", timed) == {call("built.js", "programText", program_of(16)): 3.0}
    assert call("built.js", "measuredOf", None) == {}
    assert call("built.js", "storyOf", None, {"estimate": estimate_of(2.0)}) is None
    assert call("built.js", "findProgram", story, program_of(16)) == 1
    assert call("built.js", "findProgram", story, program_of(32)) == -1


DIGEST = "sha256:" + "1f" * 32


@pytest.mark.parametrize(
    ("text", "digest"),
    [(DIGEST, DIGEST), (DIGEST.upper(), DIGEST), (f"https://host/k/{quote(DIGEST, safe='')}?view=ptx", DIGEST),
     (f"/k/{DIGEST}?compare=sha256:{'2' * 64}", DIGEST), ("nonsense", None), ("100 %", None), (DIGEST[:-1], None),
     (DIGEST + "0", None), ("", None)],
)  # fmt: skip
def test_a_digest_is_found_in_what_is_pasted(text: str, digest: str | None) -> None:
    assert call("address.js", "findDigest", text) == digest


def test_figures_of_all_launches_are_compared() -> None:
    launches = [{"grid": [size, 1, 1], "block": [128, 1, 1]} for size in (4, 8)]
    resources = [{"registers_per_thread": count, "shared_bytes": 0, "spill_bytes": 0} for count in (32, 40)]
    figures = dict(call("calls.js", "launchFigures", {"launches": launches, "resources": resources}))
    assert (figures["launches"], figures["grid"], figures["grid of launch 2"]) == ("2", "4×1×1", "8×1×1")
    assert (figures["registers"], figures["registers of launch 2"]) == ("32", "40")


def test_code_that_compiles_has_the_options_of_the_request() -> None:
    options = {"tiles": {"split_k": 2}, "strict": True, "family": None, "constants": ["w"]}
    body = {"expression": "y[i] = x[i]", "inputs": {"x": {"dtype": "float32", "shape": [4]}}, "target": "t", "outputs": ["y"]}
    codes = call("launch.js", "launchCodes", body | {"options": options}, None)
    code = codes["python"]
    assert f'"{ADDRESS}v1/kernels:compile"' in codes["curl"]
    for line in ('outputs=["y"],', 'tiles={"split_k": 2},', "strict=True,", "family=None,", 'constants=["w"],'):
        assert f"    {line}\n" in code


@pytest.mark.parametrize(
    ("query", "selection"),
    [("program=2&search=1&step=0", (2, 1, 0)), ("program=-1&step=-1", (None, None, None)), ("step=3", (None, None, 3)),
     ("program=1e3&search=0x1&step=", (None, None, None)), ("program=99999999999", (None, None, None))],
)  # fmt: skip
def test_numbers_of_an_address(query: str, selection: tuple[int | None, ...]) -> None:
    program = f"import {{ readSelection }} from '{(SOURCE / 'address.js').as_uri()}';"
    shown = run_node(program + "console.log(JSON.stringify(readSelection(new URLSearchParams(process.argv[1]))));", query)
    assert tuple(shown[name] for name in ("program", "search", "step")) == selection


def test_request_of_an_address_may_be_written_by_hand() -> None:
    query = "expr=y&target=t&scale=__proto__=2&scale=l2%20bandwidth=2&scale=a=-1&scale=b=Infinity&options=[&input=x=float16[4,]"
    program = f"import {{ readRequest }} from '{(SOURCE / 'address.js').as_uri()}';"
    request = run_node(program + "console.log(JSON.stringify(readRequest(new URLSearchParams(process.argv[1]))));", query)
    assert request["factors"] == {"__proto__": 2, "l2 bandwidth": 2}
    assert request["options"] == {}
    spec = {"levels": [], "tile_levels": ["l1", "registers"], "units": [], "limits": {}}
    assert call("scale.js", "scaled", spec, {"__proto__": 2, "toString": 2}) == spec


@pytest.mark.parametrize(("path", "digest"), [("/k/sha256%3Aab", "sha256:ab"), ("/k/%", "%"), ("/k/%E0%A4", "%E0%A4"), ("/", None)])
def test_digest_of_an_address(path: str, digest: str | None) -> None:
    assert call("address.js", "readDigest", path) == digest


@pytest.mark.parametrize("text", ['{"message": "no healthy upstream"}', "null", "<html>", '{"detail": ["x"], "code": 3}', ""])
def test_an_answer_that_is_not_of_the_service_is_a_problem(text: str) -> None:
    expected = {"status": 503, "detail": "503 Unavailable", "code": "no-answer", "errors": []}
    assert call("problem.js", "readProblem", {"status": 503, "statusText": "Unavailable"}, text) == expected


def test_kernels_that_run_once_are_part_of_no_call() -> None:
    once, first, second = ({"seconds": s, "operations": {"executed": n}} for s, n in ((9.0, 100), (1.0, 10), (2.0, 20)))
    program = {"kernels": [once | {"runs_once": True}, first, second]}
    assert call("calls.js", "longest", program) == second
    assert call("calls.js", "operationsOf", program) == 30
    assert call("calls.js", "onceOf", program) == [once | {"runs_once": True}]


def test_a_slider_steps_back_to_what_a_spec_allows() -> None:
    assert call("scale.js", "fallbacks", 2.0) == pytest.approx([2, 2**0.5, 1])
    assert call("scale.js", "fallbacks", 0.5) == pytest.approx([0.5, 0.5**0.5, 1])
    assert call("scale.js", "fallbacks", 1.9) == pytest.approx([1.9, 1.9 / 2**0.5, 1])
    assert call("scale.js", "fallbacks", 1.0) == [1]


@pytest.mark.parametrize("target", ["nvidia-h200-sxm", "nvidia-b200", "cpu-x86-avx512"])
def test_capacity_and_arithmetic_are_scaled_with_what_depends_on_them(target: str) -> None:
    spec = dict(hardware.to_mapping(hardware.load(target)))
    block = spec["tile_levels"][0]
    for name in (f"{block} capacity", "arithmetic rate", "launch overhead"):
        for factor in (0.25, 0.5, 2.0, 4.0):
            scaled, faults = hardware.find_faults(call("scale.js", "scaled", spec, {name: factor}))
            assert scaled is not None, (name, factor, faults)


def test_a_difference_has_the_lines_of_both_texts_and_as_many_equal_ones_as_there_can_be() -> None:
    rng = random.Random(0)
    pairs = [["\n".join(rng.choices("abc", k=rng.randrange(1, 12))) for _ in range(2)] for _ in range(300)]
    program = f"import {{ diffLines }} from '{(SOURCE / 'diff.js').as_uri()}';"
    found = run_node(
        program + "console.log(JSON.stringify(JSON.parse(process.argv[1]).map((pair) => diffLines(...pair))));", json.dumps(pairs)
    )
    for (before, after), lines in zip(pairs, found, strict=True):
        assert "\n".join(line for sign, line in lines if sign != "+") == before
        assert "\n".join(line for sign, line in lines if sign != "-") == after
        assert sum(sign == " " for sign, _ in lines) == longest_common(before.split("\n"), after.split("\n"))


def longest_common(before: list[str], after: list[str]) -> int:
    table = [[0] * (len(after) + 1) for _ in range(len(before) + 1)]
    for i, first in enumerate(before):
        for j, second in enumerate(after):
            table[i + 1][j + 1] = table[i][j] + 1 if first == second else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


LINKS = [{"first": 2, "last": 4, "source": [7]}, {"first": 6, "last": 6, "source": [40, 7]}, {"first": 9, "last": 9, "source": [8]}]
PARTS = [{"name": "consumer", "first": 2, "last": 30}, {"name": "main loop", "first": 5, "last": 9}]


def test_lines_are_linked_both_ways() -> None:
    found = [call("links.js", "linkOf", LINKS, line) for line in range(1, 11)]
    assert [link and link["source"] for link in found] == [None, [7], [7], [7], None, [40, 7], None, None, [8], None]
    assert call("links.js", "linesOf", LINKS, 7) == [2, 3, 4, 6]
    assert call("links.js", "linesOf", LINKS, 9) == []
    assert call("links.js", "ranges", [2, 3, 4, 6]) == ["2–4", "6"]


def test_a_line_is_in_the_innermost_part() -> None:
    assert [(call("links.js", "partOf", PARTS, line) or {}).get("name") for line in (1, 2, 5, 10)] == [
        None,
        "consumer",
        "main loop",
        "consumer",
    ]


def test_numbers_are_cut_out_of_a_line() -> None:
    number = {"line": 1, "column": 7, "length": 3, "formula": "shared.m", "sources": ["shared.m"]}
    found = call("links.js", "segments", "int a1[128];", [number])
    assert found == ["int a1[", {"number": number, "index": 0, "text": "128"}, "];"]
    assert call("links.js", "segments", "ret", []) == ["ret"]


def test_the_names_of_a_formula_have_values() -> None:
    number = {"formula": "", "sources": ["shared.m", "stages", "m", "A.shape[0]"]}
    kernel = {"program": {"tiles": {"shared": {"m": 128}}, "stages": 6}, "axes": [{"name": "m", "extent": 4096}]}
    assert call("links.js", "namesOf", number, {"kernels": [kernel]}) == "shared.m = 128, stages = 6, m = 4096"
    assert call("links.js", "namesOf", number, {"kernels": [kernel, kernel]}) == ""


MEASURED = """
import { matchProfile, readProfile } from '%s';
const { story, steps } = JSON.parse(process.argv[1]);
const inner = { ...steps[0], operator: 'inner' }, loop = { name: 'loop', kind: 'loop' };
const tried = (run) => { try { return run(); } catch (error) { return error.message; } };
console.log(JSON.stringify([
  tried(() => matchProfile(story, readProfile(JSON.stringify({ steps })))),
  tried(() => matchProfile(story, steps.slice(1))),
  tried(() => matchProfile(story, [...steps, inner])),
  tried(() => matchProfile({ ...story, steps: [...story.steps, loop] }, [...steps, inner])),
]));
"""


def test_a_profile_is_compared_step_by_step() -> None:
    story = make_story(3)
    steps = make_profile(story, 2.0)["steps"]
    program = MEASURED % (SOURCE / "profile.js").as_uri()
    matched, missing, other, looped = run_node(program, json.dumps({"story": story, "steps": steps}))
    assert matched["seconds"] == pytest.approx([2 * seconds for seconds in matched["predicted"]])
    assert sum(matched["seconds"]) == pytest.approx(sum(each["end_s"] - each["start_s"] for each in steps))
    assert (len(matched["lanes"]), matched["end_s"], matched["others"]) == (4, 2 * story["seconds"], 0)
    assert "of another plan" in missing
    assert "has no step inner" in other
    assert looped["others"] == pytest.approx(steps[0]["end_s"] - steps[0]["start_s"])
    assert matched["predicted_s"] == story["seconds"]


DAMAGED = """
import { matchProfile, readProfile } from '%s';
const { story, steps } = JSON.parse(process.argv[1]), loop = { name: 'loop', kind: 'loop' };
const looped = { ...story, steps: [...story.steps, loop] };
const tried = (text) => { try { return matchProfile(looped, readProfile(text)).end_s; } catch (error) { return error.message; } };
const damage = (part) => JSON.stringify({ steps: [{ ...steps[0], ...part }, ...steps.slice(1)] });
const inner = Array.from({ length: 150000 }, (_, i) => ({ operator: 'inner', start_s: i, end_s: i + 1, veu: 0 }));
console.log(JSON.stringify([
  ['no JSON', 'null', '{"steps": []}', ...[{ veu: 1.5 }, { veu: -1 }, { end_s: -1 }, { operator: null }].map(damage)].map(tried),
  [4, 200000, 1e300].map((veu) => tried(damage({ veu }))),
  tried(JSON.stringify({ steps: [...steps, ...inner] })),
]));
"""


def test_a_damaged_profile_is_refused_before_it_is_drawn() -> None:
    story = make_story(3)
    program = DAMAGED % (SOURCE / "profile.js").as_uri()
    unread, beyond, long = run_node(program, json.dumps({"story": story, "steps": make_profile(story, 2.0)["steps"]}))
    assert {text[:31] for text in unread} == {"expected the steps of a profile"}
    assert "a step of core 200000, and this plan has 4 cores" in beyond[1]
    assert all("this plan has 4 cores" in text for text in beyond)
    assert long == 150000  # steps of a loop


def test_a_prediction_is_compared_with_a_time_that_was_measured() -> None:
    assert call("profile.js", "sayError", 152e-6, 190e-6) == "152 µs predicted are 20 % low"
    assert call("profile.js", "sayError", 152e-6, 0) == "152 µs predicted cannot be compared: no time was measured"


def test_a_label_is_never_empty() -> None:
    paths = [["/layer0/MatMul_1", "/layer1/MatMul_2"], ["blocks[0]/conv.3", "a//b"], ["слой1/"]]
    others = [["<b>b0</b>"], ["/"], ["layer/7"]]
    program = f"import {{ labelOf }} from '{(SOURCE / 'labels.js').as_uri()}';"
    program += "console.log(JSON.stringify(JSON.parse(process.argv[1]).map((members) => labelOf({ members }))));"
    assert run_node(program, json.dumps(paths + others)) == ["MatMul ×2", "conv + b", "слой", "<b>b0</b>", "/", "7"]


CHECKED = """
import { isVerdict, readChecked } from '%s';
import { readProblem } from '%s';
const tried = (answer) => { try { return readChecked(answer); } catch (error) { return error.message; } };
const problems = JSON.parse(process.argv[1]).map(([status, text]) => readProblem({ status, statusText: '' }, text));
console.log(JSON.stringify([[null, {}, { seconds: 1 }, { seconds: 1, instructions: [] }].map(tried), problems.map(isVerdict)]));
"""


def test_an_answer_that_does_not_judge_a_plan_is_no_verdict() -> None:
    program = CHECKED % ((SOURCE / "edit.js").as_uri(), (SOURCE / "problem.js").as_uri())
    text = json.dumps({"detail": "nothing orders them", "code": "a-code"})
    given = [(422, text), (404, text), (503, text), (429, text), (401, text), (502, "<html>"), (404, "<html>")]
    answers, verdicts = run_node(program, json.dumps(given))
    assert answers == ["the answer has no seconds and instructions"] * 3 + [{"seconds": 1, "instructions": []}]
    assert verdicts == [True, True, False, False, False, False, False]


DIFFERENCE = """
import { diffFigures, diffPlans } from '%s';
const stories = JSON.parse(process.argv[1]);
console.log(JSON.stringify([diffPlans(stories), diffFigures(stories), diffPlans([stories[0], stories[0]])]));
"""


def test_differences_of_two_plans_add_up_to_their_seconds() -> None:
    one, other = make_story(3), make_story(3)
    for node in other["nodes"][:2]:  # are one operator here, and two in the other plan
        one["nodes"][0]["members"] = [member for each in other["nodes"][:2] for member in each["members"]]
        node["kernel"] = None
    one["nodes"][1]["members"] = ["only here"]
    for each in other["instructions"]:
        if each["kind"] == "execute" and each["start_s"] > 0:
            each["end_s"] -= 0.25e-6
    other["seconds"] = max(each["end_s"] for each in other["instructions"]) + 3e-6
    program = DIFFERENCE % (SOURCE / "plandiff.js").as_uri()
    found, figures, same = run_node(program, json.dumps([one, other]))
    assert same == {"isSameModel": True, "rows": []}
    assert found["isSameModel"]
    total = sum(row["seconds"][1] - row["seconds"][0] for row in found["rows"])
    assert total == pytest.approx(other["seconds"] - one["seconds"])
    assert [0, 1] in [row["nodes"][1] for row in found["rows"]]
    assert any(row.get("name") == "idle cores" for row in found["rows"])
    assert "a call" in [name for name, *_ in figures]


BUCKETS = """
import { diffPlans, findStory } from '%s';
const { story, pairs } = JSON.parse(process.argv[1]), empty = { ...story, nodes: [] };
const tried = (run) => { try { return run(); } catch (error) { return error.message; } };
const answerOf = (given) => (given.length === 1 ? { dims: given[0] } : { buckets: given.map((dims) => ({ dims })) });
console.log(JSON.stringify([
  pairs.map(([given, dims]) => tried(() => findStory(answerOf(given), dims))),
  [[empty, empty], [story, empty]].map((stories) => diffPlans(stories).isSameModel),
]));
"""


def test_two_plans_are_compared_for_the_same_dims() -> None:
    one, other = {"batch": 1, "rows": 8}, {"rows": 8, "batch": 2}
    pairs = [([other, one], {"rows": 8, "batch": 1}), ([{}], {}), ([other, {"batch": 1}], one), ([{}], one), ([one], {})]
    program = BUCKETS % (SOURCE / "plandiff.js").as_uri()
    found, are_same = run_node(program, json.dumps({"story": make_story(1) | {"instructions": []}, "pairs": pairs}))
    assert found[:2] == [{"dims": one}, {"dims": {}}]
    assert "this plan has a bucket of batch = 1, rows = 8, and the other has a bucket of rows = 8, batch = 2" in found[2]
    assert "and the other has fixed shapes" in found[3]
    assert "this plan has fixed shapes, and the other has a bucket of batch = 1, rows = 8" in found[4]
    assert are_same == [True, False]  # two without operators, and one without
