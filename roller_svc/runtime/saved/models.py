"""Save and load models: a directory with shared objects, headers, weights and metadata.json.

    model.so, model.h       the code, and how a C program calls it, by the model's name
    weights.bin             the weights that steps read
    packed.bin              weights that are packed for kernels
                            (of these files, a model for a GPU has weights.bin alone)
    model.h, model_host.c   with the launcher "cpp" of a model for an NVIDIA device: a C program that runs it, and
    plan.bin                its steps
    kernels/0, ...          each kernel as `roller_svc.load` reads it, for its source and its report
    metadata.json           everything else; it is written last

A model with several variants has a number in the names of all but the first, and of their files; equal files are stored
once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from roller_svc.ir.canonical import OMIT_DEFAULT, UNTAGGED, Limit, as_array, from_json, to_json
from roller_svc.ir.kernel import Language
from roller_svc.ir.model_plan import AS_GRAPH, MAX_BYTES, ModelKernel, ModelPlan
from roller_svc.runtime.binding import Array
from roller_svc.runtime.saved.launchers import host_launcher_files
from roller_svc.runtime.saved.metadata import CorruptKernelError, FileEntry, Identifier, Text
from roller_svc.runtime.saved.model_host import HostFiles, host_program
from roller_svc.runtime.saved.plan_json import plan_from_json, plan_to_json
from roller_svc.runtime.saved.serialization import (
    METADATA,
    KernelBundle,
    binary_name,
    check_digest,
    load,
    read_block,
    read_file,
    read_folder,
    read_metadata,
    save,
    write_folder,
)

FORMAT = "roller-model/2"
KERNELS = "kernels"
MAX_METADATA_BYTES = 1 << 28
MAX_BINARY_BYTES = 1 << 30
_MAX_KERNELS = 1 << 12
_MAX_VARIANTS = 64
_FILE_KINDS = (("binary", "model", ".so"), ("header", "model", ".h"), ("weights", "weights", ".bin"),
               ("packed", "packed", ".bin"), ("plan", "plan", ".bin"), ("code", "model_host", ".c"))  # fmt: skip


@dataclass(frozen=True, slots=True)
class VariantBundle:
    """The model for one set of shapes."""

    dims: tuple[tuple[str, int], ...]  # symbolic dimensions
    name: str  # begins the names of its functions
    plan: ModelPlan
    kernels: tuple[int, ...]  # for each kernel of the plan, its position in ModelBundle.kernels
    binary: bytes  # empty for a GPU: the kernels' own are the code
    weights: Array  # as bytes: those that steps read, and for a GPU those that packing reads
    packed: Array  # empty for a GPU, which packs when it loads the model


@dataclass(frozen=True, slots=True)
class ModelBundle:
    """A model as it is saved. `report` is a JSON value, stored unchanged."""

    digest: str
    name: str
    target: str
    kernels: tuple[KernelBundle, ...]
    variants: tuple[VariantBundle, ...]
    report: Mapping[str, Any]


@as_array
@dataclass(frozen=True, slots=True)
class Uses:
    """A kernel's estimate and how many nodes use it."""

    estimate_s: Annotated[float, Limit(0, 10**9)]
    uses: Annotated[int, Limit(0, 1 << 31)]


@dataclass(frozen=True, slots=True)
class VariantEntry:
    """A variant in metadata.json: its kernels by position, its files by kind."""

    dims: Mapping[str, Annotated[int, Limit(0, MAX_BYTES)]]
    kernels: tuple[Annotated[int, Limit(0, _MAX_KERNELS)], ...]
    files: Mapping[str, str]
    plan: Any


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """The whole metadata.json of a model."""

    format: str
    name: Identifier
    digest: Text
    target: Text
    kernels: Annotated[tuple[str, ...], Limit(0, _MAX_KERNELS)]
    uses: tuple[Uses, ...]
    variants: Annotated[tuple[VariantEntry, ...], Limit(1, _MAX_VARIANTS)]
    files: Mapping[str, FileEntry]
    report: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RingCost:
    """The ring of a persistent kernel, in a report."""

    pages: int
    page_bytes: int
    streamed_bytes: int
    hidden_s: float


@dataclass(frozen=True, slots=True)
class OverlapCost:
    """The nodes of a CUDA graph that start early, in a report."""

    nodes: int
    hidden_s: float


@dataclass(frozen=True, slots=True)
class LoweringCost:
    """The cost of a kind of plans of a GPU, in a report."""

    seconds: float
    launches: int
    measured: bool
    ring: Annotated[RingCost | None, OMIT_DEFAULT] = None
    overlap: Annotated[OverlapCost | None, OMIT_DEFAULT] = None


@dataclass(frozen=True, slots=True)
class LoweringRefusal:
    """Why a GPU's model cannot have a kind of plans, in a report."""

    refused: str
    code: str


