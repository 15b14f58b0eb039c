"""C kernels by clang, on a machine without gcc: programs of the corpus are right, with clang's OpenMP runtime."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx_models import mlp
from reference_kernels import add

import roller_svc
from roller_svc.errors import CompileError
from roller_svc.graph.interpret import interpret
from roller_svc.graph.load import load_graph
from roller_svc.graph.weights import Weights
from roller_svc.toolchain.gcc import compile_c

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.needs("clang", "gcc")


def has_float16() -> bool:
    """Whether clang has _Float16 here: on x86-64 from version 15 on."""
    command = ["clang", "-dM", "-E", "-x", "c", os.devnull]
    return "__FLT16_MAX__" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_clang_knows_all_flags() -> None:
    assert compile_c(add(("-fopenmp",)), cc="clang").log == ""


def test_kernels_of_float16_compile_or_say_what_they_need() -> None:
    kernel = roller_svc.compile("y[i] = x[i] * 2.0", {"x": ("float16", [64])}, target="cpu-x86-avx2", select="model")
    source = dataclasses.replace(add(), text=kernel.source, launches=())
    if has_float16():
        assert compile_c(source, cc="clang").log == ""
    for cc, options in (("gcc", ("-U__FLT16_MAX__",)), ("clang", ("-U__FLT16_MAX__",))):
        with pytest.raises(CompileError, match="this kernel needs the type _Float16: compile it with gcc 12, with clang 15"):
            compile_c(dataclasses.replace(source, options=options), cc=cc)


@pytest.mark.slow
def test_corpus_and_a_model_without_gcc_are_right(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("clang", "ld"):
        (programs / name).symlink_to(str(shutil.which(name)))
    document = json.loads((ROOT / "bench" / "data" / "public.json").read_text())
    cases = [case for case in document["cases"][::20] if has_float16() or "float16" not in str(case)]
    corpus = tmp_path / "corpus.json"
    corpus.write_text(json.dumps({"cases": cases}))
    command = [sys.executable, "-m", "roller_svc", "corpus", corpus, "--small", "--jobs", "1", "--json"]
    environment = os.environ | {"PATH": str(programs), "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    rows = json.loads(done.stdout)["cases"]
    assert len(rows) == len(cases) > 0
    assert [(row["id"], row["status"], row["detail"]) for row in rows if row["status"] != "ok"] == []
    weights, source, path = Weights(), mlp(), tmp_path / "model.onnx"
    path.write_bytes(source.SerializeToString())
    program = (
        "import sys, numpy, roller_svc\nmodel = roller_svc.compile_model(sys.argv[1], select='model', top_k=1)\n"
        "print(model(x=numpy.ones((2, 8), numpy.float32))['y'].tolist())"
    )
    environment |= {"PYTHONPATH": str(ROOT), "ROLLER_CACHE": str(tmp_path)}
    printed = subprocess.run([sys.executable, "-c", program, path], env=environment, capture_output=True, text=True, check=True)
    expected = interpret(load_graph(source, weights), weights, {"x": np.ones((2, 8), np.float32)})["y"]
    np.testing.assert_allclose(json.loads(printed.stdout), expected, rtol=1e-5)
