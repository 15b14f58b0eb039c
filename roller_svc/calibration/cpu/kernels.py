"""C source of a CPU's micro-benchmarks, one function each, for the vector width of a spec.

Every function has the parameters (memory, shape). `shape` starts with the number of threads, the repetitions and the
byte offset in memory; the rest is specific to the function. Each thread uses its own part of memory.
"""

from __future__ import annotations

from roller_svc.codegen.c.vector.helpers import STORE_FENCE, nontemporal_helper
from roller_svc.codegen.c.vector.types import vector_type
from roller_svc.codegen.c.vector_transpose import SHUFFLE, transpose_helper
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import HardwareSpec

# Enough chains to cover the latency of an FMA (4 to 5 clocks) on two ports, and few enough for 16 registers.
CHAINS = 12
UNROLLED = 8  # independent additions: their latency on two ports
STREAMS = 8
PAGE_BYTES = 4096
LINE_BYTES = 64
PREFETCH_DISTANCE_BYTES = 2048  # as in generated kernels
ADDS = 16_000  # dependent additions in a piece of the clock's chain: some microseconds
_ADDS_UNROLLED = 16
PANEL_VECTORS = 3  # vectors in a row of B's panel

MULTIPLIED = (DType.FLOAT32, DType.FLOAT64, DType.INT32, DType.INT64)
DIVIDED = (DType.FLOAT32, DType.FLOAT64)

_HEAD = """
#include <stdint.h>
#include <string.h>
#include <time.h>
#define WORKERS _Pragma("omp parallel for schedule(static, 1) num_threads(shape[0])") \\
  for (int64_t t = 0; t < shape[0]; t++)
"""

# A chain of additions of two registers, one clock each. (Adding a constant may be free on Golden Cove.) shape[3] rounds
# of vector multiply-adds before each piece are not timed: many cores lower their clock during and after such
# instructions (T. Downs, "SIMD instructions lowering CPU frequency", Stack Overflow 56852812). Writes the seconds to
# memory.
_CLOCK = """
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}
void clock_adds(uint8_t *memory, const int64_t *shape) {
  WORKERS {
    int64_t x = t, y = shape[0];
    double seconds = 0;
    V a = {zero} + 0.999999f, b = {zero} + 1e-6f;
    {declared}
    for (int64_t n = 0; n < shape[1]; n++) {
      for (int64_t m = 0; m < shape[3]; m++) { {chains} }
      double start = now();
      for (int64_t m = 0; m < {adds}; m++) { {body} }
      seconds += now() - start;
    }
    V sum = {summed};
    ((double *)memory)[t * 64] = seconds;
    ((int64_t *)memory)[t * 64 + 1] = x + (int64_t)sum[0];
  }
}
"""
_ADD = '__asm__ volatile("" : "+r"(x), "+r"(y)); x += y;'
_CHAIN = 'c{j} = c{j} * a + b; __asm__("" : "+{register}"(c{j}));'
_DIVISIONS = 'c{j} = a / c{j}; __asm__("" : "+{register}"(c{j}));'  # j, 1 / j, j, ...

# Every chain and every accumulator is its own variable: an array would be in memory.
_MULTIPLY = """
void {name}(uint8_t *memory, const int64_t *shape) {
  WORKERS {
    {V} a = {zero} + ({element})1, b = {zero} + ({element})1;
    __asm__("" : "+{register}"(a), "+{register}"(b));
    {declared}
    for (int64_t n = 0; n < shape[1]; n++) { {body} }
    {V} sum = {summed};
    (({element} *)memory)[t * 64] = sum[0];
  }
}
"""

