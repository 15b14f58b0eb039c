"""The kernel page in Chromium: by mouse, by keyboard alone, by links, and with hostile text."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote, urlencode

import httpx
import pytest
from explorer_pages import (
    GEMM,
    GEMM_INPUTS,
    GEMM_LINK,
    HOSTILE,
    SMALL_LINK,
    STATES,
    Explorer,
    State,
    check_shown_as_text,
    compile_kernel,
    link,
    poison,
    replace_text,
    type_error,
)

pytestmark = [pytest.mark.needs("chromium")]

A100 = "nvidia-a100-sxm-80gb"
ROWS = "y[i] +=! x[i, j]"


def explained(page: Any) -> str:
    """Wait until the text has no error, and return the estimate."""
    page.wait_for_function("() => /explained/.test(document.querySelector('[data-testid=diagnostics]').textContent)")
    return str(page.get_by_test_id("estimate").text_content())


def test_an_error_is_under_the_cursor_until_it_is_corrected(explorer: Explorer) -> None:
    explorer.expected.append("422")
    page = explorer.open(GEMM_LINK)
    page.wait_for_selector(".cm-content")
    type_error(page)
    assert "1:24" in page.get_by_test_id("diagnostics").text_content()
    page.wait_for_selector(".cm-lintRange-error")
    page.keyboard.press("Control+End")
    page.keyboard.type("]")
    explained(page)
    assert page.locator(".cm-lintRange-error").count() == 0
    replace_text(page, "C[m, n] +=! A[m, k] * Q[k, n]")  # an input that there was not before
    page.wait_for_selector('[aria-label="shape of Q"]')
    assert page.get_by_label("shape of Q").input_value() == "64 × 1024"
    assert page.get_by_label("shape of A").input_value() == "4096 × 64"


@pytest.mark.slow
def test_programs_steps_and_devices_are_chosen_by_keyboard(explorer: Explorer) -> None:
    page = explorer.open(GEMM_LINK)
    first = page.get_by_test_id("estimate").text_content()
    page.get_by_test_id("program-0").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.get_by_test_id("program-2").get_attribute("aria-current") == "true"
    page.get_by_label("search", exact=True).select_option(index=0)
    page.get_by_test_id("step-next").focus()
    sentence = page.get_by_test_id("step").text_content()
    page.keyboard.press("ArrowRight")
    assert page.get_by_test_id("step").text_content() != sentence
    page.keyboard.press("ArrowLeft")
    assert page.get_by_test_id("step").text_content() == sentence
    page.wait_for_function("() => document.querySelectorAll('[data-testid=target] svg').length >= 5")
    page.get_by_test_id(f"target-{A100}").focus()
    page.keyboard.press("Enter")
    page.wait_for_function("() => /A100/.test(document.querySelector('.device h2').textContent)")
    assert page.get_by_test_id("estimate").text_content() != first
    assert page.get_by_test_id(f"target-{A100}").get_attribute("aria-pressed") == "true"


@pytest.mark.slow
def test_everything_is_reached_by_tab(explorer: Explorer) -> None:
    page = explorer.open(GEMM_LINK)
    page.wait_for_selector(".cm-content")
    seen = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.dataset.testid ?? document.activeElement.getAttribute('aria-label')"))
    wanted = {"permalink", "expression", "type of A", "shape of A", "A is constant", "compile", f"target-{A100}", "search", "step"}
    assert wanted | {"step-next", "program-0", "launch-code"} <= seen


@pytest.mark.slow
def test_a_kernel_is_compiled_and_its_link_shows_it_again(explorer: Explorer) -> None:
    page = explorer.open(SMALL_LINK)
    compile_kernel(page)
    assert page.get_by_test_id("status").text_content() == "compiled"
    source = page.get_by_test_id("source").text_content()
    assert "void" in source
    page.get_by_role("button", name="ctypes").click()
    assert "launcher=ctypes" in page.get_by_test_id("launch-code").text_content()
    path = page.get_by_test_id("permalink").get_attribute("href")
    assert path.startswith("/k/sha256:")
    again = explorer.open(path)
    again.wait_for_selector("[data-testid=source]")
    assert again.get_by_test_id("source").text_content() == source
    assert again.get_by_test_id("estimate").text_content() == page.get_by_test_id("estimate").text_content()
    assert again.get_by_label("shape of x").input_value() == "4096"
    other = build(explorer, target="cpu-x86-avx2")
    again.get_by_test_id("compare").fill("nonsense")
    again.get_by_test_id("compare").press("Enter")
    assert "got nonsense" in again.get_by_test_id("fault").text_content()
    again.get_by_test_id("compare").fill(explorer.address + other.replace(":", "%3A"))
    again.get_by_test_id("compare").press("Enter")
    again.wait_for_selector("[data-testid=differences]")
    assert again.get_by_test_id("fault").count() == 0
    assert "register" in again.get_by_test_id("differences").text_content()
    assert again.locator("[data-testid=difference] .added").count() > 0
    again.wait_for_function("() => location.search.includes('compare=sha256')")
    restored = explorer.open(again.get_by_test_id("permalink").get_attribute("href"))
    restored.wait_for_selector("[data-testid=difference]")


def build(explorer: Explorer, **body: Any) -> str:
    """Have a kernel compiled by another client; return the path of its page."""
    options = {"winograd": "never", "top_k": 1, "tiles": {"split_k": 2}, "constants": ["z"]}
    request = {"expression": "y[m, n] +=! x[m, k] * z[k, n]", "options": options, "outputs": ["y"], **body}
    request["inputs"] = {name: {"dtype": "float32", "shape": [64, 64]} for name in "xz"}
    answer = httpx.post(f"{explorer.address}/v1/kernels:compile", json=request, headers={"Prefer": "wait=60"}, timeout=90)
    assert "response" in answer.json(), answer.text
    return "/k/" + answer.json()["response"]["digest"]


def refuse_once(page: Any, path: str, status: int) -> None:
    problem = {"status": status, "detail": f"no {path}", "code": "busy", "errors": []}
    page.route(f"**/v1/{path}", lambda route: route.fulfill(status=status, json=problem), times=1)


def chosen_line(page: Any, pane: str) -> str:
    """The line of a listing that is chosen."""
    return str(page.locator(f"[data-testid={pane}] .line.here").text_content())


@pytest.mark.slow
def test_lines_and_numbers_are_followed_to_machine_code(explorer: Explorer) -> None:
    page = explorer.open(link(GEMM, "nvidia-h200-sxm", GEMM_INPUTS, view="sass"))
    compile_kernel(page)
    page.wait_for_selector("[data-testid=sass]")
    page.wait_for_selector("[data-testid=parts]")
    page.wait_for_function("() => !/Linking/.test(document.querySelector('.text').textContent)")
    for part in ("producer", "consumer", "main loop", "epilogue"):
        assert page.locator("[data-testid=parts] button", has_text=part).count() >= 1
    page.locator("[data-testid=source] .line", has_text="matrix_descriptor_128(a_shared").first.click()
    assert "main loop" in page.get_by_test_id("linked").text_content()
    assert "HGMMA" in " ".join(page.locator("[data-testid=sass] .line.linked").all_text_contents())
    page.keyboard.press("ArrowRight")
    said = page.get_by_test_id("number").text_content()
    page.keyboard.press("ArrowRight")
    assert page.get_by_test_id("number").text_content() != said
    page.locator("[data-testid=source] .derived", has_text="32768").first.click()
    assert page.get_by_test_id("number").text_content() == "32768 = shared.m * shared.k * 2 + shared.n * shared.k * 2"
    assert "producer" in page.get_by_test_id("linked").text_content()
    before = chosen_line(page, "source")
    page.keyboard.press("ArrowDown")
    assert chosen_line(page, "source") != before
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.dataset.testid") == "sass"
    page.keyboard.press("ArrowDown")
    assert "sass line" in page.get_by_test_id("linked").text_content()
    page.locator("[data-testid=sass] .line", has_text="UTMALDG").first.click()
    assert page.locator("[data-testid=source] .line.linked", has_text="tma_load_2d").count() >= 1
    page.wait_for_function("() => location.search.includes('line=')")
    again = explorer.open(page.get_by_test_id("permalink").get_attribute("href"), ready="[data-testid=sass]")
    again.wait_for_selector("[data-testid=source] .line.here")
    assert "tma_load_2d" in chosen_line(again, "source")


@pytest.mark.slow
def test_another_program_is_compiled(explorer: Explorer) -> None:
    page = explorer.open(link(ROWS, "cpu-x86-avx2", {"x": "float32[300,500]"}, view="assembly"))
    page.get_by_test_id("program-1").click()
    assert page.get_by_test_id("compile").text_content() == "Compile program 2"
    page.get_by_test_id("compile").click()
    page.wait_for_selector("[data-testid=assembly]")
    assert page.get_by_test_id("program-1").get_attribute("aria-current") == "true"
    page.locator("[data-testid=assembly] .line", has_text="ret").first.click()
    assert "assembly line" in page.get_by_test_id("linked").text_content()
    again = explorer.open(page.get_by_test_id("permalink").get_attribute("href"), ready="[data-testid=assembly]")
    again.wait_for_selector("[data-testid=program-1][aria-current=true]")
    assert again.locator("[data-testid=remark]").count() == 0


@pytest.mark.slow
def test_a_service_that_refuses_once_is_asked_again(explorer: Explorer) -> None:
    explorer.expected += ["429", "503"]
    page = explorer.open(SMALL_LINK)
    page.wait_for_function("() => document.querySelectorAll('[data-testid=target] svg').length >= 5")
    paths = ("kernels:compile", "estimates", "kernels:explain")
    for path, status in zip(paths, (429, 503, 503), strict=True):
        refuse_once(page, path, status)
    page.get_by_test_id("compile").click()
    page.wait_for_function("() => /no kernels:compile/.test(document.querySelector('[data-testid=status]').textContent)")
    page.get_by_label("shape of x").fill("2048")
    page.get_by_label("shape of x").press("Enter")
    page.wait_for_selector("text=Below is the last program that was explained")
    assert page.get_by_test_id("compile").is_enabled()
    page.get_by_test_id("again").click()
    page.wait_for_function("() => /no estimates/.test(document.querySelector('[data-testid=trouble]')?.textContent)")
    assert page.locator(".old").count() == 0
    compile_kernel(page)
    held: list[Any] = []
    page.route("**/v1/kernels:explain", lambda route: held.append(route))
    with page.expect_request("**/kernels:explain"):
        page.get_by_test_id(f"target-{A100}").click()
    page.wait_for_selector(".waits")
    assert page.get_by_test_id("compile").is_disabled()  # what is shown is of another device
    held.pop().continue_()
    page.unroute("**/v1/kernels:explain")
    explained(page)
    assert page.get_by_test_id("compile").is_enabled()


@pytest.mark.slow
def test_a_kernel_is_explained_as_it_was_built(explorer: Explorer) -> None:
    spec = httpx.get(f"{explorer.address}/v1/hardware/cpu-x86-avx2", timeout=60.0).json() | {"id": "my-cpu"}
    page = explorer.browser.new_page()
    with page.expect_request("**/kernels:explain") as asked:
        page.goto(explorer.address + build(explorer, hardware=spec))
    sent = asked.value.post_data_json
    assert sent["options"] == {"winograd": "never", "top_k": 1, "tiles": {"split_k": 2}, "constants": ["z"]}
    assert (sent["hardware"]["id"], sent["outputs"]) == ("my-cpu", ["y"])
    explained(page)
    assert page.locator("[data-testid=program-1], [data-testid=remark], .diagnostics b").count() == 0
    assert "split-k 2" in page.get_by_test_id("program-0").text_content()
    assert 'tiles={"split_k": 2},' in page.get_by_test_id("launch-code").text_content()
    page.get_by_role("button", name="without").click()  # another request, so no kernel
    page.wait_for_selector("[data-testid=program-1]")
    assert page.locator("[data-testid=options], [data-testid=source]").count() == 0


@pytest.mark.slow
def test_a_kernel_that_cannot_be_explained_says_so(explorer: Explorer) -> None:
    path = build(explorer, target="cpu-x86-avx2", options={"schedule": "y: parallel m"})
    page = explorer.browser.new_page()
    page.goto(explorer.address + path)
    assert "schedule by hand" in page.get_by_test_id("remark").text_content()
    page.wait_for_selector("[data-testid=source]")


@pytest.mark.slow
def test_a_link_restores_program_search_and_step(explorer: Explorer) -> None:
    page = explorer.open(link(GEMM, "nvidia-h200-sxm", GEMM_INPUTS, program=1, search=0, step=2))
    assert page.get_by_test_id("program-1").get_attribute("aria-current") == "true"
    assert page.get_by_label("step", exact=True).input_value() == "2"
    page.get_by_test_id("step-next").click()
    page.wait_for_function("() => location.search.includes('step=3')")
    again = explorer.open(page.get_by_test_id("permalink").get_attribute("href"))
    assert again.get_by_label("step", exact=True).input_value() == "3"
    assert again.get_by_test_id("step").text_content() == page.get_by_test_id("step").text_content()


@pytest.mark.slow
def test_a_kernel_that_runs_once_is_part_of_no_call(explorer: Explorer) -> None:
    text = "S[n] += W[k, n]\nC[m, n] +=! A[m, k] * W[k, n]\nD[m, n] = C[m, n] + S[n]"
    page = explorer.open(link(text, "cpu-x86-avx2", {"A": "float32[4,4096]", "W": "float32[4096,4096]"}, constant="W"))
    assert "of constants alone" in page.get_by_test_id("once").text_content()
    ends = page.locator(".verdict .terms rect").evaluate_all(
        "(all) => all.map((bar) => ['x', 'width'].reduce((end, name) => end + parseFloat(bar.getAttribute(name)), 0))"
    )
    assert max(ends) == pytest.approx(100, abs=0.1)  # percent


@pytest.mark.slow
def test_links_that_were_written_by_hand_open(explorer: Explorer) -> None:
    explorer.expected.append("404")
    for query in ("program=-1&step=-1", "scale=__proto__=2", "search=1"):
        page = explorer.open(f"{GEMM_LINK}&{query}")
        assert page.get_by_test_id("program-0").get_attribute("aria-current") == "true", query
    assert page.get_by_label("search", exact=True).input_value() == "1"
    page = explorer.open(f"{GEMM_LINK}&scale=warp drive=2")
    page.wait_for_selector("[data-testid=trouble]")
    assert "no warp drive; it has dram bandwidth" in page.get_by_test_id("trouble").text_content()
    page = explorer.browser.new_page()
    page.goto(explorer.address + "/k/%")
    page.wait_for_selector("[data-testid=diagnostics] b")
    assert "%" in page.get_by_test_id("diagnostics").text_content()


@pytest.mark.slow
def test_another_spec_is_tried_by_sliders_and_as_text(explorer: Explorer) -> None:
    explorer.expected.append("422")
    page = explorer.open(link(GEMM, "nvidia-h200-sxm", GEMM_INPUTS, scale="l2 bandwidth=2"))
    page.wait_for_selector("[data-testid=effect]")
    assert page.get_by_label("l2 bandwidth").input_value() == "1"  # octaves
    doubled = page.get_by_test_id("estimate").text_content()
    page.get_by_label("l2 bandwidth").focus()
    for _ in range(2):
        with page.expect_response("**/kernels:explain"):
            page.keyboard.press("ArrowLeft")
    page.wait_for_function("(old) => document.querySelector('[data-testid=estimate]').textContent !== old", arg=doubled)
    assert page.locator("[data-testid=effect]").count() == 0  # the device as it is
    page.get_by_label("shared bandwidth").focus()
    page.keyboard.press("End")  # four times: more than the banks give
    page.wait_for_selector("[data-testid=held]")
    assert "banks" in page.get_by_test_id("held").text_content()
    assert page.get_by_label("shared bandwidth").input_value() == "0"
    explained(page)
    page.get_by_text("as text").click()
    text = page.get_by_label("spec as text")
    text.fill(text.input_value().replace('"num_cores": 132', '"num_cores": -1'))
    text.blur()
    page.wait_for_selector("[data-testid=spec] [role=alert]")
    assert '"num_cores": -1' in text.input_value()
    text.fill(text.input_value().replace('"num_cores": -1', '"num_cores": 132').replace("0.000002,", "0.000004,"))
    text.blur()  # launches take longer
    page.wait_for_selector("[data-testid=effect]")
    assert "more; the tiles stay" in page.get_by_test_id("effect").text_content()
    page.get_by_test_id("target-nvidia-a100-sxm-80gb").click()
    page.get_by_label("l2 bandwidth").wait_for()  # of the other device
    page.route("**/v1/estimates", lambda _: None)  # unanswered: what the devices said is of another program
    page.get_by_label("type of A").select_option("float16")
    page.wait_for_function("() => document.querySelector('[data-testid=target-nvidia-t4] em').textContent === '…'")


VIEWS = ((390, "light"), (1280, "dark"), (1920, "light"))


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
def test_axe_finds_nothing(explorer: Explorer, axe: str, state: State) -> None:
    if state.name == "error":
        explorer.expected.append("422")
    number = STATES.index(state)
    for width, theme in VIEWS if number == 0 else (VIEWS[number % len(VIEWS)],):
        page = state.open(explorer, width, theme, bypass_csp=True)  # the policy would stop axe
        page.evaluate(axe)
        found = page.evaluate("axe.run().then((result) => result.violations)")
        assert [(each["id"], [node["target"] for node in each["nodes"]]) for each in found] == [], (width, theme)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
        page.context.close()


# ---------------------------------------------------------------- text is shown as text


def answer_explain(page: Any, **answer: Any) -> None:
    """Have the page get an answer that no service gives."""
    page.unroute("**/kernels:explain")
    page.route("**/kernels:explain", lambda route: route.fulfill(**answer))


@pytest.mark.slow
def test_typed_text_is_shown_as_text(explorer: Explorer) -> None:
    explorer.expected.append("422")
    page = explorer.open(GEMM_LINK)
    page.wait_for_selector(".cm-content")
    for text in HOSTILE:
        with page.expect_response("**/kernels:explain") as response:
            replace_text(page, text)
        assert response.value.status == 422
        page.wait_for_selector("[data-testid=diagnostics] b")
        assert text in page.get_by_test_id("expression").text_content()
        check_shown_as_text(page)


@pytest.mark.slow
def test_links_are_shown_as_text(explorer: Explorer) -> None:
    explorer.expected.append("404")
    for text in HOSTILE:
        query = [("expr", GEMM), ("target", "nvidia-h200-sxm"), ("input", f"{text}=float16[4]"), ("program", text), ("view", text)]
        check_shown_as_text(explorer.open("/?" + urlencode([*query, ("constant", text), ("step", text), ("search", text)])))
    page = explorer.browser.new_page()
    for text in (each for each in HOSTILE if "/" not in each):
        page.goto(explorer.address + "/k/" + quote(text))
        page.wait_for_selector("[data-testid=diagnostics] b")
        assert text in page.get_by_test_id("diagnostics").text_content()
        check_shown_as_text(page)


@pytest.mark.slow
def test_errors_are_shown_as_text(explorer: Explorer) -> None:
    explorer.expected.append("422")
    page = explorer.open(GEMM_LINK)
    page.wait_for_selector(".cm-content")
    for i, text in enumerate(HOSTILE, 1):
        errors = [{"line": 1, "column": 1, "end_column": 9, "message": text, "hint": text}]
        answer = json.dumps({"status": 422, "code": text, "detail": text, "errors": errors})
        answer_explain(page, status=422, body=answer, content_type="application/problem+json")
        replace_text(page, GEMM + " " * i)
        page.wait_for_function("(text) => document.querySelector('[data-testid=diagnostics]').textContent.includes(text)", arg=text)
        page.locator(".cm-lintRange-error").first.hover()
        page.wait_for_selector(".cm-tooltip-lint")
        check_shown_as_text(page)


@pytest.mark.slow
def test_names_of_a_story_are_shown_as_text(explorer: Explorer) -> None:
    page = explorer.open(GEMM_LINK)
    with page.expect_response("**/kernels:explain") as response:
        page.get_by_test_id(f"target-{A100}").click()
    story = response.value.json()
    for i, text in enumerate(HOSTILE, 1):
        answer_explain(page, json=poison(story, text))
        page.get_by_label("shape of A").fill(f"{4096 + i} × 64")
        page.get_by_label("shape of A").press("Enter")
        page.wait_for_function("(text) => document.querySelector('.device h2').textContent === text", arg=text)
        check_shown_as_text(page)
