"""Kernels and objects of models in a folder, by the digest of what makes them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from roller_svc.compiler.action import action_digest
from roller_svc.errors import ArgumentError, UnknownKernelError
from roller_svc.ir.report import BuildRequest
from roller_svc.runtime.saved import serialization as saved
from roller_svc.runtime.saved.serialization import KernelBundle


class KernelCache:
    """A folder that several processes may share. What cannot be read counts as missing, and is built again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, request: BuildRequest) -> KernelBundle | None:
        """Return the kernel that an equal request has left; None if there is none."""
        try:
            return saved.load(self._kernel(request))
        except (UnknownKernelError, ArgumentError):
            return None

    def save(self, request: BuildRequest, bundle: KernelBundle) -> None:
        saved.save(bundle, self._kernel(request))

    def load_object(self, key: str) -> bytes | None:
        """Return an object of that key; None if there is none."""
        try:
            return self._object(key).read_bytes()
        except FileNotFoundError:
            return None

    def save_object(self, key: str, content: bytes) -> None:
        path = self._object(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".object-")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)

    def _kernel(self, request: BuildRequest) -> Path:
        return self.folder / "kernels" / action_digest(request).removeprefix("sha256:")

    def _object(self, key: str) -> Path:
        return self.folder / "objects" / f"{key}.o"
