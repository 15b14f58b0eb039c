"""Count the SASS instructions of operators: prints the table of `roller_svc/analysis/instruction_counts.py`.

Of two kernels that differ in the elements of a thread, the longer one has this many more instructions for each further
element. Subroutines for rare operands, which elements share, do not count.
"""

from __future__ import annotations

from collections.abc import Iterable

from roller_svc.analysis.instruction_counts import ARCH, TYPES
from roller_svc.codegen.buffer_ref import BufferRef
from roller_svc.codegen.cuda.function import preamble
from roller_svc.codegen.dialect import CUDA
from roller_svc.codegen.names import Names
from roller_svc.codegen.scalar import Scalar
from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import COMPARISONS, Load, Op, OpKind
from roller_svc.ir.index import num
from roller_svc.ir.kernel import KernelSource, Language, LaunchSpec
from roller_svc.toolchain import compile_source
from roller_svc.toolchain.binaries.sass import sass_functions

FEW, MANY = 4, 12  # elements of a thread
BINARY = (OpKind.DIV, OpKind.FLOORDIV, OpKind.MOD, OpKind.SHL, OpKind.SHR, OpKind.MAX, OpKind.MIN, OpKind.FMAX,
          OpKind.FMIN, OpKind.POW, OpKind.FMOD, OpKind.REMAINDER, OpKind.ATAN2, OpKind.HYPOT, OpKind.TRUNC_DIV,
          OpKind.ADD, OpKind.SUB, OpKind.MUL, OpKind.BITAND, OpKind.BITOR, OpKind.BITXOR)  # fmt: skip
SKIPPED = {*COMPARISONS, OpKind.LAND, OpKind.LOR, OpKind.LNOT, OpKind.FMA, OpKind.CLIP, OpKind.ISNAN, OpKind.ISINF}
WHOLE = (OpKind.FLOOR, OpKind.CEIL)  # float → int32


def kernel(kind: OpKind, dtype: DType, count: int) -> KernelSource | None:
    """Return a kernel that applies an operator to `count` elements of a thread; None if the type has no such one."""
    stored, result = dtype.compute, DType.INT32 if kind in WHOLE else dtype
    scalar = Scalar(CUDA, Names(), "int", guard_reads=True)
    scalar.buffers = {name: BufferRef(name, stored, (count,)) for name in "abc"}
    lines: list[str] = []
    for i in range(count):
        operands = tuple(Load(name, (num(i),), dtype) for name in ("ab" if kind in BINARY else "a"))
        try:
            lines.append(f"  c[{i}] = {scalar.value(Op(kind, operands, result))};")
        except InvariantError:
            return None
    text = preamble(scalar.helpers, ARCH)
    type_ = CUDA.value_type(stored)
    head = f'extern "C" __global__ void one(const {type_} *__restrict__ a, const {type_} *__restrict__ b, '
    text += f"{head}{CUDA.value_type(result)} *__restrict__ c) {{\n" + "\n".join(lines) + "\n}\n"
    return KernelSource("one", Language.CUDA, ARCH, text, (), (LaunchSpec("one", ()),))


def counts(kinds: Iterable[OpKind], dtype: DType) -> dict[OpKind, int]:
    """Return the instructions of the operators that the type has, less loads and stores."""
    kernels: dict[tuple[OpKind, int], KernelSource] = {}
    for kind in kinds:
        for count in (FEW, MANY):
            if (source := kernel(kind, dtype, count)) is not None:
                kernels[kind, count] = source
    binaries = [compile_source(source).binary for source in kernels.values()]
    lengths = dict(zip(kernels, (f["one"].instructions for f in sass_functions(binaries, ARCH)), strict=True))
    found: dict[OpKind, int] = {}
    for kind in dict.fromkeys(kind for kind, _ in kernels):
        each = (lengths[kind, MANY] - lengths[kind, FEW]) / (MANY - FEW)
        found[kind] = max(1, round(each - (3 if kind in BINARY else 2)))
    return found


def main() -> None:
    for dtype in TYPES:
        print(f"    DType.{dtype.name}: {{")
        for kind, count in counts([k for k in OpKind if k not in SKIPPED], dtype).items():
            if count > 1:
                print(f"        OpKind.{kind.name}: {count},")
        print("    },")


if __name__ == "__main__":
    main()
