"""Chromium that looks at the page, and the states of the page that are checked and pictured."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from model_stories import make_plan, make_profile, make_slower, make_story
from waiting import PATIENCE_S

ESTIMATE = "[data-testid=estimate]"
CHROMIUM = "/usr/bin/chromium"
SOURCE = Path(__file__).resolve().parents[2] / "web" / "src"
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
# Typing over a selection makes Chromium apply a style to it, which the policy blocks.
HARMLESS = "Applying inline style violates"


def run_node(program: str, *arguments: str) -> Any:
    """Run a module in node and return the JSON that it prints."""
    command = ["node", "--input-type=module", "--eval", program, "--", *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@dataclass
class Explorer:
    """Tabs that show the page, and what went wrong in them."""

    browser: Any
    address: str
    faults: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)  # faults that the test causes: parts of their text

    def open(
        self,
        path: str = "/",
        width: int = 1280,
        theme: str = "light",
        *,
        bypass_csp: bool = False,
        ready: str = ESTIMATE,
        prepare: Callable[[Any], object] = lambda _: None,
    ) -> Any:
        """Open a tab, which `prepare` gets before, and wait for what is ready: a verdict."""
        page = self.browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme, bypass_csp=bypass_csp)
        page.set_default_timeout(PATIENCE_S * 1e3)
        page.on("console", lambda message: self._note(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self._note(str(error)))
        page.on("request", lambda request: self._check(request.url))
        prepare(page)
        page.goto(self.address + path)
        page.wait_for_selector(ready)
        return page

    def _note(self, text: str) -> None:
        if not any(part in text for part in (HARMLESS, *self.expected)):
            self.faults.append(text)

    def _check(self, url: str) -> None:
        if not url.startswith((self.address, "data:")):
            self.faults.append(f"a request to {url}")


GEMM = "C[m, n] +=! A[m, k] * B[k, n]"
GEMM_INPUTS = {"A": "bfloat16[4096,64]", "B": "bfloat16[64,4096]"}
ATTENTION_INPUTS = {"Q": "bfloat16[2,32,2048,128]", "K": "bfloat16[2,8,2048,128]", "V": "bfloat16[2,8,2048,128]"}
CONVOLUTION_INPUTS = {"X": "float32[1,64,56,56]", "W": "float32[64,64,3,3]", "b": "float32[64]"}


def link(expression: str, target: str, inputs: dict[str, str], **others: str | int) -> str:
    """Return the address of a program."""
    named = [("input", f"{name}={kind}") for name, kind in inputs.items()]
    return "/?" + urlencode([("expr", expression), ("target", target), *named, *others.items()])


GEMM_LINK = link(GEMM, "nvidia-h200-sxm", GEMM_INPUTS)
SMALL_LINK = link("y[i] = x[i] + 1.0", "cpu-x86-avx2", {"x": "float32[4096]"})


def replace_text(page: Any, text: str) -> None:
    """Type over the whole text, by keyboard."""
    page.get_by_test_id("expression").focus()
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(text)


def type_error(page: Any) -> None:
    replace_text(page, "C[m, n] +=! A[m, k] * B[k, n")
    page.wait_for_selector("[data-testid=diagnostics] b")


def step_to_a_limit(page: Any) -> None:
    """Step through the search of the chosen program up to its first refused tile."""
    for _ in range(60):
        if page.locator("[data-testid=step] .bad").count():
            return
        if page.get_by_test_id("step-next").is_disabled():
            return
        page.keyboard.press("ArrowRight")


def compile_kernel(page: Any) -> None:
    page.get_by_test_id("compile").click()
    page.wait_for_selector("[data-testid=source]")


OTHER = """async () => {
  const body = { expression: 'y[i] = x[i] * 2.0', inputs: { x: { dtype: 'float32', shape: [4096] } }, target: 'cpu-x86-avx2' };
  const headers = { 'Content-Type': 'application/json', Prefer: 'wait=60' };
  const answer = await fetch('/v1/kernels:compile', { method: 'POST', body: JSON.stringify(body), headers });
  return (await answer.json()).response.digest;
}"""


def compare_kernels(page: Any) -> None:
    """Compile a kernel, and compare it with another one."""
    compile_kernel(page)
    page.get_by_test_id("compare").fill(page.evaluate(OTHER))
    page.get_by_test_id("compare").press("Enter")
    page.wait_for_selector("[data-testid=difference]")
    page.get_by_test_id("difference").scroll_into_view_if_needed()


def show_sass(page: Any) -> None:
    """Compile a kernel, and choose a product of its main loop, and a number in it."""
    compile_kernel(page)
    page.get_by_role("button", name="sass").click()
    page.wait_for_selector("[data-testid=sass]")
    page.wait_for_selector("[data-testid=parts]")
    page.wait_for_function("() => !/Linking/.test(document.querySelector('.text').textContent)")
    page.locator("[data-testid=source] .line", has_text="matrix_descriptor_128(a_shared").first.click()
    page.keyboard.press("ArrowRight")
    page.get_by_test_id("sass").scroll_into_view_if_needed()


@dataclass(frozen=True)
class State:
    """A state of the page."""

    name: str
    path: str
    reach: Callable[[Any], None] = lambda _: None
    ready: str = ESTIMATE
    prepare: Callable[[Any], None] = lambda _: None

    def open(self, explorer: Explorer, width: int, theme: str, *, bypass_csp: bool = False) -> Any:
        """Open a tab in this state."""
        page = explorer.open(self.path, width, theme, bypass_csp=bypass_csp, ready=self.ready, prepare=self.prepare)
        self.reach(page)
        return page


def answer_story(page: Any, story: dict[str, Any]) -> None:
    """Have a page get the story of a model."""
    page.route("**/v1/models/*/story", lambda route: route.fulfill(json=story))


def answer_farm(page: Any, operations: list[dict[str, Any]], **figures: Any) -> None:
    """Have a page get operations, and what is not usual of the farm's figures."""
    usual = {"window_s": 300.0, "queues": [], "workers": {"active": 1}, "ended": {"ok": 3}, "wait_s": {"0.5": 0.2}, "build_s": {}}
    farm = usual | {"submissions": {"hit": 14, "miss": 26, "joined": 0}} | figures
    page.route("**/v1/farm", lambda route: route.fulfill(json=farm))
    listed = {"operations": operations, "next_page_token": ""}
    page.route("**/v1/operations?*", lambda route: route.fulfill(json=listed))
    page.route("**/v1/farm/events", lambda route: route.fulfill(content_type="text/event-stream", body="retry: 2000\n\n"))


