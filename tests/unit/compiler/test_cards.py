"""HTML for notebooks: well-formed, without scripts, and bars as long as the time."""

from __future__ import annotations

import asyncio
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S

import roller_svc
from roller_svc.compiler.cards import WIDTH, draw_plan, make_card
from roller_svc.errors import ExprTypeError, RollerError

MATMUL = "C[m, n] +=! A[m, k] * B[k, n]"
WIDE = {"A": ("bfloat16", (4096, 64)), "B": ("bfloat16", (64, 4096))}
ATTACK = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&lt;"


class Tags(HTMLParser):
    """The tags and attributes of a text, which must be balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_html(text: str) -> None:
    tags = Tags(text)
    assert tags.tags <= {"div", "code", "svg", "rect", "span", "pre"}
    assert not any(name.startswith("on") or name in ("href", "src", "class", "id") for name in tags.attributes)
    assert len(text) < 8192


@pytest.mark.parametrize("target", ["nvidia-h200-sxm", "cpu-x86-avx512", "nvidia-v100-sxm2"])
def test_estimate_draws_terms_as_long_as_its_seconds(target: str) -> None:
    (estimate,) = roller_svc.estimate(MATMUL, WIDE, target)[target]
    text = estimate._repr_html_()
    check_html(text)
    bars = [float(width) for width in re.findall(rf'<rect x="[\d.]+" width="([\d.]+)" height="{18}"', text)]
    assert sum(bars) == pytest.approx(WIDTH, abs=0.1 * len(bars))
    for term in estimate.plan.dominant_choice.terms:
        assert f" {term.name} " in text


def test_kernels_that_run_once_are_named_and_not_drawn() -> None:
    text = "S[n] += W[k, n]\nC[m, n] +=! A[m, k] * W[k, n]\nD[m, n] = C[m, n] + S[n]"
    inputs = {"A": ("float32", (4, 512)), "W": ("float32", (512, 512))}
    (estimate,) = roller_svc.estimate(text, inputs, "cpu-x86-avx2", constants=["W"])["cpu-x86-avx2"]
    shown = estimate._repr_html_()
    once = [choice for choice in estimate.plan.choices if choice.runs_once]
    assert once
    assert shown.count("(once, before all calls: ") == len(once)
    assert shown.count("<svg") == len(estimate.plan.choices) - len(once)


def test_kernel_and_candidates_show_themselves() -> None:
    kernel = roller_svc.compile("y[i] = x[i] + 1.0", {"x": ("float32", (64,))}, select="model", top_k=1, cache=False)
    check_html(kernel._repr_html_())
    assert kernel.expression in kernel._repr_html_()
    check_html(kernel.candidates[0]._repr_html_())
    assert kernel.estimate is not None
    assert draw_plan(kernel.estimate.plan) in kernel._repr_html_()


def test_text_from_outside_is_text() -> None:
    for text in (make_card(ATTACK, ATTACK, [ATTACK]), RollerError(ATTACK, code=ATTACK)._repr_html_()):
        check_html(text)
        assert "&lt;script&gt;" in text


def test_error_shows_its_place() -> None:
    with pytest.raises(ExprTypeError) as caught:
        roller_svc.estimate("C[m] = D[m]", {"A": ("float32", (4,))})
    text = caught.value._repr_html_()
    check_html(text)
    assert "D[m]" in text


GRAPH = {
    "format": "roller-graph/1",
    "name": "rows",
    "inputs": {name: {"dtype": "float32", "shape": [64, 256]} for name in "ab"},
    "constants": {},
    "nodes": [
        {"name": f"of_{name}", "expression": "C[i] +=! exp(A[i, j])", "inputs": {"A": name}, "outputs": {"C": f"rows_{name}"}}
        for name in "ab"
    ],
    "outputs": {name: f"rows_{name}" for name in "ab"},
}
CELLS = {
    "start": "import sys, roller_svc\nchoose = {'select': 'model', 'top_k': 1}",
    "estimate": f"roller_svc.estimate({MATMUL!r}, {WIDE!r}, 'nvidia-h200-sxm')['nvidia-h200-sxm'][0]",
    "kernel": "kernel = roller_svc.compile('y[i] = x[i] + 1.0', {'x': ('float32', (64,))}, **choose)\nkernel",
    "candidate": "kernel.candidates[0]",
    "model": f"roller_svc.compile_model({GRAPH!r}, 'cpu-x86-avx2', plan='serial', **choose)",
    "plan": f"roller_svc.compile_model({GRAPH!r}, 'cpu-x86-avx2', plan='rammer', threads=2, **choose)",
    "fault": "roller_svc.estimate('C[m] = D[m]', {'A': ('float32', (4,))})",
    "error": "sys.last_value",
}


def run_notebook(cells: dict[str, str], folder: Path) -> dict[str, Any]:
    """Return the last output of each cell of a notebook, by the cell's name."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    traitlets, _ = pytest.importorskip("traitlets.config"), pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(text, id=name) for name, text in cells.items()]
    sockets = {"transport": "ipc", "ip": str(folder / "socket")}  # another process may take a port that was free
    limits = {"timeout": PATIENCE_S, "startup_timeout": int(PATIENCE_S), "iopub_timeout": PATIENCE_S}
    config = traitlets.Config(KernelManager=sockets)
    client = nbclient.NotebookClient(notebook, kernel_name="python3", allow_errors=True, config=config, **limits)
    asyncio.run(client.async_execute())
    return {cell.id: cell.outputs[-1] for cell in notebook.cells if cell.outputs}


@pytest.mark.slow
def test_a_notebook_shows_each_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR", "ROLLER_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    outputs = run_notebook(CELLS, tmp_path)
    assert {name for name, output in outputs.items() if output.output_type == "error"} == {"fault"}
    assert outputs["fault"].ename == "ExprTypeError"
    shown = {name: outputs[name].data["text/html"] for name in CELLS if name not in ("start", "fault")}
    for name, text in shown.items():
        check_html(text)
        assert text.count("<svg") == (name != "error")
    drawn = re.search(r"instructions on 2 cores in ([^\"]+)", shown["plan"])
    assert drawn is not None
    assert f": {drawn[1]} a call" in shown["plan"]
    assert "D[m]" in shown["error"]
