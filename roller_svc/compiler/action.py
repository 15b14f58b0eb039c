"""BuildRequest → action digest, a hash of everything that decides the result of a build, and its parts."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType

from roller_svc import hardware, toolchain
from roller_svc.compiler.parsing import parse_once
from roller_svc.compiler.request import deciding_json, request_json, resolve_spec
from roller_svc.hardware.mapping import RATES_FOR
from roller_svc.ir import canonical, printer
from roller_svc.ir.constraints import WinogradMode
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.report import BuildRequest

SCHEMA = 2  # of the results of actions; raise it when the fields of the store's manifests change
# Libraries that parse programs, compute index sets and evaluate constants.
LIBRARIES = ("islpy", "lark", "numpy")
KERNEL, MODEL = "kernel", "model"  # kinds of actions

PARTS = ("expression", "spec", "options", "compiler", "generator")  # of an action's key


@dataclass(frozen=True, slots=True)
class ActionKey:
    """An action's digest, and the hash of each of its parts."""

    digest: str
    kind: str  # kernel or model: keys of one kind are compared
    parts: Mapping[str, str]
    text: str = ""  # of a kernel's program, in canonical form: it does not show who wrote it


def action_digest(request: BuildRequest) -> str:
    """Return the action's digest, "sha256:<hex>". Parse the program; raise InputError if it is invalid."""
    return _action_digest(request, canonical.to_json(_program(request)))


def action_key(request: BuildRequest) -> ActionKey:
    """Return the action's key. Parse the program; raise InputError if it is invalid."""
    program = _program(request)
    content = canonical.to_json(program)
    parts = hash_parts(part_contents(request)) | {"expression": _digest({"program": content})}
    return ActionKey(_action_digest(request, content), KERNEL, parts, printer.text(program))


def _program(request: BuildRequest) -> TensorProgram:
    return parse_once(request.expression, request.inputs, request.outputs)[0]


def part_contents(request: BuildRequest) -> dict[str, object]:
    """Return the contents of the parts, of the expression as it is written. No program is parsed."""
    spec = resolve_spec(request)
    fields = request_json(request)
    return {
        "expression": {name: fields[name] for name in ("expression", "inputs", "outputs")},
        "spec": spec_content(spec),
        "options": deciding_json(request),
        "compiler": compiler_content(spec.family),
        "generator": generator_content(),
    }


def shown_contents(request: BuildRequest, key: ActionKey) -> dict[str, object]:
    """Return the contents of the parts of the request's key, as any client may see them: the program in canonical form."""
    contents, written = part_contents(request), request_json(request)
    return contents | {"expression": {"expression": key.text} | {name: written[name] for name in ("inputs", "outputs")}}


def spec_content(spec: HardwareSpec) -> dict[str, object]:
    """Return the values of a spec that decide results: neither measurements, nor for which cores its rates were stated."""
    mapping = hardware.to_mapping(replace(spec, measured=()))
    return {field: value for field, value in mapping.items() if field != RATES_FOR}


def compiler_content(family: TargetKind, more: Mapping[str, str] = MappingProxyType({})) -> dict[str, object]:
    """Return the versions of compilers and libraries, as a part of keys."""
    return {"toolchain": toolchain_versions(family), "libraries": {**library_versions(), **more}}


def generator_content() -> dict[str, object]:
    return {"generator": generator_digest(), "schema": SCHEMA}


def hash_parts(contents: Mapping[str, object]) -> dict[str, str]:
    """Return the hash of each part."""
    return {part: _digest({part: content}) for part, content in contents.items()}


def _action_digest(request: BuildRequest, program: object) -> str:
    spec = resolve_spec(request)
    # Hash the spec's content, not its name: an edited spec is another device.
    parts = {
        "schema": SCHEMA,
        "program": program,
        "hardware": spec_content(spec),
        **deciding_json(request),
        "tiles": request.tiles,  # pairs, as the digests of the first stores have them
        "generator": generator_digest(),
        "toolchain": toolchain_versions(spec.family),
        "libraries": library_versions(),
    }
    return f"sha256:{_digest(parts)}"


def estimate_digest(spec: HardwareSpec, winograd: WinogradMode) -> str:
    """Return a hash of everything but the program that decides the estimate of a program on a device."""
    return _digest(
        {
            "hardware": spec_content(spec),
            "winograd": winograd.value,
            "generator": generator_digest(),
            "libraries": library_versions(),
        }
    )


def _digest(parts: Mapping[str, object]) -> str:
    content = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()


@cache
def toolchain_versions(family: TargetKind | None = None) -> dict[str, str]:
    """Return the versions of a device family's compilers, or of all compilers for None.

    Cached for the life of the process: restart the service after an upgrade.
    """
    return toolchain.versions(family)


@cache
def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that affect code generation, cached for the life of the process."""
    return {name: importlib.metadata.version(name) for name in LIBRARIES}


@lru_cache(maxsize=1)
def generator_digest() -> str:
    """Hash the package's own source files: another version of the generator makes another kernel."""
    return digest_sources(Path(__file__).resolve().parents[1])


def digest_sources(root: Path) -> str:
    """Hash the names and contents of the source files in a folder."""
    digest = hashlib.sha256()
    for path in sorted((*root.rglob("*.py"), *root.rglob("*.c"))):
        digest.update(f"{path.relative_to(root)}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
