"""Names of programs and trees → unique C identifiers."""

from __future__ import annotations

import re
from collections.abc import Collection

from roller_svc.ir.symbol_names import KEYWORDS

# names that functions of kernels, their helpers or their headers use
_USED = frozenset({
    "main", "status", "checked", "task", "blockIdx", "threadIdx", "blockDim", "gridDim", "warpSize", "abs", "exp",
    "log", "sin", "cos", "tan", "pow", "sqrt", "floor", "ceil", "round", "trunc", "erf", "signbit", "isnan", "isinf",
    "max", "min", "y0", "y1", "yn", "j0", "j1", "jn", "gamma", "signgam", "index", "unix", "linux", "i8", "u8", "i16",
    "u16", "i32", "u32", "i64", "u64", "f16", "bf16", "f32", "f64", "idx", "div", "thread_scratch",
})  # fmt: skip
# functions of math.h with their f and l variants, and names reserved by C implementations
_LIBRARY = re.compile(
    r"(a?(sin|cos|tan)h?|atan2|exp2?|expm1|log(2|10|1p|b)?|ilogb|pow|sqrt|cbrt|hypot|erfc?|[lt]gamma|ceil|floor|trunc"
    r"|l?l?r(int|ound)|nearbyint|fmod|remainder|remquo|copysign|nan|nextafter|nexttoward|fdim|fmax|fmin|fma|fabs|frexp"
    r"|ldexp|modf|scalb|scalbn|scalbln|drem|significand|finite|j[01n]|y[01n]|exp10|pow10|gamma|rsqrt|rcbrt|normcdf"
    r"|norm3d|norm4d|sinpi|cospi|sincos|mem(cpy|set|move|cmp)|str[a-z]+|malloc|free|calloc|printf|abort|exit)[fl]?"
    r"|.*_v?(f16|bf16|e4m3|e5m2|[iuf](8|16|32|64))(x\d+)?|.*_vboolx\d+|v[fi]\d.*|cuda.*|(nv|NV).*|tex.*|surf.*|make_.*|u?(char|short|int|long)\d?"
    r"|va_\w+|assert|in_range|word_at|bf16_of_word|f32_bits|exp2_approx|rcp_approx|named_any|stores_done|omp_\w+|sched_\w+|atomic[A-Z]\w+"
    r"|v(u\d+|bf16|bool|e4m3|e5m2)x\d+|(float|double)\d|dim3|half|size_t"
    r"|copy_async_\d+|commit_copies|await_copies|load_matrix_\d\w*|mma_m\d\w*|mfma_\w+|run\d+_\w+|mma_(two|four)_\w+|round_tf32"
    r"|tasks_\w+|event_\w+|(load|exchange)_(acquire|relaxed)|sleep_ns|timer_ns"
    r"|copy_bulk|arrive_after_copies|first_page|ring_(memory|filled|free|parity|page|begin|take|release|claim|commit|skip)|shared_address|shared_memory|barrier_\w+|tma_\w+|wgmma_\w+|bulk_\w+|fence_\w+|cluster_\w+|registers_\w+"
    r"|matrix_descriptor_\w+|store_matrix_\w+|hold_results_\w+|TensorMap|prefetch_map|elect_one|grid_wait|grid_launch_dependents|and_or|named_barrier|map_shared_rank"
    r"|(hip|HIP_|HW_ID|TEXTURE_|DECLOP_)\w*|launch_bounds_impl\d|select_impl_"  # of HIP's headers
)
# Names of macros in headers: NULL, INFINITY, MASK1. Names with one capital (A, W2) are never macros.
_MACRO = re.compile(r"(?=[^A-Z]*[A-Z][^A-Z]*[A-Z])[A-Z0-9_]+")
_NOT_IDENTIFIER = re.compile(r"[^A-Za-z0-9_]")


class Names:
    """Maps each name to one identifier.

    Emitted helper functions end in a type (max_f32). A name of that form, of a macro or of a keyword gets a trailing
    underscore.
    """

    def __init__(self) -> None:
        self._identifiers: dict[str, str] = {}
        self._used: set[str] = set()
        self._elements: dict[str, set[str]] = {}  # identifier -> those of its elements

    def of(self, name: str) -> str:
        if name not in self._identifiers:
            self._identifiers[name] = self._fresh(name)
        return self._identifiers[name]

    def reserve(self, *identifiers: str) -> None:
        """Reserve identifiers that are in use: buffers of the kernel."""
        self._used.update(identifiers)

    def of_elements(self, name: str, suffixes: Collection[str]) -> str:
        """Return the identifier of an array whose elements are variables, each with its suffix; reserve them all."""
        identifier = self.of(name)
        own = self._elements.setdefault(identifier, set())
        if self._used & ({identifier + suffix for suffix in suffixes} - own):
            identifier = self._identifiers[name] = self._fresh(name, suffixes)
            own = self._elements.setdefault(identifier, set())
        own.update(identifier + suffix for suffix in suffixes)
        self._used |= own
        return identifier

    def _fresh(self, name: str, suffixes: Collection[str] = ()) -> str:
        base = _NOT_IDENTIFIER.sub("_", name).strip(".").lstrip("_") or "v"
        if base[0].isdigit():
            base = f"d{base}"
        if base in KEYWORDS or base in _USED or _LIBRARY.fullmatch(base) or _MACRO.fullmatch(base):
            base += "_"
        candidate, count = base, 1
        while any(candidate + suffix in self._used for suffix in ("", *suffixes)):
            count += 1
            candidate = f"{base}_{count}"
        self._used.add(candidate)
        return candidate
