"""Save and load models: a directory with shared objects, headers, weights and metadata.json.

    model.so, model.h       the code, and how a C program calls it, by the model's name
    weights.bin             the weights that steps read
    packed.bin              weights that are packed for kernels
    kernels/0, ...          each kernel as `roller_svc.load` reads it, for its source and its report
    metadata.json           everything else; it is written last

A model with several variants has a number in the names of all but the first, and of their files; equal files are stored
once.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from roller_svc.errors import ArgumentError, RollerError, UnknownKernelError
from roller_svc.ir.model_plan import MAX_BYTES, ModelKernel, ModelPlan
from roller_svc.runtime.binding import Array
from roller_svc.runtime.saved.json_fields import CorruptKernelError, count, identifier, items, mapping, string
from roller_svc.runtime.saved.plan_json import plan_from_json, plan_to_json
from roller_svc.runtime.saved.serialization import (
    METADATA,
    KernelBundle,
    directory_path,
    load,
    parse_metadata,
    read_block,
    read_file,
    save,
)

FORMAT = "roller-model/2"
KERNELS = "kernels"
MAX_METADATA_BYTES = 1 << 28
MAX_BINARY_BYTES = 1 << 30
_MAX_KERNELS = 1 << 12
_MAX_VARIANTS = 64
_FILE_KINDS = (("binary", "model", ".so"), ("header", "model", ".h"), ("weights", "weights", ".bin"),
               ("packed", "packed", ".bin"))  # fmt: skip


@dataclass(frozen=True, slots=True)
class VariantBundle:
    """The model for one set of shapes."""

    dims: tuple[tuple[str, int], ...]  # symbolic dimensions
    name: str  # begins the names of its functions
    plan: ModelPlan
    kernels: tuple[int, ...]  # for each kernel of the plan, its position in ModelBundle.kernels
    binary: bytes
    weights: Array  # those that steps read, as bytes
    packed: Array


@dataclass(frozen=True, slots=True)
class ModelBundle:
    """A model as it is saved. `report` is a JSON value, stored unchanged."""

    digest: str
    name: str
    target: str
    kernels: tuple[KernelBundle, ...]
    variants: tuple[VariantBundle, ...]
    report: Mapping[str, Any]


MakeHeader = Callable[[ModelPlan, str, str, str], str]


def variant_name(name: str, number: int) -> str:
    """Return the name of a model's variant, which begins with the model's."""
    return f"{name}_{number}" if number else name


def save_model(model: ModelBundle, directory: str | os.PathLike[str], make_header: MakeHeader) -> Path:
    """Write the model to `directory`, which need not exist, and return its path.

    Readers see the whole model or none. Files of other names in an existing directory stay unchanged. `make_header`
    returns the C header for a plan, a name, and the names of the files of weights and packed weights.
    """
    target = directory_path(directory)
    if target.exists() and not target.is_dir():
        raise ArgumentError(f"{target} is not a directory", code="not-a-folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
            staged = Path(temporary) / "model"
            staged.mkdir()
            _write(model, staged, make_header)
            _move(staged, target)
    except OSError as failure:
        raise ArgumentError(f"cannot write to {target}: {failure.strerror}", code="unwritable-folder") from failure
    return target


def load_model(directory: str | os.PathLike[str]) -> ModelBundle:
    """Load the model in `directory`, checking its files against the digests stored there. Runs nothing.

    Raises UnknownKernelError if there is no model, and ArgumentError (damaged-kernel) if its files have changed since
    it was saved.
    """
    path = directory_path(directory)
    if not (path / METADATA).is_file():
        raise UnknownKernelError(f"{path} has no saved model ({METADATA} is missing)")
    try:
        return _read(path)
    except (CorruptKernelError, RollerError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArgumentError(f"{path} is not a saved model: {error}", code="damaged-kernel") from error


def _write(model: ModelBundle, folder: Path, make_header: MakeHeader) -> None:
    files: dict[str, dict[str, Any]] = {}
    names: dict[tuple[str, str], str] = {}  # of stored files, by kind and digest
    variants = []
    for number, variant in enumerate(model.variants):
        contents: dict[str, memoryview | bytes] = {
            "weights": variant.weights.reshape(-1).view(np.uint8).data,
            "packed": variant.packed.reshape(-1).view(np.uint8).data,
            "binary": variant.binary,
        }
        chosen: dict[str, str] = {}
        for kind in ("weights", "packed", "binary", "header"):
            if kind == "header":
                contents[kind] = make_header(variant.plan, variant.name, chosen["weights"], chosen["packed"]).encode()
            content = contents[kind]
            digest = hashlib.sha256(content).hexdigest()
            name = names.setdefault((kind, digest), _file_name(kind, number))
            if name not in files:
                (folder / name).write_bytes(content)
                files[name] = {"sha256": digest, "bytes": len(content)}
            chosen[kind] = name
        plan = plan_to_json(variant.plan)
        variants.append({"dims": dict(variant.dims), "kernels": list(variant.kernels), "files": chosen, "plan": plan})
    uses: list[list[Any]] = [[kernel.estimate_s, kernel.uses] for v in model.variants for kernel in v.plan.kernels]
    (folder / KERNELS).mkdir()
    for number, bundle in enumerate(model.kernels):
        save(bundle, folder / KERNELS / str(number))
    document = {
        "format": FORMAT,
        "name": model.name,
        "digest": model.digest,
        "target": model.target,
        "kernels": [bundle.digest for bundle in model.kernels],
        "uses": uses,
        "variants": variants,
        "files": files,
        "report": dict(model.report),
    }
    content = (json.dumps(document, allow_nan=False) + "\n").encode()
    (folder / METADATA).write_bytes(content)


def _file_name(kind: str, number: int) -> str:
    stem, suffix = next((stem, suffix) for each, stem, suffix in _FILE_KINDS if each == kind)
    return f"{stem}{f'.{number}' if number else ''}{suffix}"


def _move(staged: Path, target: Path) -> None:
    if not target.exists() or not any(target.iterdir()):
        staged.rename(target)  # also replaces an empty directory
        return
    # Without its metadata a half-replaced directory is not a model, rather than a wrong one.
    (target / METADATA).unlink(missing_ok=True)
    if (target / KERNELS).is_dir() and not (target / KERNELS).is_symlink():
        shutil.rmtree(target / KERNELS)
    for path in sorted(staged.iterdir(), key=lambda path: path.name == METADATA):  # metadata comes last
        path.replace(target / path.name)


def _read(path: Path) -> ModelBundle:
    document = parse_metadata(read_file(path, METADATA, MAX_METADATA_BYTES))
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CorruptKernelError(f"{METADATA} is not in the format {FORMAT}")
    bundles = []
    digests = items(document, "kernels")
    for number, digest in enumerate(digests):
        bundle = load(path / KERNELS / str(number))
        if bundle.digest != digest:
            raise CorruptKernelError(f"kernel {number} is another one")
        bundles.append(bundle)
    listed = items(document, "variants")
    if not 1 <= len(listed) <= _MAX_VARIANTS:
        raise CorruptKernelError(f"a model has 1 to {_MAX_VARIANTS} variants")
    uses = iter(document["uses"])
    contents: dict[str, Array] = {}
    name = identifier(document["name"])
    variants = tuple(
        _variant(path, document, variant_name(name, number), each, bundles, uses, contents)
        for number, each in enumerate(listed)
    )
    return ModelBundle(
        string(document["digest"]), name, string(document["target"]), tuple(bundles), variants,
        mapping(document, "report"),
    )  # fmt: skip


def _variant(
    path: Path, document: dict[str, Any], name: str, fields: dict[str, Any], bundles: Sequence[KernelBundle],
    uses: Any, contents: dict[str, Array],
) -> VariantBundle:  # fmt: skip
    positions = tuple(count(each, 0, len(bundles) - 1) for each in items(fields, "kernels"))
    kernels = []
    for position in positions:
        seconds, number = next(uses, (None, None))
        if not isinstance(seconds, float | int) or not 0 <= seconds < 1e9:
            raise CorruptKernelError("an estimate is not a time")
        kernels.append(ModelKernel(bundles[position].compiled.source, float(seconds), count(number, 0, 1 << 31)))
    plan = plan_from_json(fields["plan"], kernels)
    sizes = {"binary": None, "weights": plan.read_weights_bytes, "packed": plan.packed_bytes}
    parts = {kind: _content(path, document, fields, kind, size, contents) for kind, size in sizes.items()}
    dims = tuple((string(name), count(extent, 0, MAX_BYTES)) for name, extent in mapping(fields, "dims").items())
    return VariantBundle(dims, name, plan, positions, parts["binary"].tobytes(), parts["weights"], parts["packed"])


def _content(
    path: Path, document: dict[str, Any], fields: dict[str, Any], kind: str, size_bytes: int | None,
    contents: dict[str, Array],
) -> Array:  # fmt: skip
    """Return a file's bytes at an aligned address. They have the digest and the size that they should have."""
    name = mapping(fields, "files")[kind]
    known = [_file_name(kind, number) for number in range(_MAX_VARIANTS)]
    if name not in known:  # names in the metadata are untrusted
        raise CorruptKernelError(f"{name!r} is not the name of a file of {kind}")
    if name not in contents:
        if size_bytes is None:
            contents[name] = np.frombuffer(read_file(path, name, MAX_BINARY_BYTES), np.uint8)
        else:
            contents[name] = read_block(path, name, size_bytes)
        if hashlib.sha256(contents[name].data).hexdigest() != mapping(document, "files")[name]["sha256"]:
            raise CorruptKernelError(f"{name} is not the file that was saved (its sha256 differs)")
    if size_bytes is not None and len(contents[name]) != size_bytes:
        raise CorruptKernelError(f"{name} has {len(contents[name])} bytes, expected {size_bytes}")
    return contents[name]
