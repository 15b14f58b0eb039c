"""Kernels, objects and costs of models in a folder, by the digest of what makes them."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from roller_svc.compiler.action import action_digest, estimate_digest
from roller_svc.errors import ArgumentError, UnknownKernelError
from roller_svc.ir.canonical import from_json, to_json
from roller_svc.ir.constraints import WinogradMode
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.report import BuildRequest
from roller_svc.runtime.saved import serialization as saved
from roller_svc.runtime.saved.serialization import KernelBundle

SERIAL = "serial"  # plan without operators side by side
MAX_COSTS = 50_000  # of a device, about 5 MB
MAX_COST = 1e9


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """The kind of a model's plan, and the times that decided it."""

    kind: str
    alone_s: tuple[float, ...] = ()  # of each step on one worker
    launch_s: tuple[float, ...] = ()  # of each step on all workers
    seconds: Mapping[str, float] = field(default_factory=dict)  # of a call, by kind
    is_measured: bool = False
    efficient_s: tuple[float | None, ...] = ()  # of each step on one worker, by another rKernel than the fastest


class KernelCache:
    """A folder that several processes may share.

    What cannot be read counts as missing, and is built again. What cannot be written is not kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, request: BuildRequest) -> KernelBundle | None:
        """Return the kernel that an equal request has left; None if there is none."""
        return _load_kernel(self._kernel(request))

    def save(self, request: BuildRequest, bundle: KernelBundle) -> None:
        _save_kernel(bundle, self._kernel(request))

    def load_single(self, request: BuildRequest) -> KernelBundle | None:
        """Return the kernel that `save_single` has kept. Those of models are apart: they have a second kernel."""
        return _load_kernel(self._single(request))

    def save_single(self, request: BuildRequest, bundle: KernelBundle) -> None:
        _save_kernel(bundle, self._single(request))

    def load_efficient(self, request: BuildRequest) -> KernelBundle | None:
        """Return the most efficient kernel of an equal request; None if that is the one that `load` returns."""
        return _load_kernel(self._efficient(request))

    def save_efficient(self, request: BuildRequest, bundle: KernelBundle) -> None:
        """Keep the most efficient kernel. Do so before `save`: a kernel that can be loaded has no other one later."""
        _save_kernel(bundle, self._efficient(request))

    def load_alternatives(self, request: BuildRequest) -> list[KernelBundle] | None:
        """Return the fastest kernels of an equal request, for trials in a model; None if they were not kept."""
        return _load_kernels(self._alternatives(request))

    def save_alternatives(self, request: BuildRequest, bundles: Sequence[KernelBundle]) -> None:
        _save_kernels(bundles, self._alternatives(request))

    def load_joinable(self, request: BuildRequest) -> list[KernelBundle] | None:
        """Return the kernel that can join others where the fastest one cannot; none if no one pays, None if unknown."""
        return _load_kernels(self._joinable(request))

    def save_joinable(self, request: BuildRequest, bundles: Sequence[KernelBundle]) -> None:
        _save_kernels(bundles, self._joinable(request))

    def load_joint(self, key: str) -> KernelBundle | None:
        """Return the kernel of many operators of that key; None if there is none."""
        return _load_kernel(self._joint(key))

    def save_joint(self, key: str, bundle: KernelBundle) -> None:
        _save_kernel(bundle, self._joint(key))

    def load_object(self, key: str) -> bytes | None:
        """Return an object of that key; None if there is none."""
        return _load_bytes(self._object(key))

    def save_object(self, key: str, content: bytes) -> None:
        _save_bytes(content, self._object(key))

    def load_lowering(self, key: str) -> bytes | None:
        """Return what a lowering has made, of that key; None if there is nothing."""
        return _load_bytes(self._lowering(key))

    def save_lowering(self, key: str, content: bytes) -> None:
        _save_bytes(content, self._lowering(key))

    def load_costs(self, hw: HardwareSpec, winograd: WinogradMode) -> dict[str, list[float] | None]:
        """Return the costs of programs on a device, by digest, that compiles have left."""
        try:
            document = json.loads(self._costs(hw, winograd).read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        listed = document if isinstance(document, dict) else {}
        return {str(digest): cost for digest, cost in listed.items() if cost is None or _is_cost(cost)}

    def save_costs(self, hw: HardwareSpec, winograd: WinogradMode, costs: Mapping[str, list[float] | None]) -> None:
        """Keep costs. Those that another process saves at the same time may be lost, and are computed again."""
        latest = list(costs.items())[-MAX_COSTS:]
        _replace(self._costs(hw, winograd), json.dumps(dict(latest), separators=(",", ":")).encode())

    def load_choice(self, key: str) -> PlanChoice | None:
        """Return the choice that a compile has left under a key; None if there is none."""
        try:
            return from_json(PlanChoice, json.loads(self._choice(key).read_bytes()))
        except (OSError, ValueError, ArgumentError, RecursionError):
            return None

    def save_choice(self, key: str, choice: PlanChoice) -> None:
        _replace(self._choice(key), json.dumps(to_json(choice), separators=(",", ":")).encode())

    def _choice(self, key: str) -> Path:
        return self.folder / "plans" / f"{key}.json"

    def _kernel(self, request: BuildRequest) -> Path:
        return self.folder / "kernels" / action_digest(request).removeprefix("sha256:")

    def _single(self, request: BuildRequest) -> Path:
        return self.folder / "single" / action_digest(request).removeprefix("sha256:")

    def _efficient(self, request: BuildRequest) -> Path:
        return self.folder / "efficient" / action_digest(request).removeprefix("sha256:")

    def _alternatives(self, request: BuildRequest) -> Path:
        return self.folder / "alternatives" / action_digest(request).removeprefix("sha256:")

    def _joinable(self, request: BuildRequest) -> Path:
        return self.folder / "joinable" / action_digest(request).removeprefix("sha256:")

    def _joint(self, key: str) -> Path:
        return self.folder / "joint" / key

    def _lowering(self, key: str) -> Path:
        return self.folder / "lowerings" / f"{key}.npz"

    def _costs(self, hw: HardwareSpec, winograd: WinogradMode) -> Path:
        return self.folder / "costs" / f"{estimate_digest(hw, winograd)}.json"

    def _object(self, key: str) -> Path:
        return self.folder / "objects" / f"{key}.o"


def _load_kernel(folder: Path) -> KernelBundle | None:
    try:
        return saved.load(folder)
    except (UnknownKernelError, ArgumentError):
        return None


def _save_kernel(bundle: KernelBundle, folder: Path) -> None:
    try:
        saved.save(bundle, folder)
    except ArgumentError as refused:
        if refused.code != "unwritable-folder":
            raise


def _load_kernels(folder: Path) -> list[KernelBundle] | None:
    """Return the kernels that `_save_kernels` has kept; None if there are none of them, or one cannot be read."""
    try:
        number = int((folder / "number").read_bytes())
    except (OSError, ValueError):
        return None
    kernels = [_load_kernel(folder / str(each)) for each in range(number)]
    return None if None in kernels else [kernel for kernel in kernels if kernel is not None]


def _save_kernels(bundles: Sequence[KernelBundle], folder: Path) -> None:
    """Keep kernels; their number is written last, so that another process finds all of them or none."""
    for number, bundle in enumerate(bundles):
        _save_kernel(bundle, folder / str(number))
    _replace(folder / "number", str(len(bundles)).encode())


def _load_bytes(path: Path) -> bytes | None:
    """Return what `_save_bytes` has written; None if there is nothing or it is damaged."""
    try:
        digest, content = path.read_bytes().split(b"\n", 1)
    except (OSError, ValueError):
        return None
    return content if digest == _digest(content) else None


def _save_bytes(content: bytes, path: Path) -> None:
    _replace(path, _digest(content) + b"\n" + content)


def _replace(path: Path, content: bytes) -> None:
    """Write a file at once, so that other processes read all of it or none."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.parent.name}-")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _is_cost(value: object) -> bool:
    """Return whether a value is [kernels, seconds] or [kernels]."""
    return (
        isinstance(value, list)
        and len(value) in (1, 2)
        and all(isinstance(each, int | float) and 0 <= each < MAX_COST for each in value)
    )
