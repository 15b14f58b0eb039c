"""The wheel has all it needs to work outside of a checkout; the benchmarks are in a wheel of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import numpy as np, roller_svc
kernel = roller_svc.compile("y[i] = x[i] + 1", {"x": ("float32", (4,))}, select="model", top_k=1)
print(kernel(x=np.zeros(4, np.float32))["y"].tolist(), len(roller_svc.targets()), roller_svc.__file__)
"""


def build_wheel(project: str, folder: Path) -> Path:
    options = ["--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, project], cwd=ROOT, check=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(".", tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_the_wheel_is_whole(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "roller_svc").rglob("*") if path.is_file()}
    wanted = {name for name in sources if "__pycache__" not in name}
    wanted |= {f"roller_svc/hwspecs/{path.name}" for path in (ROOT / "hwspecs").glob("*.yaml")}
    assert wanted - names == set()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"roller_svc"}
    assert not any("/bench/" in name for name in names)


@pytest.mark.slow
def test_the_benchmarks_have_a_wheel_with_their_command(tmp_path: Path) -> None:
    archive = zipfile.ZipFile(build_wheel("./bench", tmp_path))
    sources = {path.relative_to(ROOT / "bench").as_posix() for path in (ROOT / "bench").rglob("*.py")}
    assert {name for name in archive.namelist() if ".dist-info/" not in name} == sources
    (points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert archive.read(points).decode().split("\n", 1)[0] == "[roller_svc.commands]"


@pytest.mark.slow
def test_it_works_outside_of_the_checkout(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    env = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    devices = len(list((ROOT / "hwspecs").glob("*.yaml"))) + 1
    assert done.stdout.startswith(f"[1.0, 1.0, 1.0, 1.0] {devices} ")
    assert str(tmp_path) in done.stdout
