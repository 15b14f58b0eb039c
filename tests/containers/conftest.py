"""The images of docker/, built once; a test without the tools for that is skipped by name."""

from __future__ import annotations

import pytest
from container_engine import PRODUCT, ROOT, SERVERS, Engine, missing_tools

STANDINS = {"postgres": "POSTGRES_IMAGE", "rabbitmq": "RABBITMQ_IMAGE", "s3": "S3_IMAGE", "mc": "S3_CLIENT_IMAGE"}


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    missing = missing_tools()
    if missing:
        pytest.skip(f"not on this machine: {', '.join(missing)}")
    folder = tmp_path_factory.mktemp("engine")
    made = Engine(folder)
    made.import_base(folder)
    return made


@pytest.fixture(scope="session")
def product(engine: Engine) -> str:
    """The image of docker/Dockerfile."""
    engine.build(PRODUCT, ROOT / "docker" / "Dockerfile", ROOT)
    return PRODUCT


@pytest.fixture(scope="session")
def servers(engine: Engine) -> dict[str, str]:
    """The settings of compose.farm.yaml that name the images of its servers."""
    images = {variable: f"localhost/roller-test-{name}" for name, variable in STANDINS.items()}
    for name, variable in STANDINS.items():
        engine.build(images[variable], SERVERS / "Dockerfile", SERVERS, target=name)
    return images