def make_operation(number: int, **fields: Any) -> dict[str, Any]:
    """Return an operation that waited and was built for a second each."""
    times = {f"{name}_time": f"2026-11-21T18:27:{number + i:02d}.000Z" for i, name in enumerate(("create", "start", "end"))}
    return {
        "name": f"operations/{number}",
        "done": True,
        "metadata": {"stage": "done", "cache": "miss", "action": None, "attempt": 1, **times},
        "request": {"expression": f"C[m, n] +=! A[m, k] * B[k, n] where m in {number}", "target": "nvidia-h200-sxm"},
        **fields,
    }


FAILED = {"status": 501, "detail": "hipcc is not installed", "code": "toolchain-missing", "errors": []}
OPERATIONS = [make_operation(1, response={"digest": "sha256:abc"}), make_operation(3, error=FAILED), make_operation(4)]


def pick_and_zoom(page: Any) -> None:
    """Choose the second kernel's operator, and zoom into the timeline."""
    page.locator("[data-testid=operators] button").nth(1).click()
    page.get_by_test_id("timeline").focus()
    for key in "wwd":
        page.keyboard.press(key)


def show_profile(page: Any) -> None:
    """Show a profile beside the prediction, and choose an operator."""
    profile = json.dumps(make_profile(make_story(40), 1.25)).encode()
    page.get_by_test_id("profile").set_input_files({"name": "profile.json", "mimeType": "application/json", "buffer": profile})
    page.wait_for_selector("[data-testid=measured]")
    page.locator("[data-testid=operators] button").nth(1).click()
    page.get_by_test_id("timeline").scroll_into_view_if_needed()


def answer_two_plans(page: Any) -> None:
    """Have a page get the story of a model, and a slower one with more memory of the other digest."""
    answer_story(page, make_story(40))
    other = make_slower(make_story(40), 1.5) | {"arena_bytes": 1 << 20}
    page.route(f"**/v1/models/*{OTHER_MODEL[-64:]}/story", lambda route: route.fulfill(json=other))


def compare_plans(page: Any) -> None:
    page.get_by_test_id("compare").fill(OTHER_MODEL)
    page.get_by_test_id("compare").press("Enter")
    page.wait_for_selector("[data-testid=plan-differences]")
    page.get_by_test_id("plan-differences").scroll_into_view_if_needed()


