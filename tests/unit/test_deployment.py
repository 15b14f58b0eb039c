"""The files in docker/: schemas, settings that exist, and containers without privileges."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from roller_svc.cli.command import COMMANDS
from roller_svc.farm.database.tables import operations
from roller_svc.settings import LIMITS, Resource, Settings
from roller_svc.version import __version__

DOCKER = Path(__file__).resolve().parents[2] / "docker"
KUBERNETES_VERSION = "1.32"
DOCUMENTS = [
    (path.name, document)
    for path in sorted((DOCKER / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
]
DEPLOYMENTS = [document for _, document in DOCUMENTS if document["kind"] == "Deployment"]
SCALED = [document for _, document in DOCUMENTS if document["kind"] == "ScaledObject"]
COMPOSE = {name: yaml.safe_load((DOCKER / name).read_text(encoding="utf-8")) for name in ("compose.yaml", "compose.farm.yaml")}
ROLES = ("serve", "worker")


def is_of_kubernetes(document: dict[str, Any]) -> bool:
    """Whether the schema is Kubernetes' own: KEDA's and kustomize's are not in the validator."""
    return not document["apiVersion"].startswith(("keda.sh", "kustomize"))


def name_of(value: object) -> str:
    return f"{value['kind']}-{value['metadata']['name']}" if isinstance(value, dict) else str(value)


@pytest.mark.parametrize("document", [each for _, each in DOCUMENTS if is_of_kubernetes(each)], ids=name_of)
def test_manifests_follow_the_schema_of_kubernetes(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)


def test_a_wrong_manifest_is_noticed() -> None:
    document = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}, "spec": {"replica": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)


def test_kustomize_takes_every_manifest() -> None:
    (kustomization,) = (document for name, document in DOCUMENTS if name == "kustomization.yaml")
    assert set(kustomization["resources"]) == {name for name, _ in DOCUMENTS} - {"kustomization.yaml"}
    assert {image["name"] for image in kustomization["images"]} == {container(each)["image"] for each in DEPLOYMENTS}


def test_images_have_the_version_as_their_tag() -> None:
    (kustomization,) = (document for name, document in DOCUMENTS if name == "kustomization.yaml")
    assert [image["newTag"] for image in kustomization["images"]] == [__version__]
    assert COMPOSE["compose.yaml"]["services"]["roller"]["image"] == f"${{ROLLER_IMAGE:-roller-svc:{__version__}}}"
    assert f"-t roller-svc:{__version__} ." in (DOCKER / "Dockerfile").read_text(encoding="utf-8")


@pytest.mark.parametrize("file", COMPOSE)
def test_images_of_others_have_versions(file: str) -> None:
    defaults = [service["image"].partition(":-")[2].rstrip("}") for service in COMPOSE[file]["services"].values()]
    assert all(re.fullmatch(r"[a-z./-]+:(RELEASE\.)?\d[\w.-]*", image) for image in defaults), defaults


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=name_of)
def test_folders_that_are_written_are_volumes_with_room(deployment: dict[str, Any]) -> None:
    """The root is read-only, and a pod that exceeds its volumes is evicted."""
    (cache,) = re.findall(r"ROLLER_CACHE=(\S+)", (DOCKER / "Dockerfile").read_text(encoding="utf-8"))
    mounted = {mount["mountPath"]: mount["name"] for mount in container(deployment)["volumeMounts"]}
    volumes = deployment["spec"]["template"]["spec"]["volumes"]
    room_bytes = {volume["name"]: gibibytes(volume["emptyDir"]["sizeLimit"]) for volume in volumes}
    resources = container(deployment)["resources"]
    assert {"/tmp", cache} <= mounted.keys()
    uploads = LIMITS[Resource.UPLOADS].total
    assert uploads is not None
    assert room_bytes[mounted["/tmp"]] > uploads * Settings.model_fields["max_blob_bytes"].default
    for kind in ("requests", "limits"):
        assert gibibytes(resources[kind]["ephemeral-storage"]) >= sum(room_bytes.values())


