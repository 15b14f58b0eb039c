"""Names from clients that begin the symbols of generated code."""

from __future__ import annotations

import re
import subprocess

import pytest

from roller_svc.compiler.request import validate_name
from roller_svc.errors import ArgumentError
from roller_svc.ir.symbol_names import DEFAULT_PREFIX, DIGITS, default_name, named_digits, suggest_symbol, symbol_fault

GOOD = ["rows", "BERT", "gemm_f32", "a", "x" * 64, "exp1024", "MLP_2", "my_model", "rollers", "index", "Kernel0",
        "ELMO", "SIGMOID", "PRIOR", "signal", "LM_SMALL", "CUSTOM", "cuboid"]  # fmt: skip
BAD = ["", "1st", "_rows", "rows_", "a__b", "a b", "a-b", "a.b", "\u00e9t\u00e9", "\uff41", "double", "concept",
       "co_await", "main", "std", "NULL", "FILE", "stdout", "size_t", "INT8_MAX", "EXIT_SUCCESS", "errno", "I",
       "LONG_MAX", "EINVAL", "SIGINT", "tm", "sem", "f_WORKSPACE_BYTES", "f_MODEL_H",
       "CUdevice", "CUDAAPI", "CU_STREAM_PER_THREAD", "CUDA_VERSION", "roller",
       "roller_x", "Roller_1", "x" * 65, "a\n", "a;b", 'a"', "*/", "rows(", "a\\u0041"]  # fmt: skip

OWN_HEADERS = ("stdint", "stdio", "stdlib", "string")  # those that model.h includes
C_HEADERS = (*OWN_HEADERS, "assert", "complex", "ctype", "errno", "fenv", "float", "inttypes", "iso646", "limits",
             "locale", "math", "setjmp", "signal", "stdalign", "stdarg", "stdatomic", "stdbool", "stddef",
             "stdnoreturn", "tgmath", "threads", "time", "uchar", "wchar", "wctype")  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_a_name_is_kept(name: str) -> None:
    assert symbol_fault(name) is None
    assert validate_name(name) == name


@pytest.mark.parametrize("name", BAD)
def test_a_name_is_refused_with_one_that_is_not(name: str) -> None:
    with pytest.raises(ArgumentError, match="name must be a C identifier") as refusal:
        validate_name(name)
    assert refusal.value.code == "invalid-option"
    assert refusal.value.hint is not None
    assert f"{suggest_symbol(name)!r}" in refusal.value.hint
    assert symbol_fault(suggest_symbol(name)) is None


@pytest.mark.parametrize("value", [1, b"rows", ["rows"], True])
def test_a_name_is_text(value: object) -> None:
    with pytest.raises(ArgumentError, match="name must be text"):
        validate_name(value)


def test_a_default_name_is_made_of_digits() -> None:
    name = default_name("0123456789abcdef")
    assert name == f"{DEFAULT_PREFIX}0123456789ab"
    assert len(named_digits(name)) == DIGITS
    assert named_digits("rows") == ""
    assert symbol_fault(name) is not None  # of no client


@pytest.mark.parametrize(
    ("compiler", "standard", "names"),
    [
        pytest.param("gcc", "c11", C_HEADERS, marks=pytest.mark.needs("gcc")),
        pytest.param("gcc", "gnu11", OWN_HEADERS, marks=pytest.mark.needs("gcc")),
        pytest.param("g++", "c++11", OWN_HEADERS, marks=pytest.mark.needs("g++")),
    ],
    ids=["c", "gnu-c", "c++"],
)
def test_no_macro_or_type_of_the_headers_is_a_name(compiler: str, standard: str, names: tuple[str, ...]) -> None:
    """A structure of that name would not compile behind them."""
    headers = "".join(f"#include <{name}.h>\n" for name in names)
    command = [compiler, "-x", "c++" if compiler == "g++" else "c", f"-std={standard}", "-E"]
    macros = subprocess.run([*command, "-dM", "-"], input=headers, capture_output=True, text=True, check=True).stdout
    plain = re.findall(r"#define ([A-Za-z]\w*) ", macros)  # those with parameters are no structure's name
    text = subprocess.run([*command, "-P", "-"], input=headers, capture_output=True, text=True, check=True).stdout
    types = re.findall(r"typedef [^;{}()]*?(\w+);", text) + re.findall(r"\b(?:struct|union|enum) (\w+)\s*\{", text)
    assert {"NULL", "stderr"} <= set(plain)
    if names == C_HEADERS:
        assert {"errno", "LONG_MAX", "FLT_MAX", "SIGINT"} <= set(plain)
        assert {"tm", "lconv"} <= set(types)
    assert {"FILE", "size_t"} <= set(types)
    assert [name for name in (*plain, *types) if symbol_fault(name) is None] == []