# shape[3]: vectors of a thread's part. Parts are a page apart, inputs half a page from outputs, to avoid 4K aliasing.
_STREAM = """
void {name}(uint8_t *memory, const int64_t *shape) {
  WORKERS {
    int64_t part = shape[3] / {parts}, apart = part / {streams};
    V *x = (V *)(memory + shape[2]) + t * (shape[3] + {page}), *y = x + part + {page} / 2;
    {declared}
    for (int64_t r = 0; r < shape[1]; r++) {
      {loop}
      __asm__ volatile("" : : "r"(x), "r"(y) : "memory");
    }
    V sum = {summed};
    __asm__ volatile("" : : "{register}"(sum));
    (void)apart;
  }
}
"""
_LOOP = "for (int64_t i = 0; i < part; i += {unrolled}) { {body} }"
_LOOP_OF_STREAMS = "for (int64_t i = 0; i < apart; i++) { {body} }"
_PREFETCH_READ = "__builtin_prefetch((char *)(x + i + {j}) + {ahead}, 0, 3);"
_PREFETCH_WRITE = "__builtin_prefetch((char *)(y + i + {j}) + {ahead}, 1, 3);"
# Written values are not zero: c1 is 1, and bytes of 63 are a finite number.
_WAYS = {
    "read": "c{j} += x[i + {j}];",
    "read_ahead": f"{_PREFETCH_READ} c{{j}} += x[i + {{j}}];",
    "read_streams": "c{j} += x[{j} * apart + i];",
    "write": "x[i + {j}] = c1;",
    "write_ahead": "__builtin_prefetch((char *)(x + i + {j}) + {ahead}, 1, 3); x[i + {j}] = c1;",
    "write_streamed": "stream_{v}(x + i + {j}, c1);",
    "write_library": "memset(x, 63, part * sizeof(V));",
    "copy": "y[i + {j}] = x[i + {j}];",
    "copy_ahead": f"{_PREFETCH_READ} {_PREFETCH_WRITE} y[i + {{j}}] = x[i + {{j}}];",
    "copy_streamed": f"{_PREFETCH_READ} stream_{{v}}(y + i + {{j}}, x[i + {{j}}]);",
    "copy_library": "memcpy(y, x, part * sizeof(V));",
}

# Descriptions. Variants of BEYOND_CORE_WAYS are not measured in a core's own caches, where they make no difference.
WAY_DESCRIPTIONS = {
    "read": "loads of whole vectors",
    "read_ahead": "the same with prefetch 2 KiB ahead",
    "read_streams": "the same in 8 streams",
    "write": "stores of whole vectors",
    "write_ahead": "the same with prefetch 2 KiB ahead",
    "write_streamed": "non-temporal stores",
    "copy": "loads and stores, both counted",
    "copy_ahead": "loads and stores with prefetch 2 KiB ahead, both counted",
    "copy_streamed": "loads with prefetch, non-temporal stores, both counted",
}
BEYOND_CORE_WAYS = frozenset({"read_ahead", "write_ahead", "write_streamed", "copy_ahead", "copy_streamed"})

# Pointer chase: the lines of a working set are linked to one cycle in random order (Sattolo's algorithm). shape[1]:
# steps, shape[3]: lines. A chase continues where the last one ended.
_LATENCY = """
typedef struct Line { struct Line *next, *at; char rest[{line} - 2 * sizeof(void *)]; } Line;
void link_lines(uint8_t *memory, const int64_t *shape) {
  Line *line = (Line *)(memory + shape[2]);
  uint64_t seed = 88172645463325252u;
  for (int64_t i = 0; i < shape[3]; i++) line[i].next = line + i;
  for (int64_t i = shape[3] - 1; i > 0; i--) {
    seed ^= seed << 13; seed ^= seed >> 7; seed ^= seed << 17;
    int64_t j = (int64_t)(seed % (uint64_t)i);
    Line *next = line[i].next;
    line[i].next = line[j].next;
    line[j].next = next;
  }
  line->at = line;
}
void follow_lines(uint8_t *memory, const int64_t *shape) {
  Line *line = (Line *)(memory + shape[2]), *at = line->at;
  for (int64_t n = 0; n < shape[1]; n++) at = at->next;
  line->at = at;
}
"""

