"""Two kernels and two models in one program: C and C++, every order of the libraries, linked and opened at run time."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from onnx import helper, numpy_helper
from onnx_models import model
from waiting import PATIENCE_S

import roller_svc
from roller_svc.model import compile_model
from roller_svc.settings import read_settings, use

RNG = np.random.default_rng(0)
A, B = (RNG.standard_normal((192, 192), np.float32) for _ in range(2))
X = RNG.standard_normal((64, 256), np.float32)
FIRST, SECOND, THIRD = (RNG.standard_normal(shape, np.float32) / 16 for shape in ((256, 128), (256, 512), (512, 96)))
COMPILERS = {"gcc": ("c", "-std=c11"), "g++": ("c++", "-std=c++17"), "clang": ("c", "-std=c11"),
             "clang++": ("c++", "-std=c++17")}  # fmt: skip
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-pedantic")


class Saved(NamedTuple):
    """The folders of two kernels and two models, one of each with a default name, and what they compute."""

    folders: dict[str, Path]
    names: dict[str, str]
    wanted: dict[str, np.ndarray]

    def libraries(self) -> list[Path]:
        return [folder / ("kernel.so" if kind.startswith("kernel") else "model.so") for kind, folder in self]

    def __iter__(self) -> Iterator[tuple[str, Path]]:
        return iter(self.folders.items())

    def program(self) -> str:
        """Return a program that calls all twice, in turn, and writes the results. With SHARE they share a pool."""
        n = self.names
        model_calls = "".join(
            f"""
static void {kind}(const char *folder, const float *x, float *y) {{
  const void *inputs[{n[kind]}_INPUTS] = {{x}};
  void *outputs[{n[kind]}_OUTPUTS] = {{y}};
  struct {n[kind]} model;
  if ({n[kind]}_open(&model, folder)) exit(2);
  for (int i = 0; i < 2; i++)
    if ({n[kind]}_call(&model, inputs, outputs) >= 0) exit(3);
  {n[kind]}_close(&model);
}}"""
            for kind in ("model0", "model1")
        )
        headers = "\n".join(f'#include "{path.parent}/{path.stem}.h"' for path in self.libraries())
        return f"""{headers}
{headers}
static float a[192 * 192], b[192 * 192], x[64 * 256], product[192 * 192], square[192 * 192], y0[64 * 128], y1[64 * 96];
{model_calls}
static void *workspace(long bytes) {{ return bytes ? aligned_alloc(64, (size_t)bytes) : NULL; }}
int main(int argc, char **argv) {{
  if (argc != 3 || fread(a, sizeof a, 1, stdin) + fread(b, sizeof b, 1, stdin) + fread(x, sizeof x, 1, stdin) != 3)
    return 1;
  void *const w0 = workspace({n["kernel0"]}_WORKSPACE_BYTES), *const w1 = workspace({n["kernel1"]}_WORKSPACE_BYTES);
#ifdef SHARE
  if (!{n["kernel1"]}_use_pool({n["model0"]}_own_pool())) return 4;
  if (!{n["model1"]}_use_pool({n["model0"]}_own_pool())) return 4;
#endif
  for (int i = 0; i < 2; i++) {{
    if ({n["kernel0"]}_run(a, b, product, w0)) return 5;
    model0(argv[1], x, y0);
    if ({n["kernel1"]}_run(a, square, w1)) return 5;
    model1(argv[2], x, y1);
  }}
  fwrite(product, sizeof product, 1, stdout);
  fwrite(square, sizeof square, 1, stdout);
  fwrite(y0, sizeof y0, 1, stdout);
  fwrite(y1, sizeof y1, 1, stdout);
  free(w0), free(w1);
  return 0;
}}
"""

    def run(self, command: list[str]) -> None:
        """Run a program that writes the results, and compare them with numpy's."""
        arguments = [str(self.folders[kind]) for kind in ("model0", "model1")]
        operands = b"".join(array.tobytes() for array in (A, B, X))
        done = subprocess.run([*command, *arguments], input=operands, capture_output=True, check=False, timeout=PATIENCE_S)
        assert (done.returncode, done.stderr) == (0, b"")
        results = np.frombuffer(done.stdout, np.float32)
        for kind, array in self.wanted.items():
            np.testing.assert_allclose(results[: array.size], array.reshape(-1), rtol=1e-4, atol=1e-3, err_msg=kind)
            results = results[array.size :]
        assert not results.size


