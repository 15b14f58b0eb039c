"""Copies of memory as rTasks."""

from __future__ import annotations

from roller_svc.codegen.cuda.function import TASK, TaskFunction
from roller_svc.errors import InvariantError
from roller_svc.ir.index import ceil_div

_WORDS = {16: "uint4", 4: "unsigned int", 1: "unsigned char"}  # by their bytes
_THREADS = 128
_WORDS_PER_THREAD = 4


def copy_function(size_bytes: int, alignment_bytes: int) -> TaskFunction:
    """Return the copy of dense memory, as a function of its source and its target.

    Args:
        size_bytes: the size of the memory.
        alignment_bytes: what divides the addresses of source and target.
    """
    if size_bytes < 1:
        raise InvariantError(f"a copy as rTasks has at least 1 byte, got {size_bytes}")
    width = next(each for each in _WORDS if size_bytes % each == 0 and alignment_bytes % each == 0)
    words, share, word = size_bytes // width, _THREADS * _WORDS_PER_THREAD, _WORDS[width]
    body = (
        f"  const long long first = (long long){TASK} * {share};\n"
        f"  const long long end = first + {share} < {words} ? first + {share} : {words};\n"
        f"  for (long long i = first + threadIdx.x; i < end; i += {_THREADS}) target[i] = source[i];\n"
    )
    parameters = (f"const {word} *source", f"{word} *target")
    return TaskFunction(parameters, body, (), ceil_div(words, share), _THREADS, 0, 1)
