"""The README's examples, and those of HTTP in docs/api.md, run as they are: Python, commands and curl lines."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from serving import served

from roller_svc.service.app import create_app
from roller_svc.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")

# Where there is no curl, this does what the README asks of it.
STAND_IN = f"""#!{sys.executable}
import sys, pathlib, httpx
words, headers, body, out, url = sys.argv[1:], {{}}, None, None, None
while words:
    word = words.pop(0)
    if word == "-s":
        continue
    elif word == "-H":
        name, _, value = words.pop(0).partition(":")
        headers[name] = value.strip()
    elif word == "-d":
        body = words.pop(0)
    elif word == "-o":
        out = words.pop(0)
    else:
        url = word
answer = httpx.request("GET" if body is None else "POST", url, headers=headers, content=body, timeout=60)
pathlib.Path(out).write_bytes(answer.content)
"""


# Texts that differ between machines and runs
VARYING = {
    r"roller_[0-9a-f]{12}_": "roller_#_",
    r"^for local, c, on .*:$": "for local, c, on #:",
    r"\d[\d.e+-]*( [mnµ]?s\b| [KMGT]?B\b| [GT]FLOP/s| [GT]?B/s)?": "#",
    r"x (slower|faster)": "x #",
    r" +": " ",
}


@dataclass(frozen=True)
class Example:
    commands: str  # a block of `sh`
    printed: str | None  # the block of `text` after it, which may end in … where more is printed


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def shell_examples(page: str) -> list[Example]:
    pattern = r"^```sh\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?"
    return [Example(*match.groups()) for match in re.finditer(pattern, page, re.MULTILINE | re.DOTALL)]


def mask_numbers(text: str) -> str:
    for pattern, word in VARYING.items():
        text = re.sub(pattern, word, text, flags=re.MULTILINE)
    return text.strip()


def printed(example: str, folder: Path) -> list[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", example], cwd=folder, env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_python_examples_print_what_they_say(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    # each goes on from the first's imports
    shape, bound, same, constant, y = printed("\n".join(blocks(README, "python")), tmp_path)
    assert shape == "(512, 384) 256.0"
    assert re.fullmatch(r"\w+ [1-9]\d*", bound)
    assert same == "True"
    assert constant == "2560.0"
    assert y == "(1, 4)"


@pytest.mark.slow
def test_the_commands_print_what_they_say(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    roller = tmp_path / "bin" / "roller"
    roller.parent.mkdir()
    roller.write_text(f'#!/bin/sh\nexec {sys.executable} -m roller_svc "$@"\n')
    roller.chmod(0o755)
    env = os.environ | {"PATH": f"{roller.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    examples = [example for example in shell_examples(README) if "curl" not in example.commands]
    assert len(examples) == 4
    for example in examples:
        command = ["bash", "-ec", example.commands]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        wanted, is_cut, _ = mask_numbers(example.printed or "…").partition("…")
        shown = mask_numbers(done.stdout)
        assert shown.startswith(wanted) if is_cut else shown == wanted


def test_the_curl_lines_work(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    if shutil.which("curl") is None:
        (folder / "curl").write_text(STAND_IN)
        (folder / "curl").chmod(0o755)
    lines = [commands for commands in blocks(README, "sh") + blocks(API, "sh") if "curl " in commands]
    script = "set -e\n" + "\n".join(lines)
    assert script.count("curl ") == 7
    with served(create_app(Settings(store=tmp_path / "store"))) as client:
        script = script.replace("http://127.0.0.1:8000", str(client.base_url).rstrip("/"))
        env = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, check=True)
    operation = json.loads((tmp_path / "operation.json").read_text())
    assert operation["done"] is True
    assert operation["response"]["language"] == "cuda"
    assert "__global__" in (tmp_path / "kernel.cu").read_text()
    assert (tmp_path / "kernel.cubin").read_bytes().startswith(b"\x7fELF")
    assert "metadata.json" in zipfile.ZipFile(tmp_path / "kernel.zip").namelist()
    estimates = json.loads((tmp_path / "estimates.json").read_text())["estimates"]
    assert [(one["item"], one["target"]) for one in estimates] == [
        (item, target) for item in (0, 1) for target in ("nvidia-a100-sxm-80gb", "nvidia-h200-sxm", "amd-mi300x")
    ]
    assert all(one["candidates"][0]["seconds"] > 0 for one in estimates)
    assert json.loads((tmp_path / "hardware.json").read_text())["hardware"]
    assert json.loads((tmp_path / "health.json").read_text()) == {"status": "ok"}
