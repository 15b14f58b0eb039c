"""The page as one file: a strict policy, no text that ends an element, and few bytes beside the story."""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

import pytest
from explorer_pages import HOSTILE, poison
from model_stories import make_story

from roller_svc.cli import main
from roller_svc.cli.page_file import MODEL, make_page, write_page
from roller_svc.errors import ArgumentError

MAX_KB = 60  # gzipped, beside the story


def read_data(page: str) -> object:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_policy_allows_the_script_and_the_styles_alone() -> None:
    page = make_page(MODEL, {})
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    for directive, element in (("script-src", "script"), ("style-src", "style")):
        (text,) = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
        assert f"{directive} 'sha256-{b64encode(sha256(text.encode()).digest()).decode()}';" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert len(gzip.compress(page.encode())) <= MAX_KB * 1024


@pytest.mark.parametrize("text", HOSTILE)
def test_a_story_ends_no_element(text: str) -> None:
    story = poison(make_story(2), text)
    page = make_page(MODEL, story)
    assert read_data(page) == {"kind": MODEL, "data": story}
    assert page.count("<script") == 2
    assert page.count("</script") == 2


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="nowhere") as refusal:
        write_page(str(tmp_path / "nowhere" / "page.html"), MODEL, {})
    assert refusal.value.code == "unwritable-file"


def test_a_kernel_is_explained_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kernel.html"
    words = ["explain", "y[i] = x[i] + 1.0", "--input", "x=float32[977]", "--target", "cpu-x86-avx2", "--json", "--html", str(file)]
    assert main(words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert read_data(file.read_text()) == {"kind": "kernel", "data": {"story": facts["story"], "source": facts["source"]}}


def test_a_saved_model_has_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metadata.json").touch()
    assert main(["model", "plan", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 2
    assert "no-story" in capsys.readouterr().err
