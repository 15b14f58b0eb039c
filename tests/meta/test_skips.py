"""Skipped tests are listed by reason, and a reason that nobody has allowed fails a run of CI."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from skips import PACKAGES

ROOT = Path(__file__).parents[2]
ALLOWED_ONLY = """
import pytest
@pytest.mark.skip(reason="there is no NVIDIA device here")
def test_device(): pass
def test_passes(): pass
"""
PACKAGE_MISSING = 'import pytest\npytest.importorskip("no_such_package")\n'
PROGRAM_MISSING = """
import pytest
@pytest.mark.parametrize("number", [1, 2])
def test_program(number): pytest.skip("there is no tool here")
def test_fails_as_expected(): pytest.xfail("a known fault")
"""


def run_pytest(folder: Path, *options: str, programs: str = os.environ["PATH"], **files: str) -> tuple[int, str]:
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    modules = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    environment = os.environ | {"PYTHONPATH": modules, "PATH": programs, "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", *options, folder]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_allowed_reasons_are_listed_with_who_runs_the_tests(tmp_path: Path) -> None:
    status, output = run_pytest(tmp_path, "--strict-skips", allowed=ALLOWED_ONLY)
    assert status == 0
    assert "    1 there is no NVIDIA device here; run by: make test-all where there is a device" in output
    assert "ERROR" not in output


def test_other_reasons_fail_a_strict_run(tmp_path: Path) -> None:
    files = {"allowed": ALLOWED_ONLY, "package": PACKAGE_MISSING, "program": PROGRAM_MISSING}
    status, output = run_pytest(tmp_path, "--strict-skips", "-n", "1", **files)
    assert status == 1
    assert "= 4 skipped, by reason =" in output
    assert "    2 there is no tool here; run by: nobody" in output
    assert "    1 could not import 'no_such_package': No module named 'no_such_package'; run by: nobody" in output
    assert "ERROR: 2 of these reasons are not allowed in CI" in output


def test_ci_installs_the_programs_that_tests_need() -> None:
    table = re.search(r"^packages='$(.*?)^'$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert table is not None
    assert set(PACKAGES.values()) - {package for line in table[1].splitlines() for package in line.split()[1:]} == set()


def test_tests_that_need_a_missing_program_are_skipped(tmp_path: Path) -> None:
    text = 'import pytest\n@pytest.mark.needs("clang")\ndef test_program(): pass\n'
    status, output = run_pytest(tmp_path, "--strict-skips", program=text, programs=str(tmp_path))
    assert status == 1
    assert "    1 there is no clang here (apt install clang); run by: nobody" in output


def test_any_reason_is_listed_and_passes_elsewhere(tmp_path: Path) -> None:
    status, output = run_pytest(tmp_path, program=PROGRAM_MISSING)
    assert status == 0
    assert "    2 there is no tool here; run by: CI" in output
    assert "ERROR" not in output
