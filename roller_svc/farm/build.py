"""BuildRequest → Artifact: the task of a build worker, and the JSON form of its result."""

from __future__ import annotations

import base64
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roller_svc.compiler.action import generator_digest
from roller_svc.compiler.artifact import package_kernel
from roller_svc.compiler.pipeline import build_kernel
from roller_svc.compiler.scheduled import build_scheduled
from roller_svc.compiler.serialize import kernel_json
from roller_svc.errors import BuildServiceError
from roller_svc.farm.store import Artifact, BuildStage, Json
from roller_svc.ir.canonical import to_json
from roller_svc.ir.kernel import Language, Measurement
from roller_svc.ir.options import SelectionMode
from roller_svc.ir.report import BuildReport, BuildRequest
from roller_svc.runtime.saved import serialization as saved

# Kinds of files, by the file names that runtime/saved/serialization.py uses.
SOURCE, BINARY, METADATA, REPORT, HEADER = "source", "binary", "metadata", "report", "header"
LOADED_GENERATOR = generator_digest()  # of the code imported by this process or by the process it was forked from
GENERATOR_REPLACED = "generator-replaced"
MAX_STAGES = 16  # of a build
MAX_TIME_S = 1e10  # of a stage
_STAGE = re.compile(r"[a-z][a-z_]{0,30}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_KINDS = {
    **{f"kernel{language.suffix}": SOURCE for language in Language},
    "kernel.so": BINARY, "kernel.cubin": BINARY, "kernel.hsaco": BINARY,
    saved.METADATA: METADATA,
    saved.REPORT: REPORT,
    saved.HEADER: HEADER,
}  # fmt: skip


def build_artifact(request: BuildRequest) -> Artifact:
    """Build a kernel and pack it. Raises the build's error."""
    if request.schedule is not None:
        return pack(build_scheduled(request))
    start_s = time.time()
    report = build_kernel(request)
    artifact = pack(package_kernel(report), report.winner.measurement, (*report.notes, *report.remarks))
    return replace(artifact, stages=_stages(report, start_s))


@dataclass(frozen=True, slots=True)
class BuildTask:
    """A build request with the generator digest of the service that sent it."""

    request: BuildRequest
    generator: str

    @property
    def runs_kernels(self) -> bool:
        """Whether the worker runs generated code, after which it must not take another task."""
        return self.request.select is SelectionMode.MEASURE

    def check_generator(self) -> None:
        """Raise BuildServiceError if this process runs other code than the service."""
        if self.generator != LOADED_GENERATOR:
            raise BuildServiceError(
                "the package was replaced under the running service: restart the service",
                code=GENERATOR_REPLACED,
            )


def build_task(task: BuildTask) -> Artifact:
    """Check the generator, then build. Raises BuildServiceError if this process runs other code than the service."""
    task.check_generator()
    return build_artifact(task.request)


def artifact_json(artifact: Artifact) -> Json:
    """Encode an artifact as JSON, its files in base64."""
    files = {kind: base64.b64encode(content).decode() for kind, content in artifact.files.items()}
    stages = [[stage.name, stage.start_s, stage.seconds] for stage in artifact.stages]
    return {"digest": artifact.digest, "facts": artifact.facts, "files": files, "stages": stages}


def parse_artifact(document: Mapping[str, Any]) -> Artifact:
    """Decode an artifact from artifact_json. Raises ValueError, KeyError or TypeError if it is malformed."""
    digest, facts, files = document["digest"], document["facts"], document["files"]
    if not (isinstance(digest, str) and DIGEST.fullmatch(digest)):
        raise ValueError(f"invalid digest: {str(digest)[:100]!r}")
    if not isinstance(facts, dict) or facts.get("digest") != digest:
        raise ValueError("the facts describe another kernel")
    if not set(files) <= set(_KINDS.values()):
        raise ValueError(f"unknown kinds of files: {sorted(set(files) - set(_KINDS.values()))}")
    return Artifact(digest, facts, decode_files(files), stages=_parse_stages(document.get("stages", ())))


def decode_files(files: Mapping[str, str]) -> dict[str, bytes]:
    """Decode the files of artifact_json. Raises ValueError, TypeError or AttributeError if they are malformed."""
    return {kind: base64.b64decode(text, validate=True) for kind, text in files.items()}


def pack(kernel: saved.KernelBundle, measurement: Measurement | None = None, notes: Sequence[str] = ()) -> Artifact:
    """Pack a kernel as facts and files."""
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
            "measurement": None if measurement is None else to_json(measurement),
            "notes": list(notes),
            "files": {_KINDS[name]: name for name in names},
        },
    )
    return Artifact(kernel.digest, facts, files)


def _stages(report: BuildReport, start_s: float) -> tuple[BuildStage, ...]:
    """Return the stages of a build that began at `start_s`, one after the other."""
    stages = []
    for name, seconds in report.stage_seconds:
        stages.append(BuildStage(name, start_s, seconds))
        start_s += seconds
    return tuple(stages)


def _parse_stages(document: Sequence[Any]) -> tuple[BuildStage, ...]:
    """Decode stages, which an untrusted process has sent. Raises ValueError or TypeError if they are malformed."""
    stages = []
    for name, start_s, seconds in document[:MAX_STAGES]:
        if not (isinstance(name, str) and _STAGE.fullmatch(name)):
            raise ValueError("invalid name of a stage")
        if not (0 <= float(start_s) < MAX_TIME_S and 0 <= float(seconds) < MAX_TIME_S):
            raise ValueError("invalid time of a stage")
        stages.append(BuildStage(name, float(start_s), float(seconds)))
    return tuple(stages)


def unpack(facts: dict[str, object], files: dict[str, bytes]) -> saved.KernelBundle:
    """Load the kernel of an artifact and check its digests."""
    names = facts.get("files")
    with tempfile.TemporaryDirectory(prefix="roller-") as temporary:
        for kind, name in (names if isinstance(names, dict) else {}).items():
            if _KINDS.get(name) == kind and kind in files:
                (Path(temporary) / name).write_bytes(files[kind])
        return saved.load(temporary)
