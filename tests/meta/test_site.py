"""The documentation builds as a site, without a warning, and without requests to other hosts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 90
    loaded = re.compile(r"""<(?:script|img)[^>]*\ssrc=["']?https?:|<link[^>]*rel=["']?stylesheet[^>]*href=["']?https?:""")
    assert [page.name for page in pages if loaded.search(page.read_text(encoding="utf-8"))] == []
    reference = (tmp_path / "site" / "reference.html").read_text(encoding="utf-8")
    assert 'id="roller_svc.compile"' in reference
