"""A folder of wheels → entries of the path; what this Python lacks → the command that brings it.

Standard library alone: it runs where nothing of what the project needs is there. Nothing is installed.
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

ROOT = Path(__file__).resolve().parents[3]
# What the bench imports, as packages are called. CuPy, torch and Triton are looked for later: --dry does without.
ROOTS = ("numpy", "ml_dtypes", "PyYAML", "lark", "islpy", "pydantic", "pydantic-settings")
# What those need in turn, for where their own metadata is not there to say so.
NEEDS = {
    "ml_dtypes": ("numpy",),
    "pydantic": ("annotated-types", "pydantic-core", "typing-extensions", "typing-inspection"),
    "pydantic-core": ("typing-extensions",),
    "pydantic-settings": ("pydantic", "python-dotenv", "typing-extensions", "typing-inspection"),
    "typing-inspection": ("typing-extensions",),
}
# pip takes a platform literally: wheels are built against any of these versions of glibc.
GLIBC = ("2_34", "2_31", "2_28", "2_27", "2_24", "2_17")
_WHEEL = re.compile(r"(?P<name>[^-]+)-[^-]+(?:-\d[^-]*)?-(?P<python>[^-]+)-(?P<abi>[^-]+)-(?P<platform>[^-]+)\.whl")
_PREFIX = "gpu-bench-wheels-"
MISSING_EXIT_CODE = 3  # the exit code of a machine that has not what it takes


def prepare(words: Sequence[str]) -> None:
    """Put the wheels of `--wheels` on the path, of child processes too; exit where something is still missing."""
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
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *entries, *([inherited] if inherited else [])])
    if missing := missing_packages():
        print(message(missing, folder or Path("wheels")), file=sys.stderr)
        sys.exit(MISSING_EXIT_CODE)


def missing_packages(roots: Iterable[str] = ROOTS) -> list[str]:
    """Packages that are not there, with all that they need and is not there either."""
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
        todo += needs(name)
    return list(found.values())


def needs(name: str) -> list[str]:
    """What a package needs always: by its metadata where it is installed, else by the table above."""
    try:
        stated = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return list(NEEDS.get(name, ()))
    return [re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0] for line in stated if ";" not in line]


def message(missing: Sequence[str], folder: Path) -> str:
    """All that is missing, and one command for a machine with a network."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    machine = platform.machine()
    platforms = " ".join(f"--platform manylinux_{glibc}_{machine}" for glibc in GLIBC)
    roots = " ".join(name for name in missing if name in ROOTS) or " ".join(missing)
    return (
        f"bench/gpu: this Python {python} lacks {', '.join(missing)}.\n"
        "Where there is a network, in the repository's root, bring them as wheels:\n"
        f"  python3 -m pip download --only-binary=:all: --python-version {python} --implementation cp {platforms}"
        f" -c constraints.txt -d {folder} {roots}\n"
        f"Then say: bench/gpu --wheels {folder}. Nothing is installed."
    )


def path_entries(folder: Path) -> list[str]:
    """Entries of the path for the wheels in a folder: pure ones as they are, others unpacked to a temporary folder.

    Raises ValueError for two versions of one package, and where a package's wheels are all for other machines.
    """
    fitting: dict[str, Path] = {}
    others: set[str] = set()
    for path in sorted(folder.iterdir()):
        wheel = _WHEEL.fullmatch(path.name)
        if wheel is None:
            continue
        name = canonical(wheel["name"])
        if not fits(wheel["python"], wheel["abi"], wheel["platform"]):
            others.add(name)
        elif name in fitting:
            raise ValueError(f"{folder} has {fitting[name].name} and {path.name}: keep one of them")
        else:
            fitting[name] = path
    if strange := sorted(others - fitting.keys()):
        here = f"Python {sys.version_info.major}.{sys.version_info.minor} on {platform.machine()}"
        raise ValueError(f"the wheels of {', '.join(strange)} in {folder} are not for {here}")
    pure = [path for path in fitting.values() if path.name.endswith("-none-any.whl")]
    native = [path for path in fitting.values() if path not in pure]
    entries = [str(path.resolve()) for path in pure]
    return [_unpack(native), *entries] if native else entries


def fits(python: str, abi: str, machine: str) -> bool:
    """Whether a wheel with these tags runs here: the same CPython, or an older one's stable interface; glibc."""
    minor = sys.version_info.minor
    tags = python.split(".")
    stable = [int(tag[3:]) for tag in tags if re.fullmatch(r"cp3\d+", tag)]
    exact = f"cp3{minor}" in tags and abi in (f"cp3{minor}", "none")
    runs = "py3" in tags or exact or (abi == "abi3" and any(one <= minor for one in stable))
    built = [tag for tag in machine.split(".") if re.fullmatch(rf"(many)?linux.*_{re.escape(platform.machine())}", tag)]
    return runs and (machine == "any" or bool(built))


def canonical(name: str) -> str:
    """A package's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _unpack(wheels: Iterable[Path]) -> str:
    """A folder with the contents of these wheels, which goes when this process ends."""
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    atexit.register(remove_unpacked)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder)
    return folder


def remove_unpacked() -> None:
    """The folders that wheels were unpacked to."""
    for entry in sys.path:
        if Path(entry).name.startswith(_PREFIX):
            shutil.rmtree(entry, ignore_errors=True)