def perceptron(*weights: np.ndarray) -> bytes:
    """Return an ONNX model: products with constants, and ReLU between these."""
    nodes, value = [], "x"
    for i, _ in enumerate(weights):
        last = i == len(weights) - 1
        nodes.append(helper.make_node("MatMul", [value, f"w{i}"], ["y" if last else f"m{i}"], f"product{i}"))
        value = f"r{i}"
        if not last:
            nodes.append(helper.make_node("Relu", [f"m{i}"], [value], f"relu{i}"))
    constants = [numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights)]
    return model(nodes, {"x": X.shape}, {"y": (len(X), weights[-1].shape[1])}, constants).SerializeToString()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    root = tmp_path_factory.mktemp("saved")
    use(read_settings(cache=root / "cache"))
    square = ("float32", (192, 192))
    built = {
        "kernel0": roller_svc.compile("y[i, j] +=! a[i, k] * b[k, j]", {"a": square, "b": square}, select="model"),
        "kernel1": roller_svc.compile("y[i, j] +=! a[i, k] * a[k, j]", {"a": square}, select="model", name="rows"),
        "model0": compile_model(perceptron(FIRST), select="model"),
        "model1": compile_model(perceptron(SECOND, THIRD), select="model", name="tower"),
    }
    folders = {kind: each.save(root / kind) for kind, each in built.items()}
    names = {kind: each.name for kind, each in built.items()}
    wanted = {
        "kernel0": A @ B,
        "kernel1": A @ A,
        "model0": X @ FIRST,
        "model1": np.maximum(X @ SECOND, 0) @ THIRD,
    }
    yield Saved(folders, names, wanted)
    use(read_settings())


def test_all_that_is_exported_has_the_name(saved: Saved) -> None:
    for path, (kind, name) in zip(saved.libraries(), saved.names.items(), strict=True):
        listed = subprocess.run(["nm", "-D", "--defined-only", "-P", path], capture_output=True, text=True, check=True)
        symbols = {line.split()[0] for line in listed.stdout.splitlines()}
        assert f"{name}_run" in symbols
        assert {symbol for symbol in symbols if not symbol.startswith(f"{name}_")} == set(), kind
        document = json.loads((path.parent / "metadata.json").read_text())
        assert document["name"] == name
        default = f"roller_{document['digest'].removeprefix('sha256:')[:12]}"
        assert name == {"kernel1": "rows", "model1": "tower"}.get(kind, default)
        assert all(launch["entry"].startswith(f"{name}_") for launch in document.get("launches", ()))


def test_all_that_a_header_declares_has_the_name(saved: Saved) -> None:
    """That is: functions, macros, enumerators and structures."""
    for path, name in zip(saved.libraries(), saved.names.values(), strict=True):
        header = path.parent / f"{path.stem}.h"
        text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)
        declared = [
            *re.findall(r"^(?:\w+ )+\**(\w+)\(", text, re.MULTILINE),  # bodies are indented
            *re.findall(r"(?:define|struct|ifndef) +(\w+)", text),
            *re.findall(r"(\w+) = \d+[, ]", "".join(re.findall(r"enum \{(.*?)\};", text))),
        ]
        assert {f"{name}_run", f"{name}_WORKSPACE_BYTES"} <= set(declared)
        assert {each for each in declared if each != name and not each.startswith(f"{name}_")} == set()
        if path.stem == "model":
            assert {name, f"{name}_OUTPUTS", f"{name}_open"} <= set(declared)


@pytest.mark.parametrize("compiler", [pytest.param(each, marks=pytest.mark.needs(each)) for each in COMPILERS])
def test_each_header_compiles_alone_and_beside_the_others(saved: Saved, compiler: str) -> None:
    language, standard = COMPILERS[compiler]
    headers = [f'#include "{path.parent}/{path.stem}.h"\n' for path in saved.libraries()]
    for text in (*headers, *map("".join, itertools.permutations(headers, 2))):
        command = [compiler, "-x", language, standard, *WARNINGS, "-fsyntax-only", "-"]
        subprocess.run(command, input=text, text=True, check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize("pools", ["own", pytest.param("shared", marks=pytest.mark.two_cores)])
@pytest.mark.parametrize("compiler", ["gcc", "g++"])
@pytest.mark.parametrize("order", [1, -1], ids=["forward", "backward"])
def test_a_program_of_all_computes_what_each_computes(saved: Saved, tmp_path: Path, compiler: str, order: int, pools: str) -> None:
    saved.run([build(saved, tmp_path, compiler, saved.libraries()[::order], shared=pools == "shared")])


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [pytest.param(each, marks=pytest.mark.needs(each)) for each in COMPILERS])
def test_a_program_of_all_computes_the_same_in_every_order(saved: Saved, tmp_path: Path, compiler: str) -> None:
    for libraries in itertools.permutations(saved.libraries()):
        saved.run([build(saved, tmp_path, compiler, list(libraries))])


