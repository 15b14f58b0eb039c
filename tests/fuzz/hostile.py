"""Texts, names, numbers, headers and paths of a hostile client. @ is the place of a marker."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable

HOSTILE = (
    "*/ int @; /*", "*\\ int @; \\*", "*\\\n/ int @; /*", "*??/\n/ int @; /*", "??/\nint @;", "\\\nint @;", "\\", "@\\",
    "/* @", "*/@", "*\\@", "//@\n", '"; int @; "', "'@'", '"@\\"', 'R"(@)"', "\n#define @ 1\n", "\r@\r", "\n@\n",
    '\n#include "/etc/passwd" // @\n', '%:include "/etc/passwd" @', '_Pragma("@")',
    'asm(".incbin \\"/etc/hostname\\" @");', '*\\ asm(R"(.section .rodata;.incbin "/etc/hostname"@)"); \\*',
    '*\\ asm(R"(.include "/etc/passwd" @)"); \\*', '*\\ extern "C" __global__ void @(int*p){*p=42;} \\*',
    '*\\ __attribute__((constructor))void @(){system("id>@.txt");} \\*', "*\\\u2028/ int @;",
    "$(touch @)", "`touch @`", "; touch @;", "| touch @", "-o/tmp/@", "-I/etc/@", "--param=@",
    "../../etc/passwd@", "/etc/passwd@", "..\\..\\@", "file:///etc/@", "%2e%2e%2f@", "C:@",
    "@\x00", "\x00@", "\x1b[31m@", "\x7f@", "\u2028@", "\u2029@", "\x0b@", "\x0c@", "\x85@", "\u202e@\u202c",
    "\ud800@", "\udfff@", "@\U0001f600", "\ufeff@", "é@", "ſ@", "@ß", "٣@", "e\u0301@",
    "%s%n%x@", "{0.__class__}@", "{@}", "{{@}}", "%(name)s@", "\\u002a\\u002f@", "&#42;/@", "<script>@</script>",
    "!!python/object/apply:os.system ['@']", "!!python/name:os.system @", "&a [*a] @", "- @\n- b", "a: b\n@: c",
    "' or 1=1 -- @", "@" * 8, "A@" * 20, "@" + "A" * 10_000, " @ ", "", " ", "\t",
)  # fmt: skip
ENDINGS = tuple(text for text in HOSTILE if "@" in text and any(end in text for end in ("*", "/", "\\", "\n", '"')))
NAMES = (
    "NULL", "linux", "unix", "__LINE__", "__FILE__", "__COUNTER__", "_Bool", "asm", "kernel0", "threadIdx", "blockIdx",
    "main", "int", "float", "union", "register", "template", "operator", "and", "bitand", "xor", "errno", "stdin",
    "INFINITY", "NAN", "EOF", "M_PI", "I", "half", "float4", "uint8_t", "size_t", "__syncthreads", "warpSize", "printf",
    "exit", "memcpy", "min", "max", "fma", "_mm256_add_ps", "__m256", "status", "tid", "smem", "_", "__", "a" * 128,
    "roller_run", "omp_get_thread_num", "i0", "x0", "v0", "restrict", "typeof", "true", "false", "nullptr", "this",
    "self", "None", "def", "where", "in", "einsum", "const", "extent", "exp", "bool", "float32", "x_x", "defined", "@",
)  # fmt: skip
NUMBERS: tuple[object, ...] = (
    0, 1, -1, 2, 3, 7, 8, 16, 17, 31, 33, 64, 127, 255, 1000, 4096, 65_537, 2**31 - 1, 2**31, 2**32, 2**47, 2**48,
    2**53, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, -(2**63) - 1, 0.0, -0.0, 0.5, 1.0, 1e-320, 1e-12, 1e308, 1.5,
    1e6, 1e18,
)  # fmt: skip
RAW = (
    "1e400", "-1e400", "NaN", "Infinity", "-Infinity", "1E+2", "-0", "9" * 5000, "01", "0x10", "1_000", "'a'", "\ufeff",
)  # fmt: skip
WRONG: tuple[object, ...] = (
    None, True, False, "80", "", [], {}, [[]], {"": ""}, [None], "null", {"a": {"b": {"c": []}}}, ["float32"], [1, [2]],
)  # fmt: skip
HEADERS = (
    {"Prefer": "wait=5"}, {"Prefer": "wait=nan"}, {"Prefer": "wait=-5"}, {"Prefer": "respond-async, wait=1"},
    {"Prefer": "wait=99999999"}, {"Prefer": "wait=1" + "0" * 190}, {"Prefer": 'wait="2"; @'}, {"Prefer": "@" * 40},
    {"Host": "@.example"}, {"Host": "127.0.0.1.@.example:80"}, {"Origin": "http://@.example"}, {"Origin": "null"},
    {"Authorization": "Bearer @"}, {"X-API-Key": "@"}, {"X-Forwarded-Host": "@.example"}, {"X-Request-Id": "@\x7f"},
    {"Content-Type": "text/plain; @"}, {"Content-Type": "application/@+json"}, {"Content-Type": "application/json;@"},
    {"Content-Encoding": "gzip"}, {"Accept": "@/@"}, {"If-None-Match": '"@", *'}, {"Range": "bytes=0-@"},
    {"Idempotency-Key": "@"}, {"Idempotency-Key": "@ @"}, {"Last-Event-ID": "@"}, {"Last-Event-ID": "9" * 40},
    {"Expect": "@"}, {"Cookie": "@=" + "a" * 4000}, {"X-HTTP-Method-Override": "DELETE"},
)  # fmt: skip
PATHS = (
    "/v1/operations", "/v1/operations?page_token=@", "/v1/operations?page_size=-1", "/v1/operations?page_size=1e9",
    "/v1/operations?page_token=%00&page_size=@", "/v1/operations/@/events", "/v1/operations/hit-{z}/events",
    "/v1/operations/%00/events", "/v1/operations/@:cancel", "/v1/operations/@:cancel:cancel", "/v1/hardware:validate",
    "/v1/schedules:check", "/v1/plans:check",
    "/v1/operations/@", "/v1/operations/hit-@", "/v1/operations/hit-%00", "/v1/operations/hit-..%2f..%2f@",
    "/v1/operations/..%2f..%2fetc%2fpasswd@", "/v1/operations/%0a@", "/v1/operations/@?wait=0",
    "/v1/operations/@?wait=nan", "/v1/operations/@?wait=inf", "/v1/operations/@?wait=-1", "/v1/operations/@?wait=1e5",
    "/v1/operations/@?wait=%D9%A3", "/v1/operations/@?wait=0x10", "/v1/operations/@?wait=1&wait=@",
    "/v1/operations/0000000000000-@@?wait=0.001", "/v1/kernels/@", "/v1/kernels/sha256:@", "/v1/kernels/sha256:{z}",
    "/v1/kernels/sha256:{z}/source", "/v1/kernels/sha256:{z}/@", "/v1/kernels/sha256:{z}/..%2f@",
    "/v1/kernels/..%2f..%2fetc%2fpasswd/source", "/v1/kernels/%00/source", "/v1/kernels/@/bundle", "/v1/hardware/@",
    "/v1/hardware/..%2flocal", "/v1/hardware/local%00", "/v1/hardware/local/@", "/v1/hardware/local.yaml",
    "/v1/hardware", "/v1/version", "/readyz", "/healthz?@", "/healthz/", "/v1/hardware/", "/v1//hardware",
    "/v1/kernels:compile", "/v1/estimates/", "/openapi.json", "/docs", "/@", "/%2e%2e/@", "/v1/operations/{long}",
    "/v1/kernels/{long}/source", "/v1/hardware/{long}", "/{long}", "//@.example/%2e%2e",
)  # fmt: skip


class _Pickled:
    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return print, ("a pickle of a request was loaded",)


PICKLE = base64.b64encode(pickle.dumps(_Pickled())).decode()
