"""Use a directory of wheels without installing them, or print the command that downloads missing packages.

This module uses the standard library only, for it runs where the project's requirements are missing.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from roller_bench import BENCH, CHECKOUT

# Packages that the bench imports. CuPy, torch and Triton are checked later: --dry needs none of them.
ROOTS = ("numpy", "ml_dtypes", "PyYAML", "lark", "islpy", "pydantic", "pydantic-settings")
# Their requirements, for packages that are not installed and so have no metadata.
REQUIREMENTS = {
    "ml_dtypes": ("numpy",),
    "pydantic": ("annotated-types", "pydantic-core", "typing-extensions", "typing-inspection"),
    "pydantic-core": ("typing-extensions",),
    "pydantic-settings": ("pydantic", "python-dotenv", "typing-extensions", "typing-inspection"),
    "typing-inspection": ("typing-extensions",),
}
# pip matches platform tags literally: wheels may be built against any of these glibc versions.
GLIBC = ("2_34", "2_31", "2_28", "2_27", "2_24", "2_17")
_WHEEL = re.compile(r"(?P<name>[^-]+)-[^-]+(?:-\d[^-]*)?-(?P<python>[^-]+)-(?P<abi>[^-]+)-(?P<platform>[^-]+)\.whl")
_PREFIX = "gpu-bench-wheels-"
MISSING_EXIT_CODE = 3  # exit code


def prepare(words: Sequence[str]) -> None:
    """Put the wheels of `--wheels` on the path, also for child processes; exit if a package is still missing."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--wheels", type=Path)
    folder: Path | None = parser.parse_known_args(words)[0].wheels
    try:
        entries = path_entries(folder) if folder is not None and folder.exists() else []
    except (OSError, zipfile.BadZipFile, ValueError) as problem:
        print(f"bench/gpu: --wheels: {problem}", file=sys.stderr)
        sys.exit(2)
    sys.path[:0] = entries
    inherited = os.environ.get("PYTHONPATH")
    path = [str(CHECKOUT), str(BENCH), *entries, *([inherited] if inherited else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    if missing := missing_packages():
        print(install_message(missing, folder or Path("wheels")), file=sys.stderr)
        sys.exit(MISSING_EXIT_CODE)


def missing_packages(roots: Iterable[str] = ROOTS) -> list[str]:
    """Return the missing packages among `roots` and their requirements."""
    found: dict[str, str] = {}
    todo = list(roots)
    seen: set[str] = set()
    while todo:
        name = todo.pop(0)
        if canonical(name) in seen:
            continue
        seen.add(canonical(name))
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            found[canonical(name)] = name
        todo += requirements(name)
    return list(found.values())


def requirements(name: str) -> list[str]:
    """Return the unconditional requirements of a package: by its metadata if installed, else by the table."""
    try:
        stated = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return list(REQUIREMENTS.get(name, ()))
    return [re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0] for line in stated if ";" not in line]


def install_message(missing: Sequence[str], folder: Path) -> str:
    """Return the list of missing packages and one command to download them."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    machine = platform.machine()
    platforms = " ".join(f"--platform manylinux_{glibc}_{machine}" for glibc in GLIBC)
    roots = " ".join(name for name in missing if name in ROOTS) or " ".join(missing)
    return (
        f"bench/gpu: this Python {python} lacks {', '.join(missing)}.\n"
        "On a machine with a network, download them as wheels in the repository root:\n"
        f"  python3 -m pip download --only-binary=:all: --python-version {python} --implementation cp {platforms}"
        f" -c constraints.txt -d {folder} {roots}\n"
        f"Then run: bench/gpu --wheels {folder}. Nothing is installed."
    )


def path_entries(folder: Path) -> list[str]:
    """Return path entries for the wheels in a directory: pure wheels as they are, others unpacked temporarily.

    Raises ValueError for two versions of one package, and for a package without a wheel for this machine.
    """
    compatible: dict[str, Path] = {}
    incompatible: set[str] = set()
    for path in sorted(folder.iterdir()):
        wheel = _WHEEL.fullmatch(path.name)
        if wheel is None:
            continue
        name = canonical(wheel["name"])
        if not is_compatible(wheel["python"], wheel["abi"], wheel["platform"]):
            incompatible.add(name)
        elif name in compatible:
            raise ValueError(f"{folder} has {compatible[name].name} and {path.name}: keep one of them")
        else:
            compatible[name] = path
    if unusable := sorted(incompatible - compatible.keys()):
        here = f"Python {sys.version_info.major}.{sys.version_info.minor} on {platform.machine()}"
        raise ValueError(f"the wheels of {', '.join(unusable)} in {folder} are not for {here}")
    pure = [path for path in compatible.values() if path.name.endswith("-none-any.whl")]
    native = [path for path in compatible.values() if path not in pure]
    entries = [str(path.resolve()) for path in pure]
    return [_unpack(native), *entries] if native else entries


def is_compatible(python: str, abi: str, machine: str) -> bool:
    """Return whether a wheel with these tags runs here: the same CPython or an older stable ABI, on glibc."""
    minor = sys.version_info.minor
    tags = python.split(".")
    stable = [int(tag[3:]) for tag in tags if re.fullmatch(r"cp3\d+", tag)]
    exact = f"cp3{minor}" in tags and abi in (f"cp3{minor}", "none")
    runs = "py3" in tags or exact or (abi == "abi3" and any(version <= minor for version in stable))
    built = [tag for tag in machine.split(".") if re.fullmatch(rf"(many)?linux.*_{re.escape(platform.machine())}", tag)]
    return runs and (machine == "any" or bool(built))


def canonical(name: str) -> str:
    """Return the normalised name of a package."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _unpack(wheels: Iterable[Path]) -> str:
    """Unpack wheels to a temporary directory that is removed at exit."""
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    atexit.register(remove_unpacked)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder)
    return folder


def remove_unpacked() -> None:
    """Remove the directories that wheels were unpacked to."""
    for entry in sys.path:
        if Path(entry).name.startswith(_PREFIX):
            shutil.rmtree(entry, ignore_errors=True)
