"""Saved kernels: written atomically, loaded equal, rejected when modified, usable without this project."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference_kernels import add, cuda_scale, gather, row_sums_doubled
from waiting import PATIENCE_S

import roller_svc
from roller_svc.errors import ArgumentError, InvariantError, UnknownKernelError
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import CompiledKernel, KernelSource, Language, Resources
from roller_svc.ir.tensor_map import MapMode, Swizzle, TensorMap
from roller_svc.runtime.cpu import CpuModule
from roller_svc.runtime.saved.serialization import KernelBundle, c_header, load, save
from roller_svc.toolchain.gcc import compile_c

# Everything it knows comes from metadata.json. It is run with `python -I`, outside this project.
LAUNCHER = """
import ctypes, json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
meta = json.loads((folder / "metadata.json").read_text())
library = ctypes.CDLL(str(folder / "kernel.so"))
memory = {}
def allocated(size, alignment):
    raw = ctypes.create_string_buffer(size + alignment)
    start = -ctypes.addressof(raw) % alignment
    return raw, ctypes.addressof(raw) + start
for buffer in meta["buffers"]:
    memory[buffer["symbol"]] = allocated(buffer["bytes"], buffer["alignment"])
    if buffer["role"] == "input":
        count = buffer["bytes"] // 4
        assert buffer["dtype"] == "float32"
        ctypes.memmove(memory[buffer["symbol"]][1], (ctypes.c_float * count)(*range(count)), buffer["bytes"])
for launch in meta["launches"]:
    for symbol in launch["zeroed"]:
        size = next(b["bytes"] for b in meta["buffers"] if b["symbol"] == symbol)
        ctypes.memset(memory[symbol][1], 0, size)
    assert all(p["kind"] == "buffer" for p in launch["parameters"])
    library[launch["entry"]](*(ctypes.c_void_p(memory[p["symbol"]][1]) for p in launch["parameters"]))
