"""Names that begin the symbols of kernels and models: a program that links several tells them apart by these."""

from __future__ import annotations

import errno
import re
import signal

DEFAULT_PREFIX = "roller_"
DIGITS = 12  # of the digest, in the name of what has no other
MAX_SYMBOL = 64  # characters of a name that clients give
KEYWORDS = frozenset({
    "auto", "break", "case", "catch", "char", "class", "const", "const_cast", "continue", "default", "delete", "do",
    "double", "dynamic_cast", "else", "enum", "explicit", "export", "extern", "false", "float", "for", "friend",
    "goto", "if", "inline", "int", "long", "mutable", "namespace", "new", "operator", "private", "protected",
    "public", "register", "reinterpret_cast", "restrict", "return", "short", "signed", "sizeof", "static",
    "static_cast", "struct", "switch", "template", "this", "throw", "true", "try", "typedef", "typeid", "typename",
    "union", "unsigned", "using", "virtual", "void", "volatile", "while", "bool", "asm", "typeof", "and", "or", "not",
    "xor", "bitand", "bitor", "compl", "and_eq", "or_eq", "not_eq", "xor_eq", "alignas", "alignof", "char16_t",
    "char32_t", "wchar_t", "constexpr", "decltype", "noexcept", "nullptr", "static_assert", "thread_local", "concept",
    "requires", "co_await", "co_return", "co_yield", "consteval", "constinit", "char8_t", "typeof_unqual",
})  # fmt: skip
_SYMBOL = re.compile(r"[A-Za-z][A-Za-z0-9_]*", re.ASCII)
# Macros, types, tags and namespaces of the headers of standard C and of C++: a structure of such a name does not
# compile. POSIX reserves names that end in _t.
_IN_HEADERS = re.compile(
    r"main|std|I|NULL|EOF|WEOF|NAN|INFINITY|HUGE_VAL[FL]?|FILE|BUFSIZ|unix|linux|std(in|out|err)|errno|complex|noreturn"
    r"|math_errhandling|tm|timespec|lconv|once_flag|atomic_\w+|fd_mask|va_list|u_?(int|short|long|char)|\w+_t"
    r"|[A-Z]\w*_(MIN|MAX|WIDTH)|U?INT\w*_C|(ATOMIC|DBL|EXIT|FE|FLT|FP|L|LC|LDBL|M|MATH|RENAME|SEEK|SIG)_\w+|P_tmpdir"
    r"|(PRI|SCN)[a-zX]\w*|CHAR_BIT|DECIMAL_DIG|CLOCKS_PER_SEC|TIME_UTC|ONCE_FLAG_INIT|TSS_DTOR_ITERATIONS"
    r"|W(NOHANG|NOWAIT|UNTRACED|STOPPED|EXITED|CONTINUED)|(BYTE|LITTLE|BIG|PDP)_(ORDER|ENDIAN)|NFDBITS|FD_SETSIZE"
    r"|timeval|(random|drand48)_data|EHWPOISON"  # the last one is not in Python's table
    r"|CUDAAPI|CU(DA)?_\w+|CU[a-z]\w*"  # of cuda.h, which programs for saved GPU models and launchers include
    r"|\w+_((WORKSPACE|PACKED|WEIGHTS)_BYTES|(KERNEL|MODEL)_H)"  # of saved kernels and models
)
_NUMBERS = frozenset(vars(errno)) | frozenset(signal.Signals.__members__)  # macros of errno.h and signal.h
# POSIX has functions sem_open, mq_close, aio_read: those of a model would have their names.
_FUNCTIONS = frozenset({"aio", "dbm", "iconv", "mq", "sem", "shm"})
_NOT_IDENTIFIER = re.compile(r"[^A-Za-z0-9_]")


def default_name(digits: str) -> str:
    """Return the name of a kernel or model without one of its own: its digest's first digits make it unique."""
    return f"{DEFAULT_PREFIX}{digits[:DIGITS]}"


def named_digits(name: str) -> str:
    """Return the digits of a default name; "" for another name."""
    return name.removeprefix(DEFAULT_PREFIX) if name.startswith(DEFAULT_PREFIX) else ""


def is_in_headers(name: str) -> bool:
    """Return whether a header of standard C, of CUDA, or of a saved kernel or model, may define a macro or type so."""
    return _IN_HEADERS.fullmatch(name) is not None or name in _NUMBERS


def symbol_fault(name: str) -> str | None:
    """Return why the symbols of generated code may not begin with a name from a client; None if they may."""
    if len(name) > MAX_SYMBOL:
        return f"it has {len(name)} characters, of {MAX_SYMBOL} at most"
    if not _SYMBOL.fullmatch(name):
        return "it must begin with a letter, and have only letters, digits and _ of ASCII"
    if name in KEYWORDS:
        return "it is a keyword of C or C++"
    if is_in_headers(name) or name in _FUNCTIONS:
        return "headers of C or C++ use it"
    if "__" in f"{name}_":
        return "C++ reserves names with two underscores in a row, and one comes behind it"
    if f"{name.lower()}_".startswith(DEFAULT_PREFIX):
        return "names of kernels and models without one of their own begin so"
    return None


def suggest_symbol(name: str) -> str:
    """Return a name like another that may not begin symbols."""
    plain = re.sub("__+", "_", _NOT_IDENTIFIER.sub("_", name).strip("_"))[: MAX_SYMBOL // 2]
    candidates = (plain, f"my_{plain}", f"{plain}_kernel", "my_kernel")
    return next(each for each in candidates if symbol_fault(each) is None)