def answer_edits(page: Any) -> None:
    """Have a page get a model's story and plan, and a slower estimate of each edited plan."""
    story = make_story(40)
    answer_story(page, story)
    page.route("**/v1/models/*/plan", lambda route: route.fulfill(json=make_plan(story)))
    slower = make_slower(story, 1.1)
    checked = {"seconds": slower["seconds"], "instructions": slower["instructions"]}
    page.route("**/v1/plans:check", lambda route: route.fulfill(json=checked))


def edit_plan(page: Any) -> None:
    """Choose an operator, and have its core execute it later."""
    page.locator("[data-testid=operators] button").nth(1).click()
    page.get_by_test_id("edit").click()
    page.get_by_test_id("edit-panel").get_by_role("button", name="later").click()
    page.wait_for_selector("[data-testid=edited]")
    page.get_by_test_id("edited").scroll_into_view_if_needed()


MODEL_PATH, OTHER_MODEL = "/m/sha256:" + "a" * 64, "sha256:" + "b" * 64
STATES = (
    State("verdict", GEMM_LINK),
    State("error", GEMM_LINK, type_error),
    State("what-if", link(GEMM, "nvidia-h200-sxm", GEMM_INPUTS, scale="l2 bandwidth=2")),
    State("limit", link(GEMM, "nvidia-h200-sxm", GEMM_INPUTS, program=3), step_to_a_limit),
    State("attention", link("Y = attention(Q, K, V, causal=true)", "nvidia-a100-sxm-80gb", ATTENTION_INPUTS)),
    State(
        "convolution",
        link('Y = conv2d(X, W, b, padding=1, activation="relu")', "cpu-x86-avx512", CONVOLUTION_INPUTS, constant="W"),
    ),
    State("compiled", SMALL_LINK, compile_kernel),
    State("sass", GEMM_LINK, show_sass),
    State("compare", SMALL_LINK, compare_kernels),
    State("open-model", "/m", ready="[data-testid=model-file]"),
    State("model", MODEL_PATH, prepare=lambda page: answer_story(page, make_story(40))),
    State("operator", MODEL_PATH, pick_and_zoom, prepare=lambda page: answer_story(page, make_story(40))),
    State("profile", MODEL_PATH, show_profile, prepare=lambda page: answer_story(page, make_story(40))),
    State("two-plans", MODEL_PATH, compare_plans, prepare=answer_two_plans),
    State("edited-plan", MODEL_PATH, edit_plan, prepare=answer_edits),
    State(
        "farm",
        "/farm",
        lambda page: page.locator("[data-testid=operations] button").nth(1).click(),
        "[data-testid=operations]",
        lambda page: answer_farm(page, OPERATIONS, ended={"ok": 2, "toolchain-missing": 1}),
    ),
)


# ---------------------------------------------------------------- text is shown as text

HOSTILE = (
    "<img src=x onerror=pwned()>",
    '"><script>pwned()</script>',
    "<svg onload=pwned()>",
    "javascript:pwned()",
    "`${pwned()}`",
    "'-pwned()-'",
    "</script><script>pwned()</script>",
    "<iframe srcdoc='<script>parent.pwned()</script>'>",
    "{{constructor.constructor('pwned()')()}}",
    "<style>*{background:url(//evil.example/x)}</style>",
)
# fields of stories that the page shows: of kernels, then of models
SHOWN = {"name", "unit", "family", "view", "rule", "resource", "bound", "group"}
SHOWN |= {"expression", "result", "device", "plan", "operator", "members"}


def poison(value: Any, text: str, *, is_shown: bool = False) -> Any:
    """Return a story whose names are hostile."""
    if isinstance(value, dict):
        return {key: poison(each, text, is_shown=key in SHOWN) for key, each in value.items()}
    if isinstance(value, list):
        return [poison(each, text, is_shown=is_shown) for each in value]
    return text if is_shown and isinstance(value, str) else value


def check_shown_as_text(page: Any) -> None:
    """Nothing of a hostile text has run or become an element."""
    assert page.evaluate("typeof pwned") == "undefined"
    assert page.locator("#app :is(script, iframe, img, object, embed)").count() == 0
    assert page.evaluate("[...document.querySelectorAll('a')].every((each) => new URL(each.href).origin === location.origin)")
