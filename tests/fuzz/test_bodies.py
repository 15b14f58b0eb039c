"""Requests of a hostile client to a service in a process of its own: none breaks it, none is dear, none gets into code.

tests/fuzz/load.py runs the long form: `python tests/fuzz/load.py fuzz --count 10000`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from bodies import PROGRAMS, Request, request
from c_text import leaks, readings
from hostile import HOSTILE
from judge import RSS_MOST_BYTES, Judge, Summary, run
from service_process import ServiceProcess, running

QUICK_COUNT, QUICK_SEED = 100, 27
LONG_S, LONG_SEED = 60.0, 1
REACHED_IN = 6000  # requests: of the texts of a spec few are drawn, and fewer the more it has


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with running("--workers", "2") as process:
        Judge(process).warm()
        yield process


def check(summary: Summary, *, built_least: int) -> None:
    faults = [f"{seed}: {fault}" for seed, fault in summary.faults]
    assert not faults, "\n".join([*faults, "(27:28 again: tests/fuzz/load.py --seed 27 fuzz --first 28 --count 1)"])
    assert summary.rss_peak_bytes < RSS_MOST_BYTES
    # a run in which nothing was built, or nothing refused, would show nothing
    assert summary.built >= built_least
    assert sum(count for status, count in summary.statuses.items() if status.startswith("4")) > summary.requests / 5


@pytest.mark.slow
def test_no_request_breaks_the_service_or_gets_into_code(service: ServiceProcess) -> None:
    check(run(service, QUICK_SEED, count=QUICK_COUNT), built_least=5)


@pytest.mark.slow
def test_a_minute_of_requests(service: ServiceProcess) -> None:
    check(run(service, LONG_SEED, seconds=LONG_S), built_least=20)


def built_with(service: ServiceProcess, name: str, marker: str) -> tuple[list[str], Summary]:
    """Faults of a build for a device of this name."""
    judge = Judge(service)
    spec = judge.spec("cpu-x86-avx2") | {"name": name}
    body = {"expression": "y[i] = x[i] * 2.0", "inputs": {"x": {"dtype": "float32", "shape": [64]}}, "hardware": spec}
    headers = {"Content-Type": "application/json", "Prefer": "wait=30"}
    found = judge.judge(Request(name, "POST", "/v1/kernels:compile", headers, json.dumps(body), (marker,)))
    return found, judge.summary


def test_a_plain_name_is_built(service: ServiceProcess) -> None:
    faults, summary = built_with(service, "plain zq0123456789 (two cores, 3.2 GHz)", "zq0123456789")
    assert faults == []
    assert summary.built == 1


@pytest.mark.parametrize("form", [form for form in HOSTILE if "*" in form and "@" in form and len(form) < 100])
def test_no_name_of_a_device_ends_a_comment(service: ServiceProcess, form: str) -> None:
    faults, _ = built_with(service, form.replace("@", "zq0123456789"), "zq0123456789")
    assert faults == []


# -- the fuzzer itself: what it is to find, it finds -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("/* zqa */ int x;", []),
        ("// zqa\nint x;", []),
        ("/* a *\\\n/ int zqa; /* b */", ["zqa"]),  # a spliced end
        ("/* a *\\ \n/ int zqa; /* b */", ["zqa"]),  # gcc joins over blanks
        ("// a ??/\nint zqa;", []),  # with trigraphs it is one comment, and without ...
        ("// a \nint zqa;", ["zqa"]),
        ("/* a *??/\n/ int zqa; /* b */", ["zqa"]),
        ("// a \\\nint zqa;", []),
        ('char *s = "/*"; int zqa; /* */', ["zqa"]),
        ("char c = '\"'; /* zqa */ char d = '\"';", []),
        ("char c = '\\''; int zqa;", ["zqa"]),
        ('char *s = "zqa";', ["zqa"]),
        ("/* a */ zqa /* b */", ["zqa"]),
        ("#define zqa 1", ["zqa"]),
        ("/* never closed zqa", []),
    ],
)
def test_texts_are_found_where_a_compiler_reads_them(text: str, found: list[str]) -> None:
    expected = ["zqa"] if text.startswith("// a ??/") else found  # ... it is code: either reading counts
    assert sorted(set(leaks(text, ["zqa"], []))) == expected


def test_names_may_be_identifiers_and_nothing_else() -> None:
    assert leaks("float zqa_0 = zqa[3]; /* zqa */", [], ["zqa"]) == []
    assert leaks('puts("zqa");', [], ["zqa"]) == ["zqa"]


def test_words_that_no_generator_writes_are_found() -> None:
    assert leaks('asm(".incbin \\"x\\"");', [], []) == ["incbin"]
    assert leaks("/* incbin */ int x;", [], []) == []


def test_comments_become_blanks_and_nothing_else() -> None:
    assert readings("int/* a */x;") == ("int x;",)


def test_a_seed_and_a_number_make_the_same_request() -> None:
    first = [request(5, index) for index in range(60)]
    assert [request(5, index) for index in range(60)] == first
    assert [request(6, index) for index in range(60)] != first
    assert all(json.loads(one.as_json())["content"] == one.content for one in first)


@pytest.mark.slow
def test_every_part_of_a_body_is_reached() -> None:
    """Hostile texts stand in each free text, in keys, in the expression, in headers and in paths."""
    fields = ("id", "name", "vendor", "arch", "family", "isa", "sources.text", "sources.fields", "measured.how",
              "levels.name", "levels.scope", "units.name", "units.in_dtype")  # fmt: skip
    missing = {f".hardware.{field}" for field in fields} | {"path", "no JSON", "header Prefer", "header Host"}
    missing |= {".expression", ".target", ".options.select", ".options.runtime", ".items.expression", ".targets"}
    missing |= {"key of ", "key of .hardware", "key of .inputs", "key of .options"}
    for index in range(REACHED_IN):
        missing -= hostile_places(request(3, index))
        if not missing:
            break
    assert sorted(missing) == []


def hostile_places(one: Request) -> set[str]:
    """Where hostile texts stand in a request."""
    seen = {f"header {name}" for name, value in one.headers.items() if "zq" in value}
    seen |= {"path"} if "zq" in one.path else set()
    try:
        body = json.loads(one.content)
    except (ValueError, RecursionError):
        return seen | {"no JSON"}
    pending: list[tuple[str, object]] = [("", body)]
    while pending:
        where, node = pending.pop()
        if isinstance(node, dict):
            seen |= {f"key of {where}" for key in node if "zq" in key}
            pending += [(f"{where}.{key}" if "zq" not in key else where, value) for key, value in node.items()]
        elif isinstance(node, list):
            pending += [(where, value) for value in node[:50]]
        elif isinstance(node, str) and "zq" in node:
            seen.add(where)
    return seen


def test_programs_that_are_mutated_are_valid_at_first(service: ServiceProcess) -> None:
    judge = Judge(service)
    items = [{"expression": expression, "inputs": inputs} for expression, inputs in PROGRAMS]
    assert [one.get("error") for one in judge.estimates(items, "cpu-x86-avx2")] == [None] * len(PROGRAMS)
