"""BuildRequest → Artifact: the work of one worker process, and how its result comes back."""

from __future__ import annotations

import base64
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roller_svc.compiler.artifact import package_kernel
from roller_svc.compiler.pipeline import build_kernel
from roller_svc.compiler.serialize import kernel_json, measurement_json
from roller_svc.errors import BuildServiceError
from roller_svc.farm.action import generator_digest
from roller_svc.farm.store import Artifact, Json
from roller_svc.ir.kernel import Language
from roller_svc.ir.report import BuildReport, BuildRequest, Select
from roller_svc.runtime.saved import serialization as saved

# Kinds of files by the name that runtime/saved/serialization.py gives them.
SOURCE, BINARY, METADATA, HEADER = "source", "binary", "metadata", "header"
LOADED_GENERATOR = generator_digest()  # of the code that this process imported, or the one that it was forked from
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_KINDS = {
    **{f"kernel{language.suffix}": SOURCE for language in Language},
    "kernel.so": BINARY, "kernel.cubin": BINARY, "kernel.hsaco": BINARY,
    saved.METADATA: METADATA,
    saved.HEADER: HEADER,
}  # fmt: skip


def build_artifact(request: BuildRequest) -> Artifact:
    """Build and pack. Raises the build's error."""
    return pack(build_kernel(request))


@dataclass(frozen=True, slots=True)
class BuildTask:
    """A request, and the digest of the generator that the service runs."""

    request: BuildRequest
    generator: str

    @property
    def runs_kernels(self) -> bool:
        """Whether its worker runs what was generated, and so takes no other task afterwards."""
        return self.request.select is Select.MEASURE

    def check_generator(self) -> None:
        """Raises BuildServiceError where this process has other code than the service."""
        if self.generator != LOADED_GENERATOR:
            raise BuildServiceError(
                "the package was replaced under the running service: start the service anew",
                code="generator-replaced",
            )


def build_task(task: BuildTask) -> Artifact:
    """build_artifact, fenced. Raises BuildServiceError where this process has other code than the service."""
    task.check_generator()
    return build_artifact(task.request)


def artifact_json(artifact: Artifact) -> Json:
    """An artifact in plain values, its files in base64."""
    files = {kind: base64.b64encode(content).decode() for kind, content in artifact.files.items()}
    return {"digest": artifact.digest, "facts": artifact.facts, "files": files}


def parse_artifact(document: Mapping[str, Any]) -> Artifact:
    """The artifact that artifact_json wrote. Raises ValueError, KeyError or TypeError for what is none."""
    digest, facts, files = document["digest"], document["facts"], document["files"]
    if not (isinstance(digest, str) and DIGEST.fullmatch(digest)):
        raise ValueError(f"{str(digest)[:100]!r} is no digest")
    if not isinstance(facts, dict) or facts.get("digest") != digest:
        raise ValueError("the facts are of another kernel")
    if not set(files) <= set(_KINDS.values()):
        raise ValueError(f"a kernel has no files {sorted(set(files) - set(_KINDS.values()))}")
    return Artifact(digest, facts, {kind: base64.b64decode(text, validate=True) for kind, text in files.items()})


def pack(report: BuildReport) -> Artifact:
    """The winner as facts and files."""
    kernel = package_kernel(report)
    with tempfile.TemporaryDirectory(prefix="roller-") as temporary:
        folder = saved.save(kernel, Path(temporary) / "kernel")
        names = sorted(path.name for path in folder.iterdir())
        files = {_KINDS[name]: (folder / name).read_bytes() for name in names}
    facts = kernel_json(
        kernel.compiled,
        {
            "target": kernel.target,
            "expression": kernel.expression,
            "estimate": kernel.estimate,
            "measurement": measurement_json(report.winner.measurement),
            "notes": list(report.notes),
            "files": {_KINDS[name]: name for name in names},
        },
    )
    return Artifact(kernel.digest, facts, files)


def unpack(facts: dict[str, object], files: dict[str, bytes]) -> saved.SavedKernel:
    """An artifact's kernel again, its digests checked."""
    names = facts.get("files")
    with tempfile.TemporaryDirectory(prefix="roller-") as temporary:
        for kind, name in (names if isinstance(names, dict) else {}).items():
            if _KINDS.get(name) == kind and kind in files:
                (Path(temporary) / name).write_bytes(files[kind])
        return saved.load(temporary)
