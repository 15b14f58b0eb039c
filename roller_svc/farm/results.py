"""The schema of results in the store: what responses and bundles take from the facts and files of a manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping

from pydantic import ValidationError

from roller_svc.client.schemas import KernelResponse, ModelResponse
from roller_svc.farm.build import BINARY, METADATA, SOURCE
from roller_svc.farm.store import MODELS, Json


def is_result(manifest: Json) -> bool:
    """Whether a manifest has the facts and the files of a kernel or a model. A stranger may have written it."""
    facts, files = manifest["facts"], manifest["files"]
    if not isinstance(facts, dict) or not isinstance(files, dict) or facts.get("digest") != manifest["digest"]:
        return False
    is_model = manifest.get("folder") == MODELS
    try:
        (ModelResponse if is_model else KernelResponse).model_validate_json(json.dumps({**facts, "links": {}}), strict=True)
    except ValidationError:
        return False
    return _has_model_files(facts, files) if is_model else _has_kernel_files(facts, files)


def _has_model_files(facts: Mapping[str, object], files: Mapping[str, object]) -> bool:
    return bool(files) and facts.get("files") == files


def _has_kernel_files(facts: Mapping[str, object], files: Mapping[str, object]) -> bool:
    """Whether there is each file that the facts name, and the three that every kernel has."""
    names = facts.get("files")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        return False
    return set(names) == set(files) and {SOURCE, BINARY, METADATA} <= set(files)