def build(saved: Saved, folder: Path, compiler: str, libraries: list[Path], *, shared: bool = False) -> str:
    """Compile the program, and link it with the libraries in that order."""
    language, standard = COMPILERS[compiler]
    source, program = folder / "main.c", folder / "program"
    source.write_text(saved.program())
    flags = [language, standard, *WARNINGS, *(["-DSHARE"] if shared else [])]
    command = [compiler, "-x", *flags, source, "-x", "none", *libraries, "-o", program]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    return str(program)


@pytest.mark.parametrize("order", [1, -1], ids=["forward", "backward"])
def test_sources_of_kernels_compile_into_one_program(saved: Saved, tmp_path: Path, order: int) -> None:
    objects = []
    for kind in ("kernel0", "kernel1")[::order]:
        document = json.loads((saved.folders[kind] / "metadata.json").read_text())
        objects.append(tmp_path / f"{kind}.o")
        flags = ["-std=gnu11", f"-march={document['arch']}", *document["options"]]
        source = saved.folders[kind] / "kernel.c"
        subprocess.run(["gcc", *flags, "-c", source, "-o", objects[-1]], check=True, timeout=PATIENCE_S)
    models = saved.libraries()[2:][::order]
    program = build(saved, tmp_path, "gcc", [*objects, *models, "-lm", "-fopenmp"])
    saved.run([program])


OPENER = """
import ctypes, sys
mode, folders, names = int(sys.argv[1]), sys.argv[2].split(":"), sys.argv[3].split(":")
libraries = {}
for i in map(int, sys.argv[4]):
    libraries[i] = ctypes.CDLL(folders[i] + ("/model.so" if i > 1 else "/kernel.so"), mode=mode)
class Model(ctypes.Structure):
    pass
def array(count): return (ctypes.c_float * count)()
def read(count): return (ctypes.c_float * count).from_buffer_copy(sys.stdin.buffer.read(4 * count))
a, b, x = read(192 * 192), read(192 * 192), read(64 * 256)
outputs = [array(192 * 192), array(192 * 192), array(64 * 128), array(64 * 96)]
def content(path):
    data = open(path, "rb").read()
    return aligned(len(data), data)
keep = []
def aligned(size, data=b""):
    memory = ctypes.create_string_buffer(size + 128)
    keep.append(memory)
    at = (ctypes.addressof(memory) + 63) // 64 * 64
    ctypes.memmove(at, data, len(data))
    return ctypes.c_void_p(at)
for _ in range(2):
    for i in range(4):
        run, y, workspace = libraries[i][names[i] + "_run"], outputs[i], aligned(1 << 22)
        if i < 2:
            operands = [a, b] if i == 0 else [a]
            assert run(*operands, y, workspace) == 0
        else:
            run.restype = ctypes.c_long
            pointers = [(ctypes.c_void_p * 1)(ctypes.addressof(each)) for each in (x, y)]
            files = [content(f"{folders[i]}/{name}.bin") for name in ("weights", "packed")]
            assert run(*pointers, workspace, *files, (ctypes.c_longlong * 4)()) == -1
for y in outputs:
    sys.stdout.buffer.write(bytes(y))
"""


@pytest.mark.parametrize("order", ["0123", "3210"])
@pytest.mark.parametrize("mode", ["RTLD_LOCAL", "RTLD_GLOBAL"])
def test_libraries_opened_at_run_time_do_not_mix(saved: Saved, mode: str, order: str) -> None:
    flag = {"RTLD_LOCAL": 0, "RTLD_GLOBAL": 0x100}[mode]
    folders, names = ":".join(map(str, saved.folders.values())), ":".join(saved.names.values())
    saved.run([sys.executable, "-I", "-c", OPENER, str(flag), folders, names, order])


def test_saved_kernels_and_models_load_by_their_names(saved: Saved) -> None:
    loaded = roller_svc.load(saved.folders["kernel1"])
    assert loaded.name == "rows"
    np.testing.assert_allclose(loaded(a=A)["y"], saved.wanted["kernel1"], rtol=1e-4, atol=1e-3)
    again = roller_svc.load_model(saved.folders["model1"])
    assert again.name == "tower"
    np.testing.assert_allclose(again(x=X)["y"], saved.wanted["model1"], rtol=1e-4, atol=1e-3)
    copied = again.save(saved.folders["model1"].parent / "copy")
    for name in ("model.so", "model.h", "metadata.json"):
        assert (copied / name).read_bytes() == (saved.folders["model1"] / name).read_bytes()
