"""Text from outside in generated source: whatever it is, it ends no comment, no literal, and is no other token."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import every, examples
from waiting import PATIENCE_S

from roller_svc import hardware
from roller_svc.codegen.dialect import CUDA, HIP, C, Dialect, literal
from roller_svc.codegen.names import Names
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.plans import best_plans, rank_best_partition
from roller_svc.errors import InvariantError, SpecError
from roller_svc.frontend.lang import parse
from roller_svc.hardware.mapping import from_mapping, to_mapping
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import HardwareSpec, TargetKind, arch_named
from roller_svc.ir.kernel import KernelSource, Language
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.quoting import quote_comment, quote_string, require_identifier
from roller_svc.runtime.emulator.text import HOST_INTRINSICS, program_source
from roller_svc.runtime.saved.serialization import c_header
from roller_svc.toolchain import availability
from roller_svc.toolchain.gcc import compile_c
from roller_svc.toolchain.nvrtc import compile_cuda, ptx

EXAMPLES = settings(max_examples=examples(300))
MANY = settings(max_examples=30_000)

# The audit's, as a hardware spec's `name` said them.
PAYLOADS = (
    '*\\ __attribute__((constructor))void f(){system("(id;tty)>pwn.txt");}\\*',
    '*\\ asm(R"(.section .rodata;.incbin "/etc/hostname")");asm(".text");\\*',
    '*\\ asm(R"(.include "/etc/passwd")");\\*',
    '*\\ extern "C" __global__ void injected(int*p){*p=42;} \\*',
)
MARKS = ("pwn.txt", "incbin", "/etc/passwd", "injected", "zzmark")

# -- a tokenizer of its own: C and C++, as compilers with trigraphs and without read them ---------------------------

_TRIGRAPHS = {"=": "#", "/": "\\", "'": "^", "(": "[", ")": "]", "!": "|", "<": "{", ">": "}", "-": "~"}
_TOKEN = re.compile(r"[A-Za-z_$\x80-\U0010ffff][\w$]*|\.?\d(?:[eEpP][+-]|[\w.])*|\S", re.ASCII)


def readings(text: str) -> tuple[str, ...]:
    """The text with spliced lines joined: as it is, and with its trigraphs replaced."""
    replaced = re.sub(r"\?\?([=/'()!<>-])", lambda found: _TRIGRAPHS[found[1]], text)
    return tuple(re.sub(r"\\[ \t\v\f]*(?:\r\n|\n|\r)", "", each) for each in (text, replaced))


def pieces(text: str) -> Iterator[tuple[str, str]]:
    """(kind, text) of comments, literals, newlines and other tokens, character by character."""
    at = 0
    while at < len(text):
        if text.startswith("/*", at):
            end = text.find("*/", at + 2)
            assert end >= 0, "a comment does not end"
            yield "comment", text[at : end + 2]
            at = end + 2
        elif text.startswith("//", at):
            end = min((e for e in (text.find(c, at) for c in "\n\r") if e >= 0), default=len(text))
            yield "comment", text[at:end]
            at = end
        elif text[at] in "\"'":
            end = at + 1
            while end < len(text) and text[end] != text[at]:
                assert text[end] not in "\n\r", "a literal does not end"
                end += 1 + (text[end] == "\\")
            assert end < len(text), "a literal does not end"
            yield "literal", text[at : end + 1]
            at = end + 1
        elif text[at].isspace():
            at += 1
        else:
            found = _TOKEN.match(text, at)
            assert found is not None
            yield "token", found[0]
            at = found.end()


def code_of(text: str) -> tuple[str, ...]:
    """Tokens and literals, comments left out; the same for every way to read the text."""
    first, *others = ([t for kind, t in pieces(one) if kind != "comment"] for one in readings(text))
    assert all(other == first for other in others)
    return tuple(first)


def test_the_tokenizer_sees_what_compilers_see() -> None:
    assert code_of("a /* b */ c // d \\\n e\n f") == ("a", "c", "f")
    assert code_of('x "/* \\" */" 1.5e-3f') == ("x", '"/* \\" */"', "1.5e-3f")
    with pytest.raises(AssertionError):
        code_of("/* *??/\n/ int x;")  # a comment that ends for one reader alone
    assert code_of("/* *\\\n/ int") == ("int",)


# -- the three contexts ----------------------------------------------------------------------------------------------

_HOSTILE_PIECES = st.sampled_from(
    [
        "*/",
        "/*",
        "*",
        "/",
        "\\",
        "\n",
        "\r",
        "\v",
        "\f",
        "\x85",
        "\u2028",
        "\u2029",
        "\0",
        "??/",
        "??",
        "?",
        "\\\n",
        "*\\",
        "\\*",
        "*\\\n/",
        "*??/\n/",
        "//",
        '"',
        "'",
        'R"(',
        ')"',
        "#",
        "%:",
        "%",
        ":",
        "<:",
        "\ud800",
        "\N{BLACK HEART SUIT}",
        "asm(",
        "u0041",
        "\\u002f",
        "x",
        " ",
        "_Pragma(",
        *PAYLOADS,
    ]
)
_HOSTILE = st.one_of(st.lists(_HOSTILE_PIECES, max_size=12).map("".join), st.text(max_size=40))


def check_comment(text: str) -> None:
    comment = quote_comment(text)
    assert code_of(f"a {comment} b") == ("a", "b")
    if not text:
        assert comment == ""
        return
    assert comment.index("*/") == len(comment) - 3
    assert comment.rindex("/*") == 0
    assert comment.isascii()
    assert all(c == "\n" or c.isprintable() for c in comment)
    assert not set(comment) & set("\\?\"'#")
    assert "%:" not in comment  # refused before compilation: a digraph
    # Lines are the text's own, and each is a printable line of the comment.
    assert comment.count("\n") == text.count("\n") + 2


def check_string(text: str) -> None:
    literal = quote_string(text)
    assert code_of(f"a {literal} b") == ("a", literal, "b")
    assert literal.isascii()
    assert literal.isprintable()
    assert "?" not in literal
    assert '"' not in literal[1:-1]
    escapes = re.sub(r"\\[0-7]{3}", "", literal[1:-1])
    assert "\\" not in escapes
    value = re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), literal[1:-1].encode())
    assert value == text.encode("utf-8", "backslashreplace")


@EXAMPLES
@given(_HOSTILE)
def test_a_comment_ends_at_its_end(text: str) -> None:
    check_comment(text)


@EXAMPLES
@given(_HOSTILE)
def test_a_string_ends_at_its_end_and_has_the_texts_bytes(text: str) -> None:
    check_string(text)


@EXAMPLES
@given(_HOSTILE)
def test_an_identifier_is_one(text: str) -> None:
    assert re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", Names().of(text))
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text, re.ASCII):
        assert require_identifier(text) == text
    else:
        with pytest.raises(InvariantError, match="invalid identifier"):
            require_identifier(text)


@pytest.mark.slow
@MANY
@given(_HOSTILE)
def test_all_contexts_with_very_many_texts(text: str) -> None:
    check_comment(text)
    check_string(text)


@pytest.mark.parametrize("text", ["a * b / c // d % e", "y[n]: bfloat16 =. x[n].cast(`float16`) | ~(a ^ b) << 1 != 2;"])
def test_a_programs_text_stays_as_it_is(text: str) -> None:
    assert text in quote_comment(text)


# -- whole kernels ---------------------------------------------------------------------------------------------------

TARGETS = ("local", "nvidia-h200-sxm", "amd-mi250x")
NAME = "rows"  # of all kernels
MATMUL = "{o}[{m},{n}] +=! {a}[{m},{k}] * {b}[{k},{n}]"
SOFTMAX = "{s}[{m}] +=! exp({a}[{m},{n}]); {o}[{m},{n}] = exp({a}[{m},{n}]) / {s}[{m}] + {b}[{i}[{m}],{n}]"
# Of four tensors and then four axes, of which a program may use fewer.
HARMLESS = {"o": "out", "a": "left", "b": "right", "s": "sums", "m": "row", "n": "column", "k": "inner", "i": "which"}


def program_of(expression: str, names: dict[str, str], dtype: str = "float16") -> TensorProgram:
    types = {"a": (dtype, (64, 96)), "b": (dtype, (96, 96))}
    if "{i}" in expression:
        types["i"] = ("int32", (64,))
    shaped = {names[letter]: TensorType(DType(d), shape) for letter, (d, shape) in types.items()}
    return parse(expression.format(**names), shaped)


def source_of(program: TensorProgram, hw: HardwareSpec) -> KernelSource:
    """The source of a named kernel: default names have digits of the text, comments included."""
    groups, ranked, _ = rank_best_partition(program, hw, 1)
    return emit_plan(best_plans(ranked, 1)[0], dataclasses.replace(program, name=NAME), groups, hw)


def as_python_gives_it(text: str, target: str) -> HardwareSpec:
    """A spec that no door has looked at: hostile text in every field that is text."""
    spec = hardware.load(target)
    return dataclasses.replace(
        spec,
        id=text,
        name=text,
        vendor=text,
        isa=(text,),
        sources=tuple(dataclasses.replace(s, text=text, fields=(text,)) for s in spec.sources),
        units=tuple(dataclasses.replace(u, name=text) for u in spec.units),
        measured=tuple(dataclasses.replace(m, name=text, how=text) for m in spec.measured),
    )


@pytest.mark.parametrize("target", TARGETS)
def test_tokens_do_not_depend_on_what_a_spec_says_of_itself(target: str) -> None:
    program = program_of(MATMUL, HARMLESS)
    expected = source_of(program, as_python_gives_it("plain", target))
    texts = (*PAYLOADS, "zzmark */ int x; /*", "*??/\n/ int zzmark;", "*\\\n/ zzmark", "\u2028*/ zzmark")
    for text in texts:
        source = source_of(program, as_python_gives_it(text, target))
        assert code_of(source.text) == code_of(expected.text)
        assert source.options == expected.options
        assert not any(mark in token for mark in MARKS for token in code_of(source.text))


@cache
def plain_code() -> tuple[str, ...]:
    program = program_of(MATMUL, HARMLESS, "float32")
    return code_of(source_of(program, as_python_gives_it("plain", "local")).text)


@settings(EXAMPLES, max_examples=examples(25))
@given(_HOSTILE)
def test_nor_on_any_text(text: str) -> None:
    program = program_of(MATMUL, HARMLESS, "float32")
    assert code_of(source_of(program, as_python_gives_it(text, "local")).text) == plain_code()


@pytest.mark.parametrize("target", TARGETS)
def test_the_name_of_a_device_is_in_no_text(target: str) -> None:
    spec = dataclasses.replace(hardware.load(target), name="zzmark")
    assert "zzmark" not in source_of(program_of(MATMUL, HARMLESS), spec).text


@pytest.mark.parametrize("payload", PAYLOADS)
def test_the_audits_names_are_refused_at_the_door(payload: str) -> None:
    with pytest.raises(SpecError) as refused:
        from_mapping(to_mapping(hardware.load("local")) | {"name": payload})
    assert "request: name: must be 1 to 120 letters and digits" in str(refused.value)
    assert str(refused.value).isascii()


def test_the_audits_constructor_is_not_compiled(tmp_path: Path) -> None:
    """Past the door: gcc gets a spec as it was, and loading what comes of it writes nothing."""
    file = tmp_path / "pwn.txt"
    text = PAYLOADS[0].replace("pwn.txt", str(file))
    source = source_of(program_of(MATMUL, HARMLESS, "float32"), as_python_gives_it(text, "local"))
    library = tmp_path / "kernel.so"
    library.write_bytes(compile_c(source).binary)
    ctypes.CDLL(str(library))
    assert not file.exists()
    assert b"pwn" not in library.read_bytes()


def test_hostile_names_of_a_saved_kernel_do_not_leave_their_literals() -> None:
    """The emulator's program and the C header, of a kernel whose metadata came from somebody else."""
    source = source_of(program_of(MATMUL, HARMLESS), hardware.load("nvidia-t4"))
    expected = len(code_of(program_source(source)))
    for text in (*PAYLOADS, '"; zzmark; "', '??/" zzmark', "\\", "??/"):
        buffers = tuple(dataclasses.replace(b, name=text) for b in source.buffers)
        found = code_of(program_source(dataclasses.replace(source, buffers=buffers)))
        assert len(found) == expected
        assert not any("zzmark" in token for token in found if not token.startswith('"'))


