"""The import contracts hold, cover every module, and would notice what they forbid."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PURE = {"ir", "analysis", "frontend", "semantics", "fusion", "perf", "construct", "schedule", "families", "codegen"}
FORBIDDEN = {"pydantic", "yaml", "fastapi", "cupy", "os", "subprocess", "sqlite3", "ctypes"}


def checked(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"]
    path = os.pathsep.join([str(folder), str(folder / "bench")])
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env={"PYTHONPATH": path})


def contracts() -> dict[str, Any]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return {contract["id"]: contract for contract in project["tool"]["importlinter"]["contracts"]}


def test_the_pure_core_is_named_whole() -> None:
    pure = contracts()["pure"]
    there = {f"roller_svc.{name}" for name in PURE if (ROOT / "roller_svc" / name / "__init__.py").exists()}
    assert set(pure["source_modules"]) == there
    assert set(pure["forbidden_modules"]) == FORBIDDEN


def test_the_client_sees_nothing_but_the_wire_and_errors() -> None:
    names = {path.stem for path in (ROOT / "roller_svc").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    seen = {"client", "errors", "version", "__init__", "__main__"}
    assert {f"roller_svc.{name}" for name in names - seen} == set(contracts()["client"]["forbidden_modules"])


def test_the_contracts_hold() -> None:
    done = checked(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("contract", "module", "line"),
    [
        ("layers", "construct/align.py", "from roller_svc import families"),
        ("layers", "schedule/__init__.py", "import roller_svc.perf"),
        ("layers", "new_module.py", "import os"),
        ("benchmarks", "verify/corpus.py", "import roller_bench.cases"),
        ("families", "families/gpu/window/rules.py", "import roller_svc.families.gpu.reduction.rules"),
        ("family-layers", "families/common/__init__.py", "import roller_svc.families.schedules"),
        ("common-parts", "families/common/gpu/matrix/tile.py", "import roller_svc.families.common.gpu.attention.mask"),
        ("tables", "compiler/plans.py", "import roller_svc.families.gpu.window.cost"),
        ("acyclic", "families/gpu/window/cost.py", "import roller_svc.families.gpu.window.rules"),
        ("acyclic", "frontend/onnx/subgraphs.py", "import roller_svc.frontend.onnx.model"),
        ("pure", "codegen/__init__.py", "import subprocess"),
        ("pure", "frontend/lang/__init__.py", "import os"),
        ("client", "client/client.py", "import roller_svc.hardware"),
        ("environment", "compiler/pipeline.py", "import roller_svc.settings"),
        ("doors", "compiler/pipeline.py", "import httpx"),
    ],
)
def test_a_seeded_violation_breaks_its_contract(tmp_path: Path, contract: str, module: str, line: str) -> None:
    for package in ("roller_svc", "bench/roller_bench"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    mutated = tmp_path / "roller_svc" / module
    before = mutated.read_text(encoding="utf-8") if mutated.exists() else ""
    mutated.write_text(f"{before}\n{line}\n", encoding="utf-8")
    done = checked(tmp_path)
    assert done.returncode != 0
    shown = " ".join((done.stdout + done.stderr).split())
    assert f"{contracts()[contract]['name']} BROKEN" in shown or "new_module" in shown