Lowerings = Mapping[str, Annotated[LoweringCost | LoweringRefusal, UNTAGGED]]


@dataclass(frozen=True, slots=True)
class BucketReport:
    """The kind of plans of a bucket, in a report."""

    dims: Mapping[str, int]
    plan: str
    lowerings: Lowerings


@dataclass(frozen=True, slots=True)
class PassEntry:
    """A pass, in a report."""

    name: str
    nodes_before: int
    nodes_after: int


@dataclass(frozen=True, slots=True)
class ReportParts:
    """The parts of a report that a loaded model reads, each of which older models may lack."""

    plan: Annotated[str | None, OMIT_DEFAULT] = None
    threads: Annotated[int | None, OMIT_DEFAULT] = None
    lowerings: Annotated[Lowerings | None, OMIT_DEFAULT] = None
    buckets: Annotated[tuple[BucketReport, ...], OMIT_DEFAULT] = ()
    passes: Annotated[tuple[PassEntry, ...], OMIT_DEFAULT] = ()
    seconds: Annotated[Mapping[str, float] | None, OMIT_DEFAULT] = None
    cache: Annotated[Mapping[str, int] | None, OMIT_DEFAULT] = None
    # of each bucket: dimension → input or output → its padded axis
    padding: Annotated[tuple[Mapping[str, Mapping[str, int]], ...], OMIT_DEFAULT] = ()
    not_padded: Annotated[tuple[str, ...], OMIT_DEFAULT] = ()


MakeHeader = Callable[[ModelPlan, str, str, str], str]


def variant_name(name: str, number: int) -> str:
    """Return the name of a model's variant, which begins with the model's."""
    return f"{name}_{number}" if number else name


def save_model(
    model: ModelBundle, directory: str | os.PathLike[str], make_header: MakeHeader, launchers: Iterable[str] = ()
) -> Path:
    """Write the model to `directory`, which need not exist, and return its path.

    Readers see the whole model or none. Files of other names in an existing directory stay unchanged. `make_header`
    returns the C header for a plan, a name, and the names of the files of weights and packed weights. Launchers of a
    GPU's model are those that `check_model_launchers` accepts.
    Raises ArgumentError (unknown-launcher) for launchers that a CPU's model cannot have.
    """
    names = tuple(launchers)
    is_cpu = bool(model.variants[0].binary)
    launcher_files = host_launcher_files(names) if is_cpu else {}

    def write(folder: Path) -> None:
        for name, content in launcher_files.items():
            (folder / name).write_bytes(content)
        _write(model, folder, make_header)
        if names and not is_cpu:
            _write_host_programs(model, folder)

    return write_folder(directory, write)


def load_model(directory: str | os.PathLike[str]) -> ModelBundle:
    """Load the model in `directory`, checking its files against the digests stored there. Runs nothing.

    Raises UnknownKernelError if there is no model, and ArgumentError (damaged-kernel) if its files have changed since
    it was saved.
    """
    return read_folder(directory, "model", _read)


def _write(model: ModelBundle, folder: Path, make_header: MakeHeader) -> None:
    files: dict[str, FileEntry] = {}
    names: dict[tuple[str, str], str] = {}  # of stored files, by kind and digest
    variants = []
    for number, variant in enumerate(model.variants):
        contents: dict[str, memoryview | bytes] = {
            "weights": variant.weights.reshape(-1).view(np.uint8).data,
            "packed": variant.packed.reshape(-1).view(np.uint8).data,
            "binary": variant.binary,
        }
        chosen: dict[str, str] = {}
        for kind in ("weights", "packed", "binary", "header") if variant.binary else ("weights",):
            if kind == "header":
                contents[kind] = make_header(variant.plan, variant.name, chosen["weights"], chosen["packed"]).encode()
            content = contents[kind]
            digest = hashlib.sha256(content).hexdigest()
            name = names.setdefault((kind, digest), _file_name(kind, number))
            if name not in files:
                (folder / name).write_bytes(content)
                files[name] = FileEntry(digest, len(content))
            chosen[kind] = name
        variants.append(VariantEntry(dict(variant.dims), variant.kernels, chosen, plan_to_json(variant.plan)))
    uses = tuple(Uses(kernel.estimate_s, kernel.uses) for v in model.variants for kernel in v.plan.kernels)
    (folder / KERNELS).mkdir()
    for number, bundle in enumerate(model.kernels):
        save(bundle, folder / KERNELS / str(number))
    metadata = ModelMetadata(
        FORMAT,
        model.name,
        model.digest,
        model.target,
        tuple(bundle.digest for bundle in model.kernels),
        uses,
        tuple(variants),
        files,
        model.report,
    )
    content = (json.dumps(to_json(metadata), allow_nan=False) + "\n").encode()
    (folder / METADATA).write_bytes(content)