def test_a_header_has_no_name_that_is_not_an_identifier() -> None:
    compiled = compile_c(source_of(program_of(MATMUL, HARMLESS, "float32"), hardware.load("local")))
    assert f"{NAME}_run" in code_of(c_header(compiled))
    hostile = dataclasses.replace(compiled, source=dataclasses.replace(compiled.source, name=PAYLOADS[0]))
    with pytest.raises(InvariantError, match="invalid identifier"):
        c_header(hostile)


# -- numbers ---------------------------------------------------------------------------------------------------------

_INTEGER = re.compile(r"\d+(u|LL|ULL)?|\(-\d+(LL)?( - 1)?\)")


def is_number(text: str) -> bool:
    """Whether the text is one number in the sense of the language, in parentheses where a sign begins it."""
    tokens = code_of(text)
    if tokens[0] == "(":
        assert tokens[-1] == ")"
        tokens = tokens[1:-1]
    return not any(a == b == "-" for a, b in pairwise(tokens)) and all(
        re.fullmatch(r"[-/()]|\.?\d[\w.+-]*|__builtin_inff?|__(int|longlong)_as_(float|double)", t) for t in tokens
    )


@EXAMPLES
@given(st.floats(), st.sampled_from([d for d in DType if d.is_float]), st.sampled_from([C, CUDA, HIP]))
def test_a_float_is_one_number(value: float, dtype: DType, dialect: Dialect) -> None:
    text = literal(value, dtype, dialect)
    assert is_number(text)
    assert "nan" not in text
    assert not re.search(r"(?<![a-z_])inf", text)
    assert text.startswith("(") or not text.startswith("-")
    if math.isfinite(value):
        assert float(text.strip("()").removesuffix("f")) == value  # the rounding to float32 is the compiler's


