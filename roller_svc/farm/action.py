"""BuildRequest → the digest of everything that decides what a build makes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

from roller_svc import hardware, toolchain
from roller_svc.compiler.request import resolve_spec
from roller_svc.farm.store import SCHEMA
from roller_svc.frontend.parse import parse
from roller_svc.ir import canonical
from roller_svc.ir.hardware import Family
from roller_svc.ir.report import BuildRequest

# What reads a program, decides its index sets and computes its constants.
LIBRARIES = ("islpy", "lark", "numpy")


def action_digest(request: BuildRequest) -> str:
    """sha256:<hex>. Parsing happens here: an expression that is wrong raises its InputError."""
    program = parse(request.expression, dict(request.inputs), request.outputs)
    spec = resolve_spec(request)
    # The spec's content, not its name: a spec that is edited is another device. Never a measurement, and not those
    # that a spec's figures come from.
    parts = {
        "schema": SCHEMA,
        "program": canonical.to_json(program),
        "hardware": hardware.to_mapping(replace(spec, measured=())),
        "top_k": request.top_k,
        "select": request.select.value,
        "runtime": request.runtime.value,
        "allow_tf32": request.allow_tf32,
        "family": request.family.value if request.family else None,
        "tiles": request.tiles,
        "constants": request.constants,
        "generator": generator_digest(),
        "toolchain": toolchain_versions(spec.family),
        "libraries": library_versions(),
    }
    content = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(content.encode()).hexdigest()}"


@cache
def toolchain_versions(family: Family | None = None) -> dict[str, str]:
    """The compilers as they were when this process first asked: a service is started anew after an upgrade.

    `family`: of the device that a build is for; None: all compilers.
    """
    return toolchain.versions(family)


@cache
def library_versions() -> dict[str, str]:
    """The libraries that decide what is generated, as they were when this process first asked."""
    return {name: importlib.metadata.version(name) for name in LIBRARIES}


@lru_cache(maxsize=1)
def generator_digest() -> str:
    """Of the package's own source files: another version of the generator makes another kernel."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
