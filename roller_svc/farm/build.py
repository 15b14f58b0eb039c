"""BuildRequest → Artifact: the work of one worker process."""

from __future__ import annotations

import tempfile
from pathlib import Path

from roller_svc.artifact import kept
from roller_svc.describe import kernel_json, measurement_json
from roller_svc.farm.store import Artifact
from roller_svc.ir.kernel import Language
from roller_svc.ir.report import BuildReport, BuildRequest
from roller_svc.pipeline import build_kernel
from roller_svc.runtime import saved

# Kinds of files by the name that runtime/saved.py gives them.
SOURCE, BINARY, METADATA, HEADER = "source", "binary", "metadata", "header"
_KINDS = {
    **{f"kernel{language.suffix}": SOURCE for language in Language},
    "kernel.so": BINARY, "kernel.cubin": BINARY, "kernel.hsaco": BINARY,
    saved.METADATA: METADATA,
    saved.HEADER: HEADER,
}  # fmt: skip


def build_artifact(request: BuildRequest) -> Artifact:
    """Build and pack. Raises the build's error."""
    return packed(build_kernel(request))


def packed(report: BuildReport) -> Artifact:
    """The winner as facts and files."""
    kernel = kept(report)
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


def unpacked(facts: dict[str, object], files: dict[str, bytes]) -> saved.SavedKernel:
    """An artifact's kernel again, its digests checked."""
    names = facts.get("files")
    with tempfile.TemporaryDirectory(prefix="roller-") as temporary:
        for kind, name in (names if isinstance(names, dict) else {}).items():
            if _KINDS.get(name) == kind and kind in files:
                (Path(temporary) / name).write_bytes(files[kind])
        return saved.load(temporary)
