"""Preamble of C functions: prototypes, vector types, helpers, thread-local scratch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from roller_svc.codegen import dialect as dialects
from roller_svc.codegen.c.threads import THREADS
from roller_svc.codegen.c.vector.helpers import SHUFFLED, STORE_FENCE, c_helper, horizontal_text, vector_typedefs
from roller_svc.codegen.c.vector_transpose import SHUFFLE, is_transpose_helper, transpose_helper
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import RuntimeCheck

CHECKED = """static long checked(long i, long size, long check, long long *status) {
  if (i >= 0 && i < size) return i;
  if (__sync_bool_compare_and_swap(&status[0], 0, 1)) { status[1] = check; status[2] = i; }
  return 0;  // a place that exists: the caller reports the index and throws the result away
}"""

FLOAT16_CHECK = """#ifndef __FLT16_MAX__
#error this kernel needs the type _Float16: compile it with gcc 12, with clang 15, or with a later version
#endif"""

# Never inlined or cloned: candidates share the function, and the measured code is the delivered code.
ROUTINE = "static __attribute__((noinline, noclone)) void"

SCRATCH = "thread_scratch"
# A translation unit of several programs is linked once for all, and again for one, whose scratch then takes precedence.
SHARED_SCRATCH_LINKAGE = '__attribute__((weak, visibility("hidden")))'


@dataclass(frozen=True, slots=True)
class Function:
    """Source of one launch, and the parts of the preamble that it needs."""

    text: str
    helpers: tuple[str, ...]
    library: tuple[str, ...]
    scratch_buffers: tuple[str, ...]  # declarations of thread-local buffers
    tasks: int  # of its largest parallel loop; 0 without one
    checks: tuple[RuntimeCheck, ...]
    routines: tuple[tuple[str, str], ...] = ()  # (name, parameters and body) of routines that no earlier function has


def preamble(functions: tuple[Function, ...], scratch: str) -> str:
    """Return prototypes, vector types, helpers, the scratch definition and routines of the functions."""
    parts: list[str] = []
    library = sorted({name for f in functions for name in f.library})
    parts += _prototypes(library)
    names = tuple(dict.fromkeys(name for f in functions for name in f.helpers))
    helpers = [_helper_text(name) for name in names]
    routines = [f"{ROUTINE} {name}{text}" for f in functions for name, text in f.routines]
    code = "\n".join([*helpers, *routines, *(f.text for f in functions)])
    types = vector_typedefs(code)
    if dialects.C.half in f"{types}{code}":
        parts.append(FLOAT16_CHECK)
    if types:
        parts.append(types)
    if any(is_transpose_helper(name) for name in names):
        parts.append(SHUFFLE)
    if any(name.startswith("join_") for name in names):
        parts.append(SHUFFLED)
    parts += helpers
    if any(f.checks for f in functions):
        parts.append(CHECKED)
    if any(f.tasks for f in functions):
        parts.append(THREADS)
    if scratch:
        parts.append(scratch)
    parts += routines
    return "\n".join(parts) + ("\n\n" if parts else "")


def scratch_definition(functions: Iterable[Function]) -> str:
    """Return the definition, without linkage, of the scratch of all functions, or "" without any.

    It is a union: a thread runs one function at a time, and none reads what another one left. Otherwise candidates in
    one translation unit would take, and clear, the pages of all of them.
    """
    members = [f"  struct {{ {' '.join(f.scratch_buffers)} }};" for f in functions if f.scratch_buffers]
    return "\n".join(("_Thread_local union {", *members, f"}} {SCRATCH};")) if members else ""


def _helper_text(name: str) -> str:
    base, _, type_ = name.partition("_v")
    if name == "stores_done":
        return STORE_FENCE
    if base.startswith("join_"):
        return horizontal_text(name, dialects.C)
    if is_transpose_helper(name):
        short, lanes = type_.split("x")
        return transpose_helper(base, next(d for d in DType if dialects.SHORT.get(d) == short), int(lanes))
    return c_helper(name).text


_ARITY = {"pow": 2, "fmod": 2, "remainder": 2, "atan2": 2, "hypot": 2, "fmax": 2, "fmin": 2, "fma": 3}


# Functions with vector variants in glibc 2.35 and later (libmvec, at most 4 ulp), which vector loops call.
_VECTOR_FUNCTIONS = frozenset({
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "erf", "exp", "exp2", "expm1", "hypot",
    "log", "log10", "log1p", "log2", "pow", "sin", "sinh", "tan", "tanh",
})  # fmt: skip
_VECTOR_MATH = """#include <features.h>
#if defined(__x86_64__) && defined(__GLIBC__) && __GLIBC_PREREQ(2, 35)
#define VECTOR_FUNCTION __attribute__((simd("notinbranch")))
#else
#define VECTOR_FUNCTION
#endif"""


def _prototypes(library: list[str]) -> list[str]:
    lines = [_VECTOR_MATH] if any(base_name(name) in _VECTOR_FUNCTIONS for name in library) else []
    for name in library:
        type_ = "double" if base_name(name) == name else "float"
        mark = "VECTOR_FUNCTION " if base_name(name) in _VECTOR_FUNCTIONS else ""
        lines.append(f"{mark}{type_} {name}({', '.join([type_] * _ARITY.get(base_name(name), 1))});")
    return lines


def base_name(name: str) -> str:
    """Return the name without the suffix of float: expf → exp, but erf → erf."""
    return name[:-1] if name.endswith("f") and name != "erf" else name