def _write_host_programs(model: ModelBundle, folder: Path) -> None:
    """Write the C program of each variant."""
    weights: dict[str, int] = {}  # digest → the variant whose file has them
    for number, variant in enumerate(model.variants):
        digest = hashlib.sha256(variant.weights.reshape(-1).view(np.uint8).data).hexdigest()
        files = HostFiles(
            _file_name("weights", weights.setdefault(digest, number)),
            _file_name("plan", number),
            _file_name("header", number),
            [f"{KERNELS}/{position}/{binary_name(Language.CUDA)}" for position in variant.kernels],
        )
        compiled = [model.kernels[position].compiled for position in variant.kernels]
        program = host_program(variant.plan, compiled, variant.name, files, is_graph=variant.plan.lowering == AS_GRAPH)
        for name, content in ((files.header, program.header), (files.plan, program.plan)):
            (folder / name).write_bytes(content)
        (folder / _file_name("code", number)).write_bytes(program.code)


def _file_name(kind: str, number: int) -> str:
    stem, suffix = next((stem, suffix) for each, stem, suffix in _FILE_KINDS if each == kind)
    return f"{stem}{f'.{number}' if number else ''}{suffix}"


def _read(path: Path) -> ModelBundle:
    metadata = read_metadata(path, ModelMetadata, MAX_METADATA_BYTES, FORMAT)
    _check_report(metadata)
    bundles = []
    for number, digest in enumerate(metadata.kernels):
        bundle = load(path / KERNELS / str(number))
        if bundle.digest != digest:
            raise CorruptKernelError(f"kernel {number} is another one")
        bundles.append(bundle)
    uses = iter(metadata.uses)
    contents: dict[str, Array] = {}
    variants = tuple(
        _variant(path, metadata, variant_name(metadata.name, number), each, bundles, uses, contents)
        for number, each in enumerate(metadata.variants)
    )
    return ModelBundle(
        metadata.digest,
        metadata.name,
        metadata.target,
        tuple(bundles),
        variants,
        metadata.report,
    )


def _check_report(metadata: ModelMetadata) -> None:
    names = {each.name for each in fields(ReportParts)}
    parts = from_json(ReportParts, {name: value for name, value in metadata.report.items() if name in names})
    for listed in (parts.buckets, parts.padding):
        if listed and len(listed) != len(metadata.variants):
            raise CorruptKernelError(f"the report has {len(listed)} buckets, expected {len(metadata.variants)}")


def _variant(
    path: Path,
    metadata: ModelMetadata,
    name: str,
    entry: VariantEntry,
    bundles: Sequence[KernelBundle],
    uses: Iterator[Uses],
    contents: dict[str, Array],
) -> VariantBundle:
    kernels = []
    for position in entry.kernels:
        used = next(uses, None)
        if position >= len(bundles) or used is None:
            raise CorruptKernelError(f"kernel {position} has no folder or no uses")
        kernels.append(ModelKernel(bundles[position].compiled.source, used.estimate_s, used.uses))
    plan = plan_from_json(entry.plan, kernels)
    sizes: dict[str, int | None] = {"binary": None, "weights": plan.read_weights_bytes, "packed": plan.packed_bytes}
    if any(kernel.source.language is not Language.C for kernel in kernels) or "binary" not in entry.files:
        sizes = {"weights": plan.weights_bytes}
    parts = {kind: _content(path, metadata, entry, kind, size, contents) for kind, size in sizes.items()}
    nothing = np.empty(0, np.uint8)
    return VariantBundle(
        tuple(entry.dims.items()),
        name,
        plan,
        entry.kernels,
        parts.get("binary", nothing).tobytes(),
        parts["weights"],
        parts.get("packed", nothing),
    )


def _content(
    path: Path,
    metadata: ModelMetadata,
    entry: VariantEntry,
    kind: str,
    size_bytes: int | None,
    contents: dict[str, Array],
) -> Array:
    """Return a file's bytes at an aligned address. They have the digest and the size that they should have."""
    name = entry.files.get(kind, "")
    if name not in [_file_name(kind, number) for number in range(_MAX_VARIANTS)]:  # names in the metadata are untrusted
        raise CorruptKernelError(f"{name!r} is not the name of a file of {kind}")
    if name not in contents:
        if size_bytes is None:
            contents[name] = np.frombuffer(read_file(path, name, MAX_BINARY_BYTES), np.uint8)
        else:
            contents[name] = read_block(path, name, size_bytes)
        check_digest(name, contents[name].data, metadata.files)
    if size_bytes is not None and len(contents[name]) != size_bytes:
        raise CorruptKernelError(f"{name} has {len(contents[name])} bytes, expected {size_bytes}")
    return contents[name]
