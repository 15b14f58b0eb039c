"""bench/gpu on an image that lacks packages: what it names, and wheels that it takes from a folder."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def wheels() -> Any:
    return importlib.import_module("roller_bench.gpu.wheels")


def wheel(folder: Path, name: str, tags: str, version: str = "1.0", needs: str = "") -> Path:
    """One module of one line, that says whether it came from a wheel as it is."""
    module = name.replace("-", "_")
    path = folder / f"{module}-{version}-{tags}.whl"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr(f"{module}.py", "PACKED = '.whl' in __file__\n")
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
        packed.writestr(f"{module}-{version}.dist-info/METADATA", metadata)
    return path


def test_the_table_of_needs_is_what_metadata_says(wheels: Any) -> None:
    """Of everything that the bench takes, to the last package."""
    todo, seen = [*wheels.ROOTS], set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        stated = {wheels.canonical(one) for one in wheels.requirements(name)}
        assert stated == {wheels.canonical(one) for one in wheels.REQUIREMENTS.get(name, ())}, name
        todo += wheels.REQUIREMENTS.get(name, ())
    assert set(wheels.REQUIREMENTS) <= seen


@pytest.mark.slow
def test_the_bench_imports_no_other_package(wheels: Any) -> None:
    """What a process has loaded once all of the bench is imported, but for what torch and Triton are needed for."""
    code = (
        "import pkgutil, importlib, sys\n"
        "sys.modules.update(torch=None, triton=None)\n"  # as if they were not installed
        "from roller_bench import gpu\n"
        "for module in pkgutil.walk_packages(gpu.__path__, gpu.__name__ + '.'):\n"
        "    try: importlib.import_module(module.name)\n"
        "    except ModuleNotFoundError as lack: assert lack.name.partition('.')[0] in ('torch', 'triton'), lack\n"
        "files = {n.partition('.')[0]: getattr(m, '__file__', None) or '' for n, m in sys.modules.items()}\n"
        "print(' '.join(sorted(n for n, file in files.items() if 'site-packages' in file)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}"},
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    owners = importlib.metadata.packages_distributions()
    known = {wheels.canonical(name) for name in (*wheels.ROOTS, *(n for needs in wheels.REQUIREMENTS.values() for n in needs))}
    ours = {"_distutils_hack", "roller_svc"}
    assert {wheels.canonical(owners[name][0]) for name in done.stdout.split() if name not in ours} <= known


def test_one_message_names_all_that_is_missing_and_the_command(wheels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.distribution
    there = {"numpy", "ml_dtypes", "PyYAML", "typing-extensions"}

    def found(name: str) -> Any:
        if name not in there:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "distribution", found)
    missing = wheels.missing_packages()
    assert set(missing) == {
        "lark",
        "islpy",
        "pydantic",
        "pydantic-settings",
        "annotated-types",
        "pydantic-core",
        "typing-inspection",
        "python-dotenv",
    }
    said = wheels.install_message(missing, Path("w"))
    assert all(name in said for name in missing)
    (command,) = [line for line in said.splitlines() if "pip download" in line]
    assert command.endswith("-d w lark islpy pydantic pydantic-settings")
    assert "--only-binary" in command
    assert f"--python-version 3.{sys.version_info.minor}" in command


def test_what_is_not_installed_is_followed_by_the_table(wheels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert set(wheels.missing_packages(["pydantic"])) == {
        "pydantic",
        "annotated-types",
        "pydantic-core",
        "typing-extensions",
        "typing-inspection",
    }


def test_pure_wheels_are_imported_as_they_are_and_others_unpacked(
    wheels: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path, "plain-one", "py3-none-any", needs="Requires-Dist: other-one\n")
    python = f"cp3{sys.version_info.minor}"
    wheel(tmp_path, "native-one", f"{python}-{python}-manylinux_2_17_{platform.machine()}")
    entries = wheels.path_entries(tmp_path)
    assert len(entries) == 2
    code = (
        "import plain_one, native_one, importlib.metadata as m\nprint(plain_one.PACKED, native_one.PACKED, m.requires('plain-one'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(entries)},
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout.strip() == "True False ['other-one']"
    monkeypatch.setattr(sys, "path", [*entries, *sys.path])
    (unpacked,) = [entry for entry in entries if not entry.endswith(".whl")]
    wheels.remove_unpacked()
    assert not Path(unpacked).exists()
    assert (tmp_path / "plain_one-1.0-py3-none-any.whl").exists()


@pytest.mark.parametrize(
    ("python", "abi", "machine", "expected"),
    [
        ("py3", "none", "any", True),
        ("py2.py3", "none", "any", True),
        ("cp39", "abi3", "manylinux_2_17_{}.manylinux2014_{}", True),
        ("cp3{}", "cp3{}", "linux_{}", True),
        ("cp399", "abi3", "manylinux_2_17_{}", False),
        ("cp38", "cp38", "manylinux_2_17_{}", False),
        ("cp39", "abi3", "musllinux_1_2_{}", False),
        ("cp39", "abi3", "win_amd64", False),
        ("py2", "none", "any", False),
    ],
)
def test_a_wheel_fits_or_does_not(wheels: Any, python: str, abi: str, machine: str, expected: bool) -> None:
    minor = sys.version_info.minor
    tags = python.replace("{}", str(minor)), abi.replace("{}", str(minor)), machine.replace("{}", platform.machine())
    assert wheels.is_compatible(*tags) is expected


def test_a_folder_with_two_versions_or_of_another_machine_is_refused(wheels: Any, tmp_path: Path) -> None:
    wheel(tmp_path, "one", "py3-none-any")
    wheel(tmp_path, "one", "py3-none-any", "2.0")
    with pytest.raises(ValueError, match="keep one of them"):
        wheels.path_entries(tmp_path)
    (tmp_path / "one-2.0-py3-none-any.whl").unlink()
    wheel(tmp_path, "two", "cp38-cp38-win_amd64")
    with pytest.raises(ValueError, match=r"the wheels of two .* are not for"):
        wheels.path_entries(tmp_path)
