"""Chromium that looks at the page, and the states of the page that are checked and pictured."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

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

    def open(self, path: str = "/", width: int = 1280, theme: str = "light", *, bypass_csp: bool = False) -> Any:
        """Open a tab and wait for a verdict."""
        page = self.browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme, bypass_csp=bypass_csp)
        page.on("console", lambda message: self._note(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self._note(str(error)))
        page.on("request", lambda request: self._check(request.url))
        page.goto(self.address + path)
        page.wait_for_selector("[data-testid=estimate]")
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
    page.wait_for_selector("[data-testid=source]", timeout=60_000)


def show_sass(page: Any) -> None:
    compile_kernel(page)
    page.get_by_role("button", name="sass").click()
    page.wait_for_selector("[data-testid=sass]", timeout=60_000)
    page.get_by_test_id("sass").scroll_into_view_if_needed()


@dataclass(frozen=True)
class State:
    """A state of the page."""

    name: str
    path: str
    reach: Callable[[Any], None] = lambda _: None


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
)