# A region that asks for the number of threads waits for all of them (toolchain/pool.c).
_THREADS = """
int omp_get_num_threads(void);
void enter_region(uint8_t *memory, const int64_t *shape) {
  #pragma omp parallel num_threads(shape[0])
  __asm__ volatile("" : : "r"(memory), "r"(omp_get_num_threads()) : "memory");
}
void wait_at_barrier(uint8_t *memory, const int64_t *shape) {
  #pragma omp parallel num_threads(shape[0])
  for (int64_t n = omp_get_num_threads() > 0 ? 0 : shape[1]; n < shape[1]; n++) {
    #pragma omp barrier
  }
}
void count_together(uint8_t *memory, const int64_t *shape) {
  #pragma omp parallel num_threads(shape[0])
  for (int64_t n = omp_get_num_threads() > 0 ? 0 : shape[1]; n < shape[1]; n++)
    __atomic_fetch_add((int64_t *)memory, 1, __ATOMIC_RELAXED);
}
"""

# Packs a block of shape[4] rows with a stride of shape[3] elements to panels: contiguous vectors (B along n), or
# transposed in squares of a vector's lanes (A along k). The panel is reused, as in a kernel.
_PACK = """
void pack_rows(uint8_t *memory, const int64_t *shape) {
  const int64_t rows = shape[4], apart = shape[3], wide = {panel} * {lanes};
  WORKERS {
    float *panel = (float *)(memory + shape[2]) + t * (rows * (apart + wide) + {page_floats});
    float *block = panel + rows * wide;
    for (int64_t r = 0; r < shape[1]; r++)
      for (int64_t p = 0; p + wide <= apart; p += wide) {
        for (int64_t k = 0; k < rows; k++) { {body} }
        __asm__ volatile("" : : "r"(panel) : "memory");
      }
  }
}
void pack_transposed(uint8_t *memory, const int64_t *shape) {
  const int64_t rows = shape[4], apart = shape[3], wide = {panel} * {lanes};
  WORKERS {
    float *panel = (float *)(memory + shape[2]) + t * (rows * (apart + wide) + {page_floats});
    float *block = panel + rows * wide;
    for (int64_t r = 0; r < shape[1]; r++)
      for (int64_t first = 0; first < rows; first += {lanes}) {
        for (int64_t k = 0; k + {lanes} <= apart; k += {lanes})
          transpose_{v}(panel + k % rows * {lanes}, {lanes}, block + first * apart + k, apart);
        __asm__ volatile("" : : "r"(panel) : "memory");
      }
  }
}
"""
_ROW = "*(V *)(panel + k * wide + {j} * {lanes}) = *(V *)(block + k * apart + p + {j} * {lanes});"