@EXAMPLES
@given(st.data(), st.sampled_from([d for d in DType if not d.is_float]), st.sampled_from([C, CUDA, HIP]))
def test_an_integer_is_one_number(data: st.DataObject, dtype: DType, dialect: Dialect) -> None:
    least, greatest = dtype.integer_range
    value = data.draw(st.one_of(st.integers(least, greatest), st.sampled_from([least, greatest, 0])))
    text = literal(value, dtype, dialect)
    assert _INTEGER.fullmatch(text)
    digits = re.sub(r"[a-zA-Z]", "", text)
    assert sum(int(part.replace(" ", "")) for part in re.findall(r"-? ?\d+", digits)) == value


# -- names of tensors and axes ---------------------------------------------------------------------------------------

RESERVED = [
    "NULL", "INFINITY", "NAN", "EOF", "M_PI", "assert", "errno", "va_arg", "va_list", "offsetof", "linux", "unix",
    "int", "wchar_t", "xor_eq", "and", "nullptr", "asm", "template", "main", "plan0_kernel",
    "tasks_kernel0", "threadIdx", "blockIdx", "atomicCAS", "expf", "exp", "fmaxf", "status", "task", "checked",
    "thread_scratch", "threads_i32", "VECTOR_FUNCTION", "THREADS", "MASK1", "HIP_ENABLE", "NV_IF_TARGET", "I8", "half",
    "float4", "uint4", "shared_memory", "barrier", "TensorMap", "memset", "omp_get_max_threads", "sched_getaffinity",
    "_Float16", "__global__", "__builtin_memset", "__asm__", "_Pragma", "defined", "__LINE__", "__x", "_", "__",
]  # fmt: skip
# What a launch is called; a parameter of that name hides it, and may.
FUNCTIONS = {f"{NAME}_{launch}" for launch in ("kernel", "kernel0", "kernel1", "run")}
# Words of pragmas and attributes, which are looked up among no variables.
NOT_LOOKED_UP = {"aligned", "defined", "dynamic", "ext_vector_type", "noclone", "noinline", "nowait", "num_threads",
                 "omp", "parallel", "pragma", "schedule", "simd", "single", "vector_size", "unroll"}  # fmt: skip
