"""A builder whose kernels are texts, for tests of the service."""

from __future__ import annotations

import hashlib
import json
import threading
from typing import Any

from waiting import PATIENCE_S

from roller_svc.compiler.request import request_json
from roller_svc.errors import CompileError, ExprSyntaxError, ToolchainMissingError
from roller_svc.farm.store import Artifact
from roller_svc.ir.report import BuildRequest

BODY: dict[str, Any] = {
    "expression": "C[m, n] +=! A[m, k] * B[k, n]",
    "inputs": {"A": {"dtype": "float32", "shape": [8, 8]}, "B": {"dtype": "float32", "shape": [8, 8]}},
    "outputs": ["C"],
    "target": "cpu-x86-avx2",
    "options": {"top_k": 10, "select": "model", "allow_tf32": False},
}


class Builder:
    """A kernel whose text is the expression; waits for `gate`."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.built = 0
        self.expressions: list[str] = []

    def __call__(self, request: BuildRequest) -> Artifact:
        assert self.gate.wait(PATIENCE_S)
        self.built += 1
        self.expressions.append(request.expression)
        if request.top_k == 99:
            raise CompileError("the compiler said no", log="line 1")
        if request.top_k == 98:
            raise ToolchainMissingError("no compiler", code="toolchain-missing")
        if request.top_k == 97:
            raise ZeroDivisionError("a bug")
        return text_kernel(request, request.expression)


def text_kernel(request: BuildRequest, text: str) -> Artifact:
    """An artifact with the facts of a kernel whose source is the text."""
    source = text.encode()
    facts: dict[str, object] = {
        "digest": f"sha256:{hashlib.sha256(source).hexdigest()}",
        "target": request.target,
        "expression": request.expression,
        "language": "c",
        "launches": [{"name": "f", "grid": [1, 1, 1], "block": [1, 1, 1], "shared_bytes": 0}],
        "resources": [{"registers_per_thread": 0, "shared_bytes": 0, "spill_bytes": 0}],
        "estimate": {"seconds": 1e-5, "bound": "dram", "stages": [], "occupancy": 0.5, "waves": 1},
        "measurement": None,
        "files": {"source": "kernel.c", "binary": "kernel.so", "metadata": "metadata.json"},
    }
    return Artifact(str(facts["digest"]), facts, {"source": source, "binary": b"\x7fELF", "metadata": b"{}"})


def digest_of(request: BuildRequest) -> str:
    """The action of a request, without the second that starting a validating process takes. `bad` is refused."""
    if request.expression.startswith("bad"):
        raise ExprSyntaxError("not in the language", line=1, column=2, end_column=3)
    content = json.dumps(request_json(request), sort_keys=True)
    return f"sha256:{hashlib.sha256(content.encode()).hexdigest()}"
