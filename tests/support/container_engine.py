"""Build images by buildah and run containers by podman, as root on a machine without an engine's service."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SERVERS = ROOT / "tests" / "containers" / "servers"
TOOLS = ("mmdebstrap", "buildah", "podman")
NETWORK_TOOLS = (Path("/usr/lib/podman/netavark"), Path("/usr/lib/podman/aardvark-dns"))
SUITE = "bookworm"
BASE, PRODUCT = "localhost/roller-test-base", "localhost/roller-test"
BUILD_TIMEOUT_S = 900.0


def missing_tools() -> list[str]:
    """Return the names of what a machine lacks to run these tests."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    missing += [path.name for path in NETWORK_TOOLS if not path.exists()]
    return missing if os.geteuid() == 0 else [*missing, "root"]


def run(*command: str, timeout_s: float = 60.0, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """Return the standard output of a command. Raise AssertionError with its messages if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env, cwd=cwd, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-1000:]}{done.stderr[-3000:]}"
    return done.stdout


class Engine:
    """podman and buildah, with the limits of this machine."""

    def __init__(self, folder: Path) -> None:
        config = folder / "containers.conf"
        open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        config.write_text(
            f'[containers]\ndefault_ulimits = ["nofile={open_files}:{open_files}", "nproc=4096:4096"]\n'
            '[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
        )
        self.env = os.environ | {"CONTAINERS_CONF": str(config)}

    def podman(self, *arguments: str, timeout_s: float = 60.0) -> str:
        return run("podman", *arguments, timeout_s=timeout_s, env=self.env)

    def succeeds(self, *arguments: str) -> bool:
        """Return whether a podman command succeeds."""
        done = subprocess.run(["podman", *arguments], capture_output=True, timeout=60.0, env=self.env, check=False)
        return done.returncode == 0

    def import_base(self, folder: Path) -> None:
        """Import an image of Debian with Python, in place of the one that a registry has."""
        if self.succeeds("image", "exists", BASE):
            return
        archive = folder / "base.tar"
        packages = "--include=ca-certificates,python3,python3-venv"
        run("mmdebstrap", "--quiet", "--variant=minbase", packages, SUITE, str(archive), timeout_s=BUILD_TIMEOUT_S)
        self.podman("import", "--quiet", str(archive), BASE, timeout_s=BUILD_TIMEOUT_S)
        archive.unlink()

    def build(self, tag: str, dockerfile: Path, context: Path, target: str | None = None) -> None:
        """Build an image on the imported base; what has not changed comes from the cache of layers."""
        certificates = os.environ.get("SSL_CERT_FILE")  # of a proxy that this machine's downloads pass
        trusted = "/etc/ssl/certs/ca-certificates.crt"
        run(
            "buildah",
            "bud",
            "--layers",
            "--isolation",
            "chroot",
            "--build-arg",
            f"BASE={BASE}",
            "--tag",
            tag,
            *(("--volume", f"{certificates}:{trusted}:ro") if certificates else ()),
            *(("--target", target) if target else ()),
            "--file",
            str(dockerfile),
            str(context),
            timeout_s=BUILD_TIMEOUT_S,
            env=self.env,
        )


class Compose:
    """A compose file's project."""

    def __init__(self, engine: Engine, file: Path, settings: dict[str, str]) -> None:
        self._engine, self._file = engine, file
        self._env = engine.env | settings | {"PYTHONWARNINGS": "ignore"}

    def __call__(self, *arguments: str, timeout_s: float = 180.0) -> str:
        command = (sys.executable, "-m", "podman_compose", "-f", str(self._file), *arguments)
        return run(*command, timeout_s=timeout_s, env=self._env, cwd=ROOT)

    def containers(self) -> dict[str, str]:
        """Return the container's name of each service."""
        found: list[dict[str, Any]] = json.loads(self._engine.podman("ps", "--all", "--format", "json"))
        names = {each["Labels"].get("com.docker.compose.service"): each["Names"][0] for each in found if each["Labels"]}
        return {service: name for service, name in names.items() if service}
