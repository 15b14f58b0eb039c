"""The part of a read loop's rate at which models read their weights: `python -m roller_bench.zoo.read_rate FILE.onnx...`.

Calls on one thread and a loop that reads as many bytes take turns, since the rate of memory differs between minutes.
A model reads its file and its inputs once: models of `roller_bench.zoo.decode` do.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import mmap
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import roller_svc
from roller_svc.graph.inputs import random_arrays

ROUNDS = 60
HUGE_PAGE_BYTES = 2 << 20
STREAMS = 8  # parts of the memory that are read side by side, faster than one after the other
READ_LOOP = f"""
typedef float vec __attribute__((vector_size(64), aligned(64)));
float read_all(const vec *memory, long vectors) {{
  const long part = vectors / {STREAMS};
  vec sums[{STREAMS}] = {{}};
  for (long at = 0; at < part; ++at)
    for (int i = 0; i < {STREAMS}; ++i)
      sums[i] += memory[i * part + at];
  float total = 0;
  for (int i = 0; i < {STREAMS}; ++i)
    for (int lane = 0; lane < 16; ++lane)
      total += sums[i][lane];
  return total;
}}
"""


def build_read_loop(num_bytes: int) -> Callable[[], object]:
    """Return a function that reads this number of bytes of huge pages once, or a few more."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "loop.c"), Path(folder, "loop.so")
        source.write_text(READ_LOOP)
        command = ["gcc", "-O3", "-march=native", "-funroll-loops", "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        function = ctypes.CDLL(str(library)).read_all
    function.restype, function.argtypes = ctypes.c_float, [ctypes.c_void_p, ctypes.c_long]
    size = math.ceil(num_bytes / HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array[:] = 0
    start = math.ceil(array.ctypes.data / HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    vectors = math.ceil(num_bytes / (64 * STREAMS)) * STREAMS
    return lambda: (function(start, vectors), memory)


def measure(file: Path) -> dict[str, Any]:
    """Return the least seconds of a call and of the loop, and the least and the median part of its rate in a round."""
    model = roller_svc.compile_model(file, threads=1, tune="off", select="measure")
    inputs = random_arrays(model.inputs)
    num_bytes = file.stat().st_size + sum(array.nbytes for array in inputs.values())
    read, times = build_read_loop(num_bytes), []
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        model.run(inputs)
        called_s = time.perf_counter()
        read()
        times.append((called_s - start_s, time.perf_counter() - called_s))
    call_s, read_s = (min(each) for each in zip(*times, strict=True))
    return {
        "file": file.name, "bytes": num_bytes, "call_s": call_s, "read_loop_s": read_s,
        "read_loop_bytes_per_s": num_bytes / read_s, "part": read_s / call_s,
        "part_median": statistics.median(loop / call for call, loop in times),
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    print(json.dumps([measure(file) for file in parser.parse_args().files], indent=1))
