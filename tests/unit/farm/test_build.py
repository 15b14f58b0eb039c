"""The stages of a build, as the process that builds sends them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from roller_svc.farm.build import MAX_STAGES, artifact_json, parse_artifact
from roller_svc.farm.store import Artifact, BuildStage

DIGEST = "sha256:" + "0" * 64


def document(stages: Any) -> dict[str, Any]:
    return {"digest": DIGEST, "facts": {"digest": DIGEST}, "files": {}, "stages": stages}


def test_stages_survive_their_encoding() -> None:
    artifact = Artifact(DIGEST, {"digest": DIGEST}, {}, stages=(BuildStage("parse", 1e9, 0.5),))
    assert parse_artifact(artifact_json(artifact)) == artifact


@pytest.mark.parametrize(
    "stages",
    [
        [["parse", 1.0]],
        [["parse\n", 1.0, 1.0]],
        [["x" * 40, 1.0, 1.0]],
        [[1, 1.0, 1.0]],
        [["parse", -1.0, 1.0]],
        [["parse", 1.0, math.inf]],
        [["parse", math.nan, 1.0]],
        [["parse", "soon", 1.0]],
        [["parse", None, 1.0]],
        [1],
    ],
)
def test_malformed_stages_are_rejected(stages: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        parse_artifact(document(stages))


def test_stages_are_limited() -> None:
    assert len(parse_artifact(document([["parse", 1.0, 1.0]] * 1000)).stages) == MAX_STAGES