MORE = [  # words that the generators print themselves
    "volatile", "restrict", "extern", "simd", "omp", "parallel", "pragma", "unroll", "seen", "before", "join", "value",
    "place", "stored", "acc", "lane", "v", "chunk", "step",
]  # fmt: skip


def parts_of(tokens: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Where each function and declaration begins and ends: names of one are nothing to another."""
    depth = begin = 0
    for at, token in enumerate(tokens):
        depth += (token == "{") - (token == "}")
        if token in ("}", ";") and depth == 0:
            yield begin, at + 1
            begin = at + 1
    yield begin, len(tokens)


def check_names(expression: str, names: dict[str, str], target: str) -> KernelSource:
    """Hostile names change no token but those that stand for the harmless ones, each by one of its own."""
    hw = hardware.load(target)
    source = source_of(program_of(expression, names), hw)
    before, after = code_of(source_of(program_of(expression, HARMLESS), hw).text), code_of(source.text)
    assert len(before) == len(after)
    for begin, end in parts_of(before):
        old, new = before[begin:end], after[begin:end]
        changed = {(a, b) for a, b in zip(old, new, strict=True) if a != b}
        assert len({a for a, _ in changed}) == len(changed) == len({b for _, b in changed}), "two have one name"
        fronts = ("", *old)[: len(old)]
        looked_up = {b for a, b, front in zip(old, new, fronts, strict=True) if a == b and front != "."}
        assert not {b for _, b in changed} & (looked_up - NOT_LOOKED_UP), "a name means something else"
        assert all(re.fullmatch(r"[A-Za-z]\w*", b, re.ASCII) for _, b in changed)
    return source


def words_printed(expression: str, target: str) -> list[str]:
    """Every word of the generator's own in the text of a harmless program that a program could have for a name."""
    tokens = code_of(source_of(program_of(expression, HARMLESS), hardware.load(target)).text)
    words = {token for token in tokens if re.fullmatch(r"[A-Za-z_]\w*", token, re.ASCII)}
    return sorted(w for w in words - FUNCTIONS if not w.startswith(tuple(HARMLESS.values())))


def namings(words: list[str]) -> Iterator[dict[str, str]]:
    """All words, eight at a time: each for a tensor and, the second time, for an axis."""
    distinct = list(dict.fromkeys(words))
    for start in range(0, len(distinct), len(HARMLESS)):
        part = [*distinct[start:], *distinct][: len(HARMLESS)]
        yield dict(zip(HARMLESS, part, strict=True))
        yield dict(zip(HARMLESS, [*part[4:], *part[:4]], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "expression"),
    every(
        2,
        [
            (TARGETS[0], MATMUL),
            (TARGETS[0], SOFTMAX),
            (TARGETS[1], SOFTMAX),
            (TARGETS[1], MATMUL),
            (TARGETS[2], MATMUL),
            (TARGETS[2], SOFTMAX),
        ],
    ),
)
def test_names_change_nothing_but_names(expression: str, target: str) -> None:
    for names in namings([*RESERVED, *MORE, *words_printed(expression, target)]):
        check_names(expression, names, target)


# (expression, types of its inputs): kernels of every family, with most of the functions that texts define.
FAMILIES: list[tuple[str, dict[str, tuple[str, tuple[int, ...]]]]] = [
    ("o[m,n] +=! a[m,k] * b[k,n]", {"a": ("float16", (128, 128)), "b": ("float16", (128, 128))}),
    ("o[m,n] +=! a[m,k] * b[k,n]", {"a": ("float32", (128, 128)), "b": ("float32", (128, 128))}),
    ("o[m,n] +=! a[m,k] * b[k,n]", {"a": ("int8", (128, 128)), "b": ("int8", (128, 128))}),
    ("o[m,n] +=! a[m,k] * b[k,n]", {"a": ("bfloat16", (2048, 2048)), "b": ("bfloat16", (2048, 2048))}),
    ("o[n,m] = a[m,n]", {"a": ("float16", (512, 768))}),
    ("o[m] >=! a[m,n]", {"a": ("bfloat16", (64, 4096))}),
    ("s[m] +=! exp(a[m,n]); o[m,n] = exp(a[m,n]) / s[m]", {"a": ("float32", (64, 1024))}),
    ("o[n] = a[i[n] % 7] // 3 + i[n] % 5", {"a": ("int32", (8,)), "i": ("int64", (100,))}),
    ("o[n] = gelu(a[n]) + sigmoid(a[n]) + tanh(a[n]) ** 1.5 + log1p(erf(a[n]))", {"a": ("bfloat16", (1000,))}),
    ("o[n] = a[n].cast(`float8_e4m3fn`)", {"a": ("float16", (1000,))}),
    ("o[i[n]] +=. a[n]", {"o": ("float32", (9,)), "a": ("float32", (100,)), "i": ("int32", (100,))}),
    ("o[c,y] >=! a[c, y * 2 + k] where y in 32, k in 3", {"a": ("float32", (16, 80))}),
]


def functions_of(text: str) -> set[str]:
    """Words before an opening parenthesis, but for the compiler's own."""
    tokens = code_of(text)
    called = {a for a, b in pairwise(tokens) if b == "(" and re.fullmatch(r"[A-Za-z]\w*", a)}
    return {name for name in called if not re.fullmatch(rf"({NAME}_)?(kernel\d*(_\w+)?|run)", name)}


@pytest.mark.parametrize("target", TARGETS)
def test_no_tensor_has_the_name_of_a_function(target: str) -> None:
    """Whatever a text calls, a tensor of that name would hide it."""
    hw, found = hardware.load(target), set[str]()
    for expression, types in FAMILIES:
        program = parse(expression, {name: TensorType(DType(d), shape) for name, (d, shape) in types.items()})
        found |= functions_of(source_of(program, hw).text)
    assert len(found) > 20
    assert {name for name in HOST_INTRINSICS if Names().of(name) == name} == set()
    assert {name for name in found - NOT_LOOKED_UP if Names().of(name) == name} == set()


@pytest.mark.parametrize("name", ["A", "B", "C", "x", "bias", "weight", "W1", "Q", "row_max", "h0", "out_proj"])
def test_ordinary_names_stay(name: str) -> None:
    assert Names().of(name) == name


def plain_macros(arguments: list[str], text: str) -> set[str]:
    """Macros that a compiler has predefined or a header defines, but for those that begin with an underscore."""
    run = subprocess.run(arguments, input=text, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    found = {line.split(maxsplit=2)[1].partition("(")[0] for line in run.stdout.splitlines() if "#define" in line}
    return {name for name in found if not name.startswith("_")}


HEADERS = ("features.h", "math.h", "stdint.h", "stddef.h", "stdbool.h", "stdlib.h", "stdio.h", "string.h", "errno.h")


@pytest.mark.parametrize("language", ["c", "c++"])
def test_no_name_is_a_macro_of_the_compiler_or_of_its_headers(language: str) -> None:
    """Function-like ones too, which would need a bracket behind them; errno and what stdio.h and math.h say in small
    letters are never included, and a name like `stdin` stays."""
    text = "".join(f"#include <{header}>\n" for header in HEADERS)
    compiler = "gcc" if language == "c" else "g++"
    arguments = [compiler, "-dM", "-E", "-fopenmp", "-x", language, "-"]
    predefined = plain_macros(arguments, "")
    assert {"linux", "unix"} <= predefined
    assert not predefined & {Names().of(name) for name in predefined}
    shouted = {name for name in plain_macros(arguments, text) if not re.search("[a-z]", name)}
    assert {"NULL", "INFINITY", "EOF"} <= shouted
    assert not shouted & {Names().of(name) for name in shouted}


NVRTC_HAS = availability(hardware.load("nvidia-h200-sxm")).ok


def nvrtc_macros(candidates: list[str]) -> set[str]:
    """Those of the candidates that NVRTC takes for macros."""
    text = "".join(f"#ifdef {name}\n__device__ int found_{name};\n#endif\n" for name in candidates)
    arch = arch_named("sm_90a")
    assert arch is not None
    source = KernelSource("probe", Language.CUDA, arch, f'{text}extern "C" __global__ void probe() {{}}\n', (), ())
    return set(re.findall(r"\bfound_(\w+)", ptx(source)))


@pytest.mark.slow
@pytest.mark.skipif(not NVRTC_HAS, reason="NVRTC is not installed")
def test_no_name_is_a_macro_of_nvrtc() -> None:
    """Every word in the library's files that NVRTC says is defined."""
    from roller_svc.toolchain.nvrtc import library_for

    arch = arch_named("sm_90a")
    assert arch is not None
    words: set[str] = set()
    for file in library_for(arch).path.parent.glob("libnvrtc*.so*"):
        if ".alt." not in file.name:
            words |= {w.decode() for w in re.findall(rb"[A-Za-z][A-Za-z0-9_]{1,60}", file.read_bytes())}
    macros = nvrtc_macros(sorted(words))
    assert {"NULL", "assert", "NV_IF_TARGET"} <= macros
    assert not macros & {Names().of(name) for name in macros}


WORDS_OF_A_TEXT = 24


@pytest.mark.slow
@pytest.mark.parametrize("target", ["local", "nvidia-h200-sxm"])
def test_reserved_names_compile(target: str) -> None:
    """Many to a text: each name is an input of one text, and an output and its axis of another."""
    hw = hardware.load(target)
    if not availability(hw).ok:
        pytest.skip(availability(hw).reason)
    compiled = compile_c if hw.family is TargetKind.CPU else compile_cuda
    words, vector = [*RESERVED, *MORE, *sorted(FUNCTIONS | NOT_LOOKED_UP)], TensorType(DType("float32"), (64,))
    for start in range(0, len(words), WORDS_OF_A_TEXT):
        part = words[start : start + WORDS_OF_A_TEXT]
        summed = " + ".join(f"exp({name}[zz])" for name in part)
        as_inputs = parse(f"zzy[zz] = {summed}", dict.fromkeys(part, vector))
        as_outputs = parse("; ".join(f"{name}[{name}] = exp(zzx[{name}])" for name in part), {"zzx": vector})
        for program in (as_inputs, as_outputs):
            assert compiled(source_of(program, hw)).binary


@pytest.mark.skipif(not NVRTC_HAS, reason="NVRTC is not installed")
@pytest.mark.parametrize("where", ["input", "output", "axis"])
def test_null_is_a_name(where: str) -> None:
    """Of the audit: an input named NULL did not compile."""
    names = {"input": "x", "output": "y", "axis": "i"} | {where: "NULL"}
    types = {names["input"]: TensorType(DType("float32"), (64,))}
    program = parse("{output}[{axis}] = {input}[{axis}] * 2.0".format(**names), types)
    assert compile_cuda(source_of(program, hardware.load("nvidia-h200-sxm"))).binary


# -- specs at the door -----------------------------------------------------------------------------------------------

FREE_TEXT: list[tuple[Any, ...]] = [("name",), ("vendor",), ("id",), ("arch",), ("isa", 0), ("units", 0, "name"),
                                    ("levels", 0, "name"), ("tile_levels", 0), ("sources", 0, "fields", 0)]  # fmt: skip


@EXAMPLES
@given(st.sampled_from(FREE_TEXT), _HOSTILE)
def test_a_spec_is_refused_or_its_text_is_plain(path: tuple[Any, ...], text: str) -> None:
    data = json.loads(json.dumps(to_mapping(hardware.load("local"))))
    inner = data
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = text
    try:
        spec = from_mapping(data)
    except SpecError:
        return
    shown = [spec.name, spec.id, spec.vendor, *spec.isa, *(u.name for u in spec.units)]
    for value in shown:
        assert value.isascii()
        assert value.isprintable()
        assert not set(value) & set('*\\"?#<>{}')