for buffer in meta["buffers"]:
    if buffer["role"] == "output":
        values = (ctypes.c_float * (buffer["bytes"] // 4)).from_address(memory[buffer["symbol"]][1])
        print(json.dumps({buffer["name"]: list(values)}))
assert "roller_svc" not in sys.modules
"""


def saved_kernel(source: KernelSource) -> KernelBundle:
    return KernelBundle(compile_c(source), "C[m] +=! A[m, k]", "local", "sha256:12", {"seconds": 1e-6}, {"report": [1]})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(saved_kernel(gather()), tmp_path / "kernel")


@pytest.mark.parametrize("source", [add(), row_sums_doubled(), gather()], ids=lambda s: s.name)
def test_a_saved_kernel_loads_equal(source: KernelSource, tmp_path: Path) -> None:
    kernel = saved_kernel(source)
    assert load(save(kernel, tmp_path / "new" / "kernel")) == kernel


def test_a_cuda_kernel_too(tmp_path: Path) -> None:
    compiled = CompiledKernel(cuda_scale(shared_bytes=64), b"cubin", "log", (Resources(12, 2112, 0), Resources(8, 0, 4)))
    kernel = KernelBundle(compiled, "C[i] = A[i]", "nvidia-a100-sxm-80gb", "sha256:ab")
    path = save(kernel, tmp_path / "kernel")
    assert sorted(p.name for p in path.iterdir()) == ["kernel.cu", "kernel.cubin", "metadata.json", "report.json"]
    assert load(path) == kernel
    flip = json.loads((path / "metadata.json").read_text())["launches"][0]
    assert flip["entry"] == "flip"
    assert flip["block"] == [256, 1, 1]
    assert flip["cluster"] == [1, 1, 1]
    assert flip["dynamic_shared_bytes"] == 64
    assert flip["parameters"][0] | {"kind": "buffer"} == {
        "kind": "buffer",
        "name": "A",
        "symbol": "a",
        "role": "input",
        "dtype": "float32",
        "shape": [256],
        "strides": [1],
        "alignment": 64,
        "bytes": 1024,
        "donated": False,
    }


VIEW = TensorMap(
    "a_map", "a", DType.FLOAT32, MapMode.TILED, (16, 12), (64,), (8, 4), (1, 2), swizzle=Swizzle.B32, offset_bytes=256, tf32=True
)
PIXELS = TensorMap("c_map", "c", DType.FLOAT32, MapMode.IM2COL, (4, 8, 8), (16, 128), (4, 32), (1, 2, 1), (-1,), (-2,))


def with_maps() -> KernelBundle:
    source = cuda_scale(shared_bytes=64)
    first = dataclasses.replace(source.launches[0], tensor_maps=(VIEW, PIXELS), grid=(4, 1, 1), cluster=2)
    source = dataclasses.replace(source, launches=(first, *source.launches[1:]))
    compiled = CompiledKernel(source, b"cubin", "log", (Resources(12, 2112, 0), Resources(8, 0, 4)))
    return KernelBundle(compiled, "C[i] = A[i]", "nvidia-h100-sxm", "sha256:ab")


def test_tensor_maps_and_clusters_come_back(tmp_path: Path) -> None:
    path = save(with_maps(), tmp_path / "kernel")
    assert load(path) == with_maps()
    launch = json.loads((path / "metadata.json").read_text())["launches"][0]
    assert launch["cluster"] == [2, 1, 1]
    assert [p["kind"] for p in launch["parameters"]] == ["buffer", "buffer", "tensor_map", "tensor_map"]
    assert launch["parameters"][2] == {
        "kind": "tensor_map",
        "symbol": "a_map",
        "bytes": 128,
        "alignment": 128,
        "mode": "tiled",
        "buffer": "a",
        "offset_bytes": 256,
        "dtype": "float32",
        "data_type": "TFLOAT32",
        "extents": [16, 12],
        "strides_bytes": [64],
        "box": [8, 4],
        "element_strides": [1, 2],
        "lower_corner": [],
        "upper_corner": [],
        "swizzle_bytes": 32,
        "l2_promotion_bytes": 256,
    }
    assert launch["parameters"][3]["data_type"] == "UINT32"
    assert launch["parameters"][3]["lower_corner"] == [-1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "pointer"),
        ("symbol", "a b"),
        ("buffer", "zz"),
        ("mode", "gather"),
        ("dtype", "float16"),
        ("data_type", "FLOAT64"),
        ("extents", [16, 13]),
        ("extents", [16]),
        ("extents", [True, 12]),
        ("extents", []),
        ("strides_bytes", [72]),
        ("strides_bytes", [-64]),
        ("offset_bytes", 272),
        ("offset_bytes", 8),
        ("box", [8, 400]),
        ("box", [1] * 4000),
        ("element_strides", [1, 0]),
        ("swizzle_bytes", 48),
        ("lower_corner", [0]),
    ],
)
def test_hostile_tensor_maps_are_rejected(tmp_path: Path, field: str, value: object) -> None:
    path = save(with_maps(), tmp_path / "kernel")
    document = json.loads((path / "metadata.json").read_text())
    document["launches"][0]["parameters"][2][field] = value
    (path / "metadata.json").write_text(json.dumps(document))
    with pytest.raises(ArgumentError) as raised:
        load(path)
    assert raised.value.code == "damaged-kernel"
    assert "source_key" not in str(raised.value)


@pytest.mark.parametrize("language", [Language.C, Language.HIP])
@pytest.mark.parametrize("without", ["tensor_maps", "cluster"])
def test_tensor_maps_and_clusters_are_for_cuda_only(tmp_path: Path, language: Language, without: str) -> None:
    kernel = with_maps()
    source = kernel.compiled.source
    changes: dict[str, Any] = {"tensor_maps": {"tensor_maps": ()}, "cluster": {"cluster": 1}}[without]
    launch = dataclasses.replace(source.launches[0], **changes)
    source = dataclasses.replace(source, language=language, launches=(launch, *source.launches[1:]))
    compiled = dataclasses.replace(kernel.compiled, source=source)
    path = save(dataclasses.replace(kernel, compiled=compiled), tmp_path / "kernel")
    with pytest.raises(ArgumentError, match="which only CUDA has") as raised:
        load(path)
    assert raised.value.code == "damaged-kernel"


def test_a_loaded_kernel_runs(folder: Path) -> None:
    a = np.arange(5, dtype=np.float32)
    result = CpuModule(load(folder).compiled).run({"A": a, "P": np.array([4, 4, 1], np.int32)})
    assert result["C"].tolist() == [4, 4, 1]


def test_ctypes_and_the_metadata_are_enough(tmp_path: Path) -> None:
    path = save(saved_kernel(row_sums_doubled()), tmp_path / "kernel")
    done = subprocess.run(
        [sys.executable, "-I", "-c", LAUNCHER, str(path)], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"C": [30, 102, 174, 246]}


def test_the_header_is_c(tmp_path: Path) -> None:
    path = save(saved_kernel(gather()), tmp_path / "kernel")
    header = (path / "kernel.h").read_text()
    assert "int gather_run(const float *a, const int32_t *p, float *c, void *workspace);" in header
    assert "void gather(const float *a, const int32_t *p, float *c, int64_t *status);" in header
    assert c_header(load(path).compiled) == header
    for language in ("c", "c++"):
        subprocess.run(
            ["gcc", "-Wall", "-Werror", "-x", language, "-fsyntax-only", "-"],
            check=True,
            text=True,
            input=f'#include "{path}/kernel.h"\n',
            timeout=PATIENCE_S,
        )


def test_no_macro_has_the_name_of_a_headers_parameter(tmp_path: Path) -> None:
    """Neither one of standard C nor one of this header or of another kernel's."""
    names = ("a", "I", "arg_I_", "M_PI", "PRId", "size_t", "errno", "f_WORKSPACE_BYTES", "g_KERNEL_H")
    types = dict.fromkeys(names, ("float32", (8,)))
    kernel = roller_svc.compile(f"y[n] = {' + '.join(f'{name}[n]' for name in types)}", types, select="model", name="f")
    path = kernel.save(tmp_path / "kernel")
    assert (
        "(const float *a, const float *arg_I__, const float *arg_I_, const float *arg_M_PI__, " in (path / "kernel.h").read_text()
    )
    for language in ("c", "c++"):
        includes = "".join(f"#include <{each}.h>\n" for each in ("complex", "math", "errno"))
        text = f'{includes}#define g_KERNEL_H const\n#include "{path}/kernel.h"\n'
        subprocess.run(
            ["gcc", "-Wall", "-Werror", "-x", language, "-fsyntax-only", "-"],
            check=True,
            text=True,
            input=f"{text}const long size = f_WORKSPACE_BYTES;\n",
            timeout=PATIENCE_S,
        )


def test_saving_over_a_kernel_replaces_it_and_leaves_other_files(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    kernel = saved_kernel(add())
    assert save(kernel, folder) == folder
    assert load(folder) == kernel
    assert (folder / "notes.txt").read_text() == "mine"
    assert [p.name for p in folder.parent.iterdir()] == ["kernel"]  # nothing temporary is left


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    kernel = KernelBundle(compile_c(add()), "", "local", "", {"seconds": float("nan")})
    with pytest.raises(ValueError, match="JSON"):
        save(kernel, tmp_path / "kernel")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="is not a directory"):
        save(saved_kernel(add()), tmp_path / "file")


def test_a_folder_without_a_kernel(tmp_path: Path) -> None:
    with pytest.raises(UnknownKernelError, match=r"metadata\.json is missing"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["kernel.c", "kernel.so"])
def test_a_changed_file_is_rejected(folder: Path, name: str) -> None:
    (folder / name).write_bytes((folder / name).read_bytes() + b"\n")
    with pytest.raises(ArgumentError, match=f"{name} is not the file that was saved") as raised:
        load(folder)
    assert raised.value.code == "damaged-kernel"


def test_a_symbolic_link_is_rejected(folder: Path) -> None:
    (folder / "kernel.so").rename(folder / "elsewhere.so")
    (folder / "kernel.so").symlink_to(folder / "elsewhere.so")
    with pytest.raises(ArgumentError, match=r"kernel\.so cannot be read"):
        load(folder)


def _set(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Set the last element at a path."""

    def change(document: Any) -> None:
        *way, last, value = path
        for step in way:
            document = document[step]
        document[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("format", "other/1"),
        _set("language", "../../etc"),
        _set("language", "hip"),
        _set("arch", "sm_80; rm"),
        _set("name", ""),
        _set("files", {}),
        _set("files", "kernel.c", {"sha256": "0"}),
        _set("files", "kernel.c", []),
        _set("source_key", "0"),
        _set("buffers", "many"),
        _set("buffers", 0, "shape", [2**40, 2**40]),
        _set("buffers", 0, "shape", [-1]),
        _set("buffers", 0, "shape", [True]),
        _set("buffers", 0, "shape", [1] * 20),
        _set("buffers", 0, "shape", [6]),
        _set("buffers", 0, "dtype", "object"),
        _set("buffers", 0, "role", "root"),
        _set("buffers", 0, "symbol", "a b"),
        _set("buffers", 1, "symbol", "a"),
        _set("buffers", 3, "shape", [1]),
        _set("launches", []),
        _set("launches", 0, "entry", "system@plt"),
        _set("launches", 0, "entry", "x" * 300),
        _set("launches", 0, "parameters", [{"symbol": "zz"}]),
        _set("launches", 0, "parameters", [7]),
        _set("launches", 0, "cluster", [2, 1, 1]),
        _set("launches", 0, "cluster", [1, 1]),
        _set("launches", 0, "zeroed", ["zz"]),
        _set("launches", 0, "grid", [0, 1, 1]),
        _set("launches", 0, "grid", [1, 1]),
        _set("launches", 0, "block", [1024, 1024, 1]),
        _set("launches", 0, "dynamic_shared_bytes", 1 << 40),
        _set("launches", 0, "dynamic_shared_bytes", 1.5),
        _set("launches", 0, "resources", {}),
        _set("checks", 0, "dimension", -1),
        _set("options", ["x" * 100_000]),
        _set("options", [1]),
        *(
            _set("options", [option])
            for option in (
                "-I/etc",
                "@/etc/passwd",
                "-fplugin=./x.so",
                "-wrapper",
                "-B.",
                "-include",
                "kernel.c",
                "-Wl,-rpath,.",
                "-O9",
                "",
                "--pre-include=/etc/passwd",
                "-march=native",
                "-O2\n",
                "-o",
            )
        ),
        _set("expression", ["y"]),
        _set("target", "a\nb"),
        _set("target", 7),
        _set("digest", ""),
        _set("estimate", []),
        _set("estimate", {"seconds": float("inf")}),
        _set("estimate", {"seconds": float("nan")}),
        _set("compile_seconds", "soon"),
        _set("compile_seconds", float("nan")),
        _set("compile_seconds", -1),
        _set("compile_seconds", 10**400),
    ],
)
def test_hostile_metadata_is_rejected(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "metadata.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ArgumentError) as raised:
        load(folder)
    assert raised.value.code == "damaged-kernel"


def _in_old_format(folder: Path) -> Path:
    """Put the report into the metadata, as the format before had it."""
    metadata, report = (json.loads((folder / f"{name}.json").read_text()) for name in ("metadata", "report"))
    (folder / "report.json").unlink()
    del metadata["files"]["report.json"]
    document = metadata | {"format": "roller-kernel/5", "log": report["log"], "extra": report["extra"]}
    (folder / "metadata.json").write_text(json.dumps(document))
    return folder


def test_the_format_before_is_read(folder: Path) -> None:
    kernel = load(folder)
    assert kernel.extra == {"report": [1]}
    assert load(_in_old_format(folder)) == kernel


def test_metadata_has_what_launching_needs_alone(folder: Path) -> None:
    assert not {"log", "extra"} & set(json.loads((folder / "metadata.json").read_text()))
    kernel = load(folder)
    (folder / "report.json").unlink()
    lean = load(folder)
    assert (lean.extra, lean.compiled.log) == ({}, "")
    assert (lean.compiled.source, lean.estimate) == (kernel.compiled.source, kernel.estimate)


@pytest.mark.parametrize("change", [_set("extra", [1]), _set("extra", None), _set("log", None), _set("log", 1)])
def test_a_hostile_report_is_rejected(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    report = folder / "report.json"
    document = json.loads(report.read_text())
    change(document)
    report.write_text(json.dumps(document))
    with pytest.raises(ArgumentError, match=r"report\.json is not the file that was saved"):
        load(folder)
    path = folder / "metadata.json"
    metadata = json.loads(path.read_text())
    metadata["files"]["report.json"]["sha256"] = hashlib.sha256(report.read_bytes()).hexdigest()
    path.write_text(json.dumps(metadata))
    with pytest.raises(ArgumentError) as raised:
        load(folder)
    assert raised.value.code == "damaged-kernel"
    change(metadata)
    path.write_text(json.dumps(metadata | {"format": "roller-kernel/5"}))
    with pytest.raises(ArgumentError):
        load(folder)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from _places(item, (*path, key))


@pytest.mark.parametrize("value", [None, True, -1, 1 << 80, 1.5, "", "\0", [], {}], ids=repr)
def test_any_damage_is_refused_or_harmless(folder: Path, value: Any) -> None:
    path = folder / "metadata.json"
    whole = json.loads(path.read_text())
    refused = 0
    places = list(_places(whole))
    for place in places:
        document = copy.deepcopy(whole)
        _set(*place, value)(document)
        path.write_text(json.dumps(document))
        try:
            load(folder)
        except ArgumentError as error:
            refused += error.code == "damaged-kernel"
    assert refused > len(places) // 2


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"format": "roller-kernel/1"}', "[" * 100_000, "\udcff"])
def test_other_text_is_rejected(folder: Path, text: str) -> None:
    (folder / "metadata.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ArgumentError):
        load(folder)


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity", "9" * 5000])
def test_nonfinite_numbers_are_rejected(folder: Path, number: str) -> None:
    path = folder / "metadata.json"
    path.write_text(path.read_text().replace('"seconds": 1e-06', f'"seconds": {number}'))
    with pytest.raises(ArgumentError) as raised:
        load(folder)
    assert raised.value.code == "damaged-kernel"


@pytest.mark.parametrize("name", ["metadata.json", "report.json", "kernel.c", "kernel.so"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "link", "large"])
def test_only_plain_files_of_some_size_are_read(folder: Path, name: str, kind: str) -> None:
    file = folder / name
    kept = file.rename(folder / "elsewhere")
    match kind:
        case "folder":
            file.mkdir()
        case "pipe":
            os.mkfifo(file)  # whoever opens it to read waits for a writer
        case "link":
            file.symlink_to(kept)
        case "large":
            with file.open("wb") as sparse:
                sparse.truncate(1 << 40)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises((ArgumentError, UnknownKernelError)) as raised:
        load(folder)
    assert raised.value.code in ("damaged-kernel", "unknown-kernel")
    assert len(list(Path("/proc/self/fd").iterdir())) == opened


def test_too_much_workspace_is_rejected(folder: Path) -> None:
    path = folder / "metadata.json"
    document = json.loads(path.read_text())
    room = document["buffers"][0] | {"role": "workspace", "dtype": "float64", "shape": [1 << 48], "name": "w"}
    document["buffers"] += [room | {"symbol": f"w{number}"} for number in range(2)]
    path.write_text(json.dumps(document))
    with pytest.raises(ArgumentError, match="bytes of workspace are more than"):
        load(folder)


def test_loading_runs_nothing(folder: Path, tmp_path: Path) -> None:
    """The binary's constructor runs at the first call, not at loading."""
    mark = tmp_path / "mark"
    code = f'#include <stdio.h>\n__attribute__((constructor)) void f(void) {{ fclose(fopen("{mark}", "w")); }}\n'
    binary = folder / "kernel.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(binary)], input=code, text=True, check=True)
    path = folder / "metadata.json"
    document = json.loads(path.read_text())
    document["files"]["kernel.so"]["sha256"] = hashlib.sha256(binary.read_bytes()).hexdigest()
    path.write_text(json.dumps(document))
    kernel = roller_svc.load(folder)
    assert kernel.binary == binary.read_bytes()
    assert not mark.exists()


def test_a_kernel_that_load_would_reject_is_not_saved(tmp_path: Path) -> None:
    kernel = saved_kernel(gather())
    with pytest.raises(InvariantError, match="load takes"):
        save(dataclasses.replace(kernel, extra={"notes": "x" * (8 << 20)}), tmp_path / "kernel")
    assert not (tmp_path / "kernel").exists()


def test_digests_are_of_the_files(folder: Path) -> None:
    files = json.loads((folder / "metadata.json").read_text())["files"]
    assert set(files) == {"kernel.c", "kernel.so", "report.json"}
    for name, entry in files.items():
        assert entry["sha256"] == hashlib.sha256((folder / name).read_bytes()).hexdigest()
