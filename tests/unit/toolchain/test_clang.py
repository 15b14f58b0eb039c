"""C kernels by clang, on a machine without gcc: programs of the corpus are right, with clang's OpenMP runtime."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from reference_kernels import add

from roller_svc.toolchain.gcc import compile_c

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.needs("clang")


def test_clang_knows_all_flags() -> None:
    assert compile_c(add(("-fopenmp",)), cc="clang").log == ""


@pytest.mark.slow
def test_corpus_without_gcc_is_right(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("clang", "ld"):
        (programs / name).symlink_to(str(shutil.which(name)))
    document = json.loads((ROOT / "bench" / "data" / "public.json").read_text())
    # clang has _Float16 on x86-64 from version 15 on
    cases = [case for case in document["cases"][::20] if "float16" not in str(case)]
    corpus = tmp_path / "corpus.json"
    corpus.write_text(json.dumps({"cases": cases}))
    command = [sys.executable, "-m", "roller_svc", "corpus", corpus, "--small", "--jobs", "1", "--json"]
    environment = os.environ | {"PATH": str(programs), "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    rows = json.loads(done.stdout)["cases"]
    assert len(rows) == len(cases) > 0
    assert [(row["id"], row["status"], row["detail"]) for row in rows if row["status"] != "ok"] == []
