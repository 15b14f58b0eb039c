"""The digest of everything but the request that decides the result of a build: code, compilers and libraries.

An action's digest is computed by one process and built by another. Workers take the operations of their own
environment only, so that a rolling upgrade or a machine with another compiler never publishes under a wrong action.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache

from roller_svc.compiler.action import library_versions, toolchain_versions
from roller_svc.farm.build import LOADED_GENERATOR
from roller_svc.farm.models import reader_versions
from roller_svc.graph.python_ops import describe_python_ops


@cache
def environment_digest() -> str:
    """Return the digest, which stays for the life of the process: restart it after an upgrade of a compiler."""
    parts = {
        "generator": LOADED_GENERATOR,
        "toolchain": toolchain_versions(),
        "libraries": library_versions() | reader_versions(),
    } | ({"python": functions} if (functions := describe_python_ops()) else {})
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