def kernels_source(hw: HardwareSpec) -> str:
    """Return the source of all functions for the spec's vector width."""
    lanes = hw.vector_bytes // 4
    vector = vector_type(DType.FLOAT32, lanes)
    words = {
        "bytes": str(hw.vector_bytes), "lanes": str(lanes), "v": vector, "zero": "(V){0}", "V": "V", "element": "float",
        "register": "w" if hw.arch.prefix == "armv" else "v" if hw.vector_bytes == 64 else "x",
        "page": str(PAGE_BYTES // hw.vector_bytes), "page_floats": str(PAGE_BYTES // 4),
        "ahead": str(PREFETCH_DISTANCE_BYTES), "line": str(LINE_BYTES), "panel": str(PANEL_VECTORS),
        "unrolled": str(UNROLLED),
    }  # fmt: skip
    parts = [_HEAD, _typedefs(lanes, vector), SHUFFLE, STORE_FENCE, nontemporal_helper(DType.FLOAT32, lanes).text]
    parts += [transpose_helper("transpose", DType.FLOAT32, lanes), _clock()]
    parts += [_multiply(dtype, hw.vector_bytes) for dtype in MULTIPLIED]
    parts += [_stream(name, way) for name, way in _WAYS.items()]
    parts += [_LATENCY, _THREADS, _fill_template(_PACK, {"body": _repeat(_ROW, PANEL_VECTORS)})]
    return _fill_template("\n".join(parts), words)


def function_names() -> tuple[str, ...]:
    """Return the names of all functions."""
    multiplied = [multiply_name(dtype) + suffix for dtype in MULTIPLIED for suffix in ("", "_chain")]
    divided = [divide_name(dtype) for dtype in DIVIDED]
    threads = ("enter_region", "wait_at_barrier", "count_together")
    others = ("link_lines", "follow_lines", *threads, "pack_rows", "pack_transposed")
    return ("clock_adds", *multiplied, *divided, *_WAYS, *others)


def multiply_name(dtype: DType) -> str:
    return f"multiply_{dtype.value}"


def divide_name(dtype: DType) -> str:
    return f"divide_{dtype.value}"


def _typedefs(lanes: int, vector: str) -> str:
    masks = vector_type(DType.INT32, lanes)
    return (
        "typedef float V __attribute__((vector_size({bytes}), aligned(4)));\n"
        f"typedef V {vector};\n"
        f"typedef int32_t {masks} __attribute__((vector_size({{bytes}}), aligned(4)));"
    )


def _clock() -> str:
    words = {"chains": _repeat(_CHAIN, CHAINS), "body": _repeat(_ADD, _ADDS_UNROLLED)}
    return _fill_template(_CLOCK, words | {"adds": str(ADDS // _ADDS_UNROLLED)} | _declare_chains(CHAINS))


def _multiply(dtype: DType, vector_bytes: int) -> str:
    """Return independent chains of multiply-adds (rate), one chain (latency), and chains of divisions (rate)."""
    element = {DType.FLOAT32: "float", DType.FLOAT64: "double", DType.INT32: "int32_t", DType.INT64: "int64_t"}[dtype]
    vector = f"V_{element}"
    name = multiply_name(dtype)
    words = {"V": vector, "element": element, "zero": f"({vector}){{0}}"}
    texts = [f"typedef {element} {vector} __attribute__((vector_size({vector_bytes})));"]
    for suffix, chains in (("", CHAINS), ("_chain", 1)):
        body = {"name": name + suffix, "body": _repeat(_CHAIN, chains)} | _declare_chains(chains)
        texts.append(_fill_template(_fill_template(_MULTIPLY, body), words))
    if dtype in DIVIDED:
        body = {"name": divide_name(dtype), "body": _repeat(_DIVISIONS, CHAINS, first=1)} | _declare_chains(CHAINS, first=1)
        texts.append(_fill_template(_fill_template(_MULTIPLY, body), words))
    return "\n".join(texts)


def _stream(name: str, way: str) -> str:
    loop = way
    if "{j}" in way:
        plain = _LOOP_OF_STREAMS if "apart" in way else _LOOP
        loop = plain.replace("{body}", _repeat(way, UNROLLED))
    loop += " stores_done();" if "stream_" in way else ""
    parts = "2" if name.startswith("copy") else "1"
    return _fill_template(
        _STREAM, {"name": name, "loop": loop, "parts": parts, "streams": str(STREAMS)} | _declare_chains(UNROLLED)
    )


def _repeat(text: str, count: int, first: int = 0) -> str:
    return " ".join(text.replace("{j}", str(j)) for j in range(first, first + count))


def _declare_chains(count: int, first: int = 0) -> dict[str, str]:
    """Return the declarations of variables c0, c1, ... and their sum."""
    return {
        "declared": _repeat("{V} c{j} = {zero} + ({element}){j};", count, first),
        "summed": " + ".join(f"c{j}" for j in range(first, first + count)),
    }


def _fill_template(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace("{" + word + "}", value)
    return text