def test_clients_reach_the_service_by_every_name_of_the_cluster() -> None:
    (settings,) = (document["data"] for _, document in DOCUMENTS if document["kind"] == "ConfigMap")
    (service,) = (document["metadata"]["name"] for _, document in DOCUMENTS if document["kind"] == "Service")
    (namespace,) = (document["metadata"]["name"] for _, document in DOCUMENTS if document["kind"] == "Namespace")
    suffixes = ("", f".{namespace}", f".{namespace}.svc", f".{namespace}.svc.cluster.local")
    assert set(settings["ROLLER_ALLOWED_HOSTS"].split(",")) == {service + suffix for suffix in suffixes}


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=name_of)
def test_pods_have_no_privileges(deployment: dict[str, Any]) -> None:
    pod = deployment["spec"]["template"]["spec"]
    security = container(deployment)["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    assert security["readOnlyRootFilesystem"]
    assert not security["allowPrivilegeEscalation"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert deployment["spec"]["selector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]
    assert container(deployment)["args"][0] in ROLES


def test_workers_have_the_time_to_drain() -> None:
    (settings,) = (document["data"] for _, document in DOCUMENTS if document["kind"] == "ConfigMap")
    drain_s = float(settings["ROLLER_DRAIN_TIMEOUT_S"])
    for deployment in workers():
        assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= drain_s + 15
    default_s = Settings.model_fields["drain_timeout_s"].default
    for worker in farm_workers():
        assert int(worker["stop_grace_period"].removesuffix("s")) >= default_s + 15


def test_workers_scale_by_the_depth_of_their_queues() -> None:
    scaled = {document["scaleTargetRef"]["name"]: document for document in (each["spec"] for each in SCALED)}
    assert set(scaled) == {deployment["metadata"]["name"] for deployment in workers()}
    (authentication,) = (document for _, document in DOCUMENTS if document["kind"] == "TriggerAuthentication")
    for deployment in workers():
        arguments = container(deployment)["args"]
        queues = arguments[arguments.index("--queues") + 1].split(",")
        jobs = arguments[arguments.index("--jobs") + 1]
        spec = scaled[deployment["metadata"]["name"]]
        (trigger,) = spec["triggers"]
        assert (trigger["type"], trigger["metadata"]["targetQueryValue"]) == ("postgresql", jobs)
        assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]
        assert re.findall(r"'([^']+)'", trigger["metadata"]["query"])[1:] == queues
        assert "replicas" not in deployment["spec"]  # they are KEDA's
        columns = set(re.findall(r"\b(state|queue)\b", trigger["metadata"]["query"]))
        assert columns <= set(operations.columns.keys())


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_files_set_only_settings_that_exist(name: str) -> None:
    known = {f"ROLLER_{field.upper()}" for field in Settings.model_fields}
    for service in COMPOSE[name]["services"].values():
        assert {key for key in service.get("environment", ()) if key.startswith("ROLLER_")} <= known
    (settings,) = (document["data"] for _, document in DOCUMENTS if document["kind"] == "ConfigMap")
    assert {key for key in settings if key.startswith("ROLLER_")} <= known


def test_a_farm_has_a_service_and_two_workers_of_one_image() -> None:
    services = COMPOSE["compose.farm.yaml"]["services"]
    assert len(farm_workers()) == 2
    assert {service["image"] for service in (services["api"], *farm_workers())} == {f"${{ROLLER_IMAGE:-roller-svc:{__version__}}}"}
    for service in (services["api"], *farm_workers(), COMPOSE["compose.yaml"]["services"]["roller"]):
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
    assert services["api"]["command"] == ["serve", "--workers", "0"]
    assert set(ROLES) <= set(COMMANDS)


def test_the_image_runs_without_root() -> None:
    lines = (DOCKER / "Dockerfile").read_text(encoding="utf-8").splitlines()
    assert "USER 10001" in lines
    assert 'ENTRYPOINT ["roller"]' in lines
    assert "ARG BASE=python:3.11-slim" in lines


def gibibytes(quantity: str) -> int:
    """Return the bytes of a quantity such as 4Gi."""
    return int(quantity.removesuffix("Gi")) << 30


def workers() -> list[dict[str, Any]]:
    return [deployment for deployment in DEPLOYMENTS if container(deployment)["args"][0] == "worker"]


def farm_workers() -> list[dict[str, Any]]:
    services = COMPOSE["compose.farm.yaml"]["services"]
    return [service for service in services.values() if (service.get("command") or [""])[0] == "worker"]


def container(deployment: dict[str, Any]) -> dict[str, Any]:
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = only
    return found
