"""Build and estimate models, in worker processes: a model file is untrusted, and no other process parses it."""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roller_svc import settings
from roller_svc.errors import ArgumentError, BuildError, BuildServiceError
from roller_svc.farm.build import DIGEST, LOADED_GENERATOR, decode_files
from roller_svc.farm.models import JSON_GRAPH, ModelRequest, check_named
from roller_svc.farm.store import MODELS, Artifact, Json
from roller_svc.graph.python_ops import declare_python_ops
from roller_svc.graph.rammer.replay import edit_schedule, replay
from roller_svc.graph.wiring.kernels import Tuning
from roller_svc.ir.canonical import from_json, to_json
from roller_svc.ir.model_schedule import ModelSchedule
from roller_svc.model import Model, compile_model, estimate_model, find_devices

BUNDLE, PLAN, SOURCE, HEADER, TUNING, STORY, SCHEDULE = "bundle", "plan", "source", "header", "tuning", "story", "schedule"
KINDS = frozenset({BUNDLE, PLAN, SOURCE})  # of every model; a CPU's has a C header too, and its trials
OTHERS = frozenset({HEADER, TUNING, STORY, SCHEDULE})  # that some models have
MAX_FILES_BYTES = 640 << 20  # of a built model; base64 of it fits a worker's response
NOT_ESTIMATED = frozenset({"tune", "tune_options", "across", "order", "sink"})  # options that change no estimate
PLACING = ("inputs", "dims", "constants", "devices")  # options that a graph, and the devices of its nodes, depend on
LABEL = b"device"  # is in each file that labels a node: as JSON, and in the key of ONNX
SUMMARY = ("kind", "veus", "threads", "launches", "waits", "arena", "buckets")  # of a plan, in a response
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)  # fixed, so that a model always gives the same archive


@dataclass(frozen=True, slots=True)
class ModelTask:
    """A model with its content, and the generator digest of the service that sent it."""

    request: ModelRequest
    content: bytes
    generator: str = LOADED_GENERATOR
    functions: tuple[Any, ...] = ()  # of Python that the service has, without their code


@dataclass(frozen=True, slots=True)
class PlanTask:
    """Programs of a model's vEUs to check, and the stored schedule of the model."""

    schedule: bytes
    bucket: int
    programs: list[Any]  # of each launch that has a plan, [vEU][order]


def build_model_task(task: ModelTask) -> Artifact:
    """Build a model and pack it.

    The cache of kernels is in the worker's own directory, which ends with the worker: a worker runs generated code, so
    no other build may trust what it leaves.
    """
    source, options = _arguments(task)
    with tempfile.TemporaryDirectory(prefix="roller-") as temporary:
        current = settings.settings()
        settings.use(current.model_copy(update={"cache": Path(temporary) / "cache", "python_ops": ""}))
        declare_python_ops(task.functions)
        try:
            _check_labels(task, source, options)
            model = compile_model(source, task.request.target, **{"tune": "off", **options})
            folder = model.save(Path(temporary) / "model")
            files = {
                BUNDLE: _archive(folder),
                PLAN: _encode(model.plan),
                SOURCE: "\n".join(kernel.source for kernel in model.kernels).encode(),
            }
            header = folder / "model.h"
            files |= {HEADER: header.read_bytes()} if header.is_file() else {}
            files |= {STORY: _encode(model.story)} if model.has_story else {}
            schedule = model.schedule if model.has_story else None
            files |= {} if schedule is None else {SCHEDULE: _encode(schedule)}
            files |= {TUNING: _encode(model.tuning.to_document())} if isinstance(model.tuning, Tuning) else {}
        finally:
            settings.use(current)
    if sum(map(len, files.values())) > MAX_FILES_BYTES:
        raise BuildError(f"the built model has more than {MAX_FILES_BYTES} bytes", code="model-too-large")
    digest = f"sha256:{hashlib.sha256(files[BUNDLE]).hexdigest()}"
    return Artifact(digest, _facts(digest, model, files), files, MODELS)


def estimate_model_task(task: ModelTask) -> Json:
    """Return the estimate of a model as JSON."""
    source, options = _arguments(task)
    _check_labels(task, source, options)
    estimated = {name: value for name, value in options.items() if name not in NOT_ESTIMATED}
    return estimate_model(source, task.request.target, **estimated)


