"""Cubin → SASS: text, and counts of instruction families."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from reference_kernels import SM_80, cuda_scale, tensor

from roller_svc import toolchain
from roller_svc.errors import CompileError, KernelTimeoutError, ToolchainMissingError
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch
from roller_svc.ir.kernel import KernelSource, Language, LaunchSpec, Role
from roller_svc.toolchain.binaries import sass
from roller_svc.toolchain.limits import CompileLimits

TENSOR_CORES = """
extern "C" __global__ void __launch_bounds__(32) product(const uint4 *a, float4 *c) {
  __shared__ __align__(16) uint4 tile[64];
  unsigned int to = (unsigned int)__cvta_generic_to_shared(&tile[threadIdx.x]);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(a + threadIdx.x));
  asm volatile("cp.async.commit_group; cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  unsigned int x[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(to) : "memory");
  float d[4] = {0, 0, 0, 0};
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%4,%6}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]));
  c[threadIdx.x] = make_float4(d[0], d[1], d[2], d[3]);
}
"""


def product(arch: Arch = SM_80) -> KernelSource:
    """A kernel in which one warp multiplies 16 x 16 by 16 x 8 halves on tensor cores."""
    buffers = (tensor("A", "a", Role.INPUT, DType.FLOAT16, (256,)), tensor("C", "c", Role.OUTPUT, shape=(128,)))
    return KernelSource("product", Language.CUDA, arch, TENSOR_CORES, buffers, (LaunchSpec("product", ("a", "c")),))


def test_the_disassembler_says_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert toolchain.disassembler_version().startswith("Build cuda_")
    tool = tmp_path / sass.TOOL
    monkeypatch.setattr(sass, "disassembler", lambda: tool)
    tool.write_text("#!/bin/sh\nexit 3\n")
    tool.chmod(0o700)
    with pytest.raises(ToolchainMissingError, match="--version fails"):
        toolchain.disassembler_version()
    tool.write_text("#!/bin/sh\necho NVIDIA; echo Build 99\n")
    assert toolchain.disassembler_version() == "Build 99"


@pytest.mark.parametrize("number", [80, 86, 89, 90, 120])
def test_tensor_core_instructions_are_counted(number: int) -> None:
    arch = Arch("sm_", number)
    (found,) = sass.sass_functions([toolchain.compile_source(product(arch)).binary], arch)
    assert list(found) == ["product"]
    function = found["product"]
    assert function.count("HMMA") == 1
    assert function.count("LDGSTS") == function.count("LDGSTS.128") == 1
    assert function.count("LDSM") == 1
    assert function.count("STG.128") == function.count("STG") == 1
    assert function.count("LDG", "LDL", "STL", "IMMA") == 0
    assert 20 < function.instructions < 100


def test_every_launch_is_a_function_of_its_own_whatever_is_read_with_it() -> None:
    binaries = [toolchain.compile_source(source).binary for source in (product(), cuda_scale(), product())]
    first, found, last = sass.sass_functions(binaries, SM_80)
    assert first == last == sass.sass_functions(binaries[:1], SM_80)[0]
    assert set(found) == {"flip", "scale"}
    assert found["flip"].count("BAR") == found["flip"].count("STS.32") == found["flip"].count("LDS.32") == 1
    assert found["scale"].count("BAR", "STS", "LDS") == 0
    assert found["scale"].count("LDG.32") == found["scale"].count("STG.32") == 1


def test_the_sass_is_readable() -> None:
    text = sass.sass_text(toolchain.compile_source(product()).binary)
    assert "HMMA.16816.F32" in text
    assert ".target\tsm_80" in text


@pytest.mark.parametrize(
    ("opcode", "family"),
    [
        ("LDG.E.128.CONSTANT", "LDG.128"),
        ("LDG.E.U16", "LDG.16"),
        ("STS.U8", "STS.8"),
        ("LDS", "LDS.32"),
        ("LDGSTS.E.BYPASS.LTC128B.64", "LDGSTS.64"),
        ("LDSM.16.M88.4", "LDSM"),
        ("BAR.SYNC.DEFER_BLOCKING", "BAR"),
        ("LDGDEPBAR", None),
        ("MOV", None),
    ],
)
def test_families(opcode: str, family: str | None) -> None:
    assert sass.family_of(opcode) == family


@pytest.mark.parametrize("source", [product(), cuda_scale()])
def test_all_instructions_of_the_text_are_counted_but_padding(source: KernelSource) -> None:
    binary = toolchain.compile_source(source).binary
    opcodes = re.findall(r"/\*[0-9a-f]{4}\*/\s+(?:@(?!!PT)\S+ +)?([A-Z][\w.]*)", sass.sass_text(binary))
    counts = Counter(opcode.partition(".")[0] for opcode in opcodes if opcode != "NOP")
    (found,) = sass.sass_functions([binary], SM_80)
    assert sum(function.instructions for function in found.values()) == counts.total()
    for family in ("FFMA", "HMMA", "LDG", "STG", "LDS", "STS", "LDGSTS", "LDSM", "BAR"):
        assert sum(function.count(family) for function in found.values()) == counts[family]


def printing(folder: Path, document: str) -> Path:
    """Return a fake tool that prints the document."""
    (folder / "printed").write_text(document)
    tool = folder / "nvdisasm"
    tool.write_text(f"#!/bin/sh\ncat {folder}/printed\n")
    tool.chmod(0o755)
    return tool


def test_instructions_that_never_happen_do_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = [
        {"opcode": "LDS", "predicate": "@!PT", "operands": "RZ,[RZ]"},
        {"opcode": "LDS.128", "predicate": "@!P0", "operands": "R0,[R2]"},
        {"opcode": "EXIT"},
        {"opcode": "NOP"},
    ]
    document = json.dumps([{"SM": {}}, [{"function-name": "Unknown", "sass-instructions": code}]])
    monkeypatch.setattr(sass, "disassembler", lambda: printing(tmp_path, document))
    (found,) = sass.sass_functions([toolchain.compile_source(product()).binary], SM_80)
    assert found == {"product": sass.SassFunction("product", 2, (("LDS.128", 1),))}


@pytest.mark.parametrize("printed", ["", "{}", "[{}]", "[{}, [1, 2]]", '[{}, [{"name": "f"}]]'])
def test_malformed_disassembly_is_rejected(printed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sass, "disassembler", lambda: printing(tmp_path, printed))
    with pytest.raises(CompileError) as raised:
        sass.sass_functions([toolchain.compile_source(product()).binary], SM_80)
    assert raised.value.code == "bad-cubin"


def test_bytes_that_are_not_a_cubin_are_rejected() -> None:
    with pytest.raises(CompileError, match="nvdisasm cannot read the cubin") as raised:
        sass.sass_text(b"junk")
    assert raised.value.code == "bad-cubin"
    with pytest.raises(CompileError, match="not a cubin"):
        sass.sass_functions([b"junk"], SM_80)


def test_time_is_limited() -> None:
    with pytest.raises(KernelTimeoutError):
        sass.sass_text(toolchain.compile_source(product()).binary, CompileLimits(timeout_s=1e-9))


def test_without_the_tool_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sass, "wheel_roots", lambda: [tmp_path])
    monkeypatch.setattr(sass, "_SYSTEM", tmp_path / "nvdisasm")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainMissingError, match=r"pip install 'roller-svc\[cuda\]'"):
        sass.sass_text(b"")