def check_plan_task(task: PlanTask) -> Json:
    """Return when each instruction of edited programs runs, as JSON. Raises ArgumentError for illegal ones."""
    buckets = json.loads(task.schedule)["buckets"]
    chosen = buckets[task.bucket] if task.bucket < len(buckets) else None
    if chosen is None:
        raise ArgumentError(f"bucket {task.bucket} of the model has no plan of a virtual device", code="invalid-plan")
    instructions, seconds = replay(edit_schedule(from_json(ModelSchedule, chosen), task.programs))
    return {"seconds": seconds, "instructions": [to_json(each) for each in sorted(instructions, key=lambda each: each.start_s)]}


def parse_model_artifact(document: Mapping[str, Any]) -> Artifact:
    """Decode a model from artifact_json. Raises ValueError, KeyError or TypeError if it is malformed."""
    digest, facts = document["digest"], document["facts"]
    if not (isinstance(digest, str) and DIGEST.fullmatch(digest)):
        raise ValueError(f"invalid digest: {str(digest)[:100]!r}")
    if not isinstance(facts, dict) or facts.get("digest") != digest:
        raise ValueError("the facts describe another model")
    files = decode_files(document["files"])
    if set(files) - OTHERS != KINDS or f"sha256:{hashlib.sha256(files[BUNDLE]).hexdigest()}" != digest:
        raise ValueError("the files are not those of the model")
    blobs = {kind: hashlib.sha256(content).hexdigest() for kind, content in files.items()}
    if facts.get("files") != blobs:
        raise ValueError("the facts name other files")
    return Artifact(digest, facts, files, MODELS)


def estimate_json(estimate: Json) -> Json:
    """Encode an estimate, which is JSON already."""
    return estimate


def parse_estimate(document: object) -> Json:
    """Decode an estimate. Raises ValueError if it is malformed."""
    if not isinstance(document, dict):
        raise ValueError("the estimate is not an object")
    return document


def _arguments(task: ModelTask) -> tuple[object, dict[str, Any]]:
    """Return the source and the options of compile_model."""
    if task.generator != LOADED_GENERATOR:
        raise BuildServiceError(
            "the package was replaced under the running service: restart the service", code="generator-replaced"
        )
    options: dict[str, Any] = dict(task.request.options)
    inputs = options.pop("inputs", None)
    if inputs:
        options["inputs"] = {name: (kind["dtype"], tuple(kind["shape"])) for name, kind in inputs.items()}
    if task.request.format != JSON_GRAPH:
        return task.content, options
    try:
        return json.loads(task.content), options
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"the graph is no JSON: {error}", code="invalid-model") from error


def _check_labels(task: ModelTask, source: object, options: Mapping[str, Any]) -> None:
    """Raise ArgumentError if the file names a device that the request does not. Others are not read twice."""
    if LABEL in task.content:
        given = {name: options[name] for name in PLACING if name in options}
        check_named(task.request, find_devices(source, task.request.target, **given))


def _facts(digest: str, model: Model, files: Mapping[str, bytes]) -> Json:
    seconds = {stage.name: stage.seconds for stage in model.estimate.stages}
    facts: Json = {
        "digest": digest,
        "target": model.target,
        "inputs": [each._asdict() for each in model.inputs],
        "outputs": [each._asdict() for each in model.outputs],
        "states": [each._asdict() for each in model.states],
        "kernels": [{"digest": each.digest, "uses": each.uses, "seconds": seconds.get(each.digest, 0.0)} for each in model.kernels],
        "plan": {name: _summarize(name, value) for name, value in model.plan.items() if name in SUMMARY},
        "estimate": {"seconds": model.estimate.seconds},
        "lowerings": model.report.get("lowerings", {}),
        "tuning": model.tuning.to_json() if isinstance(model.tuning, Tuning) else None,
        "subgraphs": model.plan.get("subgraphs", []),
        "copies": model.plan.get("copies", []),
        "sinks": model.report["sinks"],
        "files": {kind: hashlib.sha256(content).hexdigest() for kind, content in files.items()},
    }
    parsed: Json = json.loads(_encode(facts))  # tuples become lists, as the service sees them
    return parsed


def _summarize(name: str, value: Any) -> Any:
    if name != "buckets":
        return value
    return [{key: part for key, part in plan.items() if key in {"dims", *SUMMARY}} for plan in value]


def _archive(folder: Path) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as bundle:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            bundle.writestr(zipfile.ZipInfo(str(path.relative_to(folder)), _ZIP_TIME), path.read_bytes())
    return archive.getvalue()


def _encode(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
