"""TVM as a baseline: programs as tensor expressions, compiled for this CPU with schedules that need no tuning."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import tvm
from numpy.typing import NDArray
from tvm import s_tir, te, tirx
from tvm.s_tir import dlight
from tvm.target import Target
from tvm.target.codegen import llvm_get_system_cpu, llvm_get_vector_width, llvm_version_major

from roller_bench.baselines.baseline import EXPECTED_ERRORS, Baseline, check, error_summary, fastest
from roller_bench.baselines.library import no_baseline
from roller_bench.baselines.translate.nest import affine_index, index_range
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import COMPARISONS, AxisRef, Cast, Const, Expr, Load, Op, OpKind, Select, loads_of
from roller_svc.ir.program import Combine, StatementKind, TensorExpr, TensorProgram
from roller_svc.semantics.interpreter import Value

_K = OpKind
_FLOAT8 = (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2)
_TRUTHS = COMPARISONS | {_K.LAND, _K.LOR, _K.LNOT, _K.ISNAN, _K.ISINF}


def type_name(dtype: DType) -> str:
    """Return TVM's name of a storage type. Raises no_baseline."""
    if dtype in _FLOAT8:
        raise no_baseline(f"{dtype.value} is not translated: TVM's conversions to it do not say that they saturate")
    return dtype.value


def converted(value: Any, source: DType, target: DType) -> Any:
    """Convert as C does; if the language saturates instead, the comparison of results fails."""
    if source is target:
        return value
    if target is DType.BOOL:
        return value != tirx.const(0, type_name(source))
    return tirx.Cast(type_name(target), value)


@dataclass(frozen=True, slots=True)
class Point:
    """Translates expressions. Narrow floats are computed in float32; conditions are TVM's bool."""

    tensors: Mapping[str, Any]
    axes: Mapping[str, Any]
    extents: Mapping[str, int]

    def value(self, expr: Expr) -> Any:
        """Translate to the type expr.dtype.compute. Raises no_baseline for unsupported operators."""
        match expr:
            case Const(value=number, dtype=dtype):
                return tirx.const(number, type_name(dtype.compute))
            case AxisRef(name=name):
                return self.axes[name]
            case Load(tensor=tensor, index=index, dtype=dtype):
                loaded = self.tensors[tensor](*(self._index(part) for part in index))
                return converted(loaded, dtype, dtype.compute)
            case Cast(arg=arg, dtype=dtype, implicit=implicit):
                whole = converted(self.value(arg), arg.dtype.compute, dtype.compute)
                if implicit or dtype is dtype.compute:
                    return whole
                return converted(converted(whole, dtype.compute, dtype), dtype, dtype.compute)
            case Select(cond=cond, then=then, otherwise=otherwise):
                choose = tirx.Select if self._is_safe(then) and self._is_safe(otherwise) else tirx.if_then_else
                return choose(self.truth(cond), self.value(then), self.value(otherwise))
            case Op(kind=kind, dtype=dtype) if kind in _TRUTHS:
                return tirx.Cast(type_name(dtype), self.truth(expr))
            case Op():
                return self._operator(expr)

    def truth(self, expr: Expr) -> Any:
        """Translate a condition to TVM's bool."""
        match expr:
            case Op(kind=_K.LAND, args=(a, b)):
                return tirx.all(self.truth(a), self.truth(b))
            case Op(kind=_K.LOR, args=(a, b)):
                return tirx.any(self.truth(a), self.truth(b))
            case Op(kind=_K.LNOT, args=(a,)):
                return tirx.Not(self.truth(a))
            case Op(kind=kind, args=args) if kind in _TRUTHS:
                return _COMPARE[kind](*(self.value(a) for a in args))
            case Cast(arg=arg, dtype=dtype, implicit=True) if not dtype.is_float and not arg.dtype.is_float:
                return self.truth(arg)
            case _:
                return converted(self.value(expr), expr.dtype.compute, DType.BOOL)

    def _index(self, expr: Expr) -> Any:
        return converted(self.value(expr), expr.dtype, DType.INT32)

    def _is_safe(self, expr: Expr) -> bool:
        """Return whether all reads are in bounds, so that an untaken branch may be evaluated."""
        for load in loads_of(expr):
            index = affine_index(load)
            if index is None:
                return False
            ends = [index_range(one, self.extents) for one in index]
            shape = [int(size) for size in self.tensors[load.tensor].shape]
            if any(low < 0 or high >= size for (low, high), size in zip(ends, shape, strict=True)):
                return False
        return True

    def _operator(self, op: Op) -> Any:
        args, kind = [self.value(a) for a in op.args], op.kind
        if kind is _K.FLOORDIV:
            return _by_nonzero(tirx.floordiv, *args)
        if kind is _K.TRUNC_DIV:
            return _by_nonzero(tirx.truncdiv, *args)
        if kind is _K.MOD and not op.dtype.is_float:
            return _by_nonzero(tirx.floormod, *args)
        if kind in (_K.FLOOR, _K.CEIL):
            return tirx.Cast("int32", _FUNCTIONS[kind](*args))
        if kind not in _FUNCTIONS:  # tirx.fmod is there, but its code generator for CPUs does not know it
            raise no_baseline(f"TVM has no {kind.value}")
        return _FUNCTIONS[kind](*args)


def _by_nonzero(divide: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """Return a quotient or remainder that is 0 for a divisor of 0."""
    if isinstance(b, tirx.IntImm) and b.value != 0:
        return divide(a, b)
    zero, one = tirx.const(0, a.ty.dtype), tirx.const(1, a.ty.dtype)
    return tirx.Select(b == zero, zero, divide(a, tirx.Select(b == zero, one, b)))


def _like(x: Any, value: float) -> Any:
    return tirx.const(value, x.ty.dtype)


def _sign(x: Any) -> Any:
    above = tirx.Select(x > _like(x, 0), _like(x, 1), x)  # zeros keep their sign, NaN stays
    return tirx.Select(x < _like(x, 0), _like(x, -1), above)


def _normcdf(x: Any) -> Any:
    return (tirx.erf(x * _like(x, math.sqrt(0.5))) + _like(x, 1)) * _like(x, 0.5)


def _softplus(x: Any) -> Any:
    return tirx.max(x, _like(x, 0)) + tirx.log1p(tirx.exp(-tirx.abs(x)))


def _ignoring_nan(join: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: tirx.Select(tirx.isnan(a), b, tirx.Select(tirx.isnan(b), a, join(a, b)))


_COMPARE: dict[OpKind, Callable[..., Any]] = {
    _K.LT: lambda a, b: a < b, _K.LE: lambda a, b: a <= b, _K.GT: lambda a, b: a > b, _K.GE: lambda a, b: a >= b,
    _K.EQ: tirx.EQ, _K.NE: tirx.NE, _K.ISNAN: tirx.isnan, _K.ISINF: tirx.isinf,
}  # fmt: skip

_FUNCTIONS: dict[OpKind, Callable[..., Any]] = {
    _K.ADD: lambda a, b: a + b, _K.SUB: lambda a, b: a - b, _K.MUL: lambda a, b: a * b, _K.DIV: tirx.div,
    _K.NEG: lambda x: -x, _K.SHL: lambda a, b: a << b, _K.SHR: lambda a, b: a >> b, _K.BITAND: tirx.bitwise_and,
    _K.BITOR: tirx.bitwise_or, _K.BITXOR: tirx.bitwise_xor, _K.BITNOT: tirx.bitwise_not, _K.EXP: tirx.exp,
    _K.EXP2: tirx.exp2, _K.LOG: tirx.log, _K.LOG2: tirx.log2, _K.LOG10: tirx.log10, _K.LOG1P: tirx.log1p,
    _K.SQRT: tirx.sqrt, _K.RSQRT: tirx.rsqrt, _K.RECIPROCAL: lambda x: tirx.div(_like(x, 1), x),
    _K.SQUARE: lambda x: x * x, _K.ABS: tirx.abs, _K.SIGN: _sign, _K.SIN: tirx.sin, _K.COS: tirx.cos, _K.TAN: tirx.tan,
    _K.ASIN: tirx.asin, _K.ACOS: tirx.acos, _K.ATAN: tirx.atan, _K.SINH: tirx.sinh, _K.COSH: tirx.cosh,
    _K.TANH: tirx.tanh, _K.ASINH: tirx.asinh, _K.ACOSH: tirx.acosh, _K.ATANH: tirx.atanh, _K.ERF: tirx.erf,
    _K.NORMCDF: _normcdf, _K.SIGMOID: tirx.sigmoid, _K.SILU: lambda x: x * tirx.sigmoid(x),
    _K.GELU: lambda x: x * _normcdf(x), _K.RELU: lambda x: tirx.max(x, _like(x, 0)), _K.SOFTPLUS: _softplus,
    _K.FLOOR: tirx.floor, _K.CEIL: tirx.ceil, _K.RFLOOR: tirx.floor, _K.RCEIL: tirx.ceil, _K.ROUND: tirx.nearbyint,
    _K.TRUNC: tirx.trunc, _K.MAX: tirx.max, _K.MIN: tirx.min, _K.FMAX: _ignoring_nan(tirx.max),
    _K.FMIN: _ignoring_nan(tirx.min), _K.POW: tirx.power, _K.ATAN2: tirx.atan2,
    _K.HYPOT: tirx.hypot, _K.FMA: lambda a, b, c: a * b + c,
    _K.CLIP: lambda x, low, high: tirx.min(tirx.max(x, low), high),
}  # fmt: skip


def function_of(program: TensorProgram) -> Any:
    """Translate a program to a PrimFunc over inputs, then outputs.

    Raises BuildError (no-peer) for programs that TVM's tensor expressions cannot express.
    """
    tensors: dict[str, Any] = {}
    for number, (name, kind) in enumerate(program.inputs):
        tensors[name] = te.placeholder(kind.shape, type_name(kind.dtype), f"input{number}")
    inputs = list(tensors.values())
    for number, statement in enumerate(program.statements):
        tensors[statement.output] = _computed(statement, tensors, f"statement{number}")
    outputs = [tensors[out.tensor] for out in program.outputs]
    if len({id(tensor) for tensor in (*inputs, *outputs)}) < len(inputs) + len(outputs):
        raise no_baseline("an output that is an input, or twice an output, has no place of its own in TVM")
    return te.create_prim_func([*inputs, *outputs])


def _computed(statement: TensorExpr, tensors: dict[str, Any], name: str) -> Any:
    if statement.kind is StatementKind.SCATTER:
        raise no_baseline("TVM's tensor expressions write every element once: they have no scatter")
    shape, stored, combine = statement.type.shape, statement.type.dtype, statement.combine
    if combine is None or not statement.reduced:
        return te.compute(shape, lambda *at: _mapped(statement, tensors, at), name)
    loops = {axis.name: te.reduce_axis((0, axis.extent), f"r{number}") for number, axis in enumerate(statement.reduced)}

    def reduced(*at: Any) -> Any:
        point = _point(statement, tensors, at, {axis: loop.var for axis, loop in loops.items()})
        body = statement.body
        if combine in (Combine.ALL, Combine.ANY):
            value = converted(point.truth(body), DType.BOOL, statement.accumulator)
        else:
            value = converted(point.value(body), body.dtype.compute, statement.accumulator)
        return _REDUCERS[combine](value, list(loops.values()))

    total = te.compute(shape, reduced, name)
    if stored is statement.accumulator:
        return total
    return te.compute(shape, lambda *at: converted(total(*at), statement.accumulator, stored), f"{name}_stored")


def _mapped(statement: TensorExpr, tensors: dict[str, Any], at: tuple[Any, ...]) -> Any:
    value = _point(statement, tensors, at, {}).value(statement.body)
    return converted(value, statement.body.dtype.compute, statement.type.dtype)


def _point(statement: TensorExpr, tensors: dict[str, Any], at: tuple[Any, ...], reduced: dict[str, Any]) -> Point:
    """Return the output axes at `at`; constant indices have no axis."""
    spatial = {i.name: var for i, var in zip(statement.index, at, strict=True) if isinstance(i, AxisRef)}
    return Point(tensors, spatial | reduced, statement.extents)


_product = te.comm_reducer(lambda a, b: a * b, lambda dtype: tirx.const(1, dtype), name="product")

# TVM's own reducers, which its schedules know; its maximum starts from the smallest finite number.
_REDUCERS: dict[Combine, Callable[[Any, list[Any]], Any]] = {
    Combine.SUM: te.sum, Combine.MAX: te.max, Combine.MIN: te.min, Combine.ALL: te.min, Combine.ANY: te.max,
    Combine.PROD: _product,
}  # fmt: skip


# Register tile of a sum: 12 independent FMA chains hide a latency of 4 cycles at 2 FMAs per cycle and fit 16 registers.
_COLUMNS, _ROWS = 2, 6
_FLOAT_BITS = 32


@dataclass(frozen=True, slots=True)
class Schedule:
    """A module and the description of its schedule."""

    name: str
    module: Any


def host_target(threads: int) -> Any:
    """Return the target of this CPU."""
    return Target({"kind": "llvm", "mcpu": llvm_get_system_cpu(), "num-cores": threads})


def schedules(function: Any, target: Any) -> tuple[Callable[[], Schedule], ...]:
    """Return functions that make the schedules; each raises no_baseline if it does not apply.

    The schedules are the plain loops (TVM's own pipeline for CPUs), DLight's CPU rule for rows, and DLight's GPU
    fallback adapted to vectors and cores. DLight's CPU rule for matrix-vector products is left out: it unrolls so far
    that LLVM takes over a minute and the kernel is slower.
    """
    return (
        lambda: Schedule("as stated", function),
        lambda: _rows(function, target),
        lambda: Schedule("parallel, vectorized", _parallel_vectorized(function, target)),
    )


def _rows(function: Any, target: Any) -> Schedule:
    schedule = dlight.cpu.Reduction().apply(function, target, _=False)
    if schedule is None:
        raise no_baseline("DLight's Reduction does not apply")
    return Schedule("DLight's Reduction", schedule.mod)


def _parallel_vectorized(function: Any, target: Any) -> Any:
    """Inline maps; vectorise the last spatial axis of each block and parallelise the others.

    If no vector size divides the last axis, the inner loops are left to LLVM.
    """
    schedule = s_tir.Schedule(function)
    blocks = dlight.normalize_prim_func(schedule)
    if blocks is None:
        raise no_baseline("DLight does not normalise the blocks")
    max_vector_size = max(1, llvm_get_vector_width(target) // _FLOAT_BITS)
    for block in dlight.try_inline(schedule, blocks):
        _schedule_block(schedule, block, max_vector_size)
    return schedule.mod


def _schedule_block(schedule: Any, block: Any, max_vector_size: int) -> None:
    kinds, loops = block.dom_kind(), list(schedule.get_loops(block.block_rv))
    if len(kinds) != len(loops) or set(kinds) - {"S", "R"} or "S" not in kinds:
        return
    spatial = [loop for kind, loop in zip(kinds, loops, strict=True) if kind == "S"]
    reduced = [loop for kind, loop in zip(kinds, loops, strict=True) if kind == "R"]
    last = int(schedule.get(spatial[-1]).extent)
    width = next(w for w in (max_vector_size, max_vector_size // 2, max_vector_size // 4, 1) if w and last % w == 0)
    if width == 1:
        schedule.reorder(*spatial, *reduced)
        schedule.parallel(schedule.fuse(*spatial[:-1]) if len(spatial) > 1 else spatial[0])
        return
    spatial[-1], column, vector = schedule.split(spatial[-1], [None, _divisor(last // width, _COLUMNS), width])
    tile = [column]
    if reduced and len(spatial) > 1:
        rows = _divisor(int(schedule.get(spatial[-2]).extent), _ROWS)
        spatial[-2], row = schedule.split(spatial[-2], [None, rows])
        tile = [row, column]
    schedule.reorder(*spatial, *reduced, *tile, vector)
    whole = schedule.fuse(*spatial)
    schedule.parallel(whole)
    _in_registers(schedule, tile, vector)
    if reduced:
        _keep_sums(schedule, block.block_rv, whole, reduced[0])


def _in_registers(schedule: Any, tile: list[Any], vector: Any) -> None:
    for loop in tile:
        schedule.unroll(loop)
    schedule.vectorize(vector)


def _keep_sums(schedule: Any, block: Any, whole: Any, first: Any) -> None:
    """Keep the accumulators of a tile in registers."""
    stored = schedule.cache_write(block, 0, "local")
    schedule.reverse_compute_at(stored, whole)
    *inner, last = schedule.get_loops(stored)[1:]
    _in_registers(schedule, inner, last)
    schedule.decompose_reduction(block, first)


def _divisor(extent: int, vector_size: int) -> int:
    return next(n for n in range(vector_size, 0, -1) if extent % n == 0)


Arrays = Mapping[str, NDArray[Any]]


def versions() -> dict[str, str]:
    return {"tvm": str(tvm.__version__), "tvm_llvm": str(llvm_version_major())}


@dataclass(frozen=True, slots=True)
class TvmFinder:
    """Find the TVM baseline of a program."""

    threads: int

    def __call__(self, program: TensorProgram, arrays: Arrays, expected: Mapping[str, Value]) -> Baseline:
        """Return the fastest schedule that agrees with the reference. Raises BuildError (no-peer)."""
        function, target = function_of(program), host_target(self.threads)
        built = _Built(program, target, arrays)
        found: list[Baseline] = []
        reasons: dict[str, None] = {}
        for schedule in schedules(function, target):
            try:
                found.append(built.baseline(schedule, expected))
            except EXPECTED_ERRORS as error:
                reasons[error_summary(error)] = None
        if not found:
            raise no_baseline("; ".join(reasons))
        return fastest(found)


class _Built:
    """TVM arrays of a program, and schedules compiled to run on them."""

    def __init__(self, program: TensorProgram, target: Any, arrays: Arrays) -> None:
        self._program = program
        self._target = target
        self._inputs = [tvm.runtime.tensor(arrays[name]) for name, _ in program.inputs]
        types = [program.types[out.tensor] for out in program.outputs]
        self._outputs = [tvm.runtime.empty(kind.shape, type_name(kind.dtype)) for kind in types]

    def baseline(self, make: Callable[[], Schedule], expected: Mapping[str, Value]) -> Baseline:
        """Compile a schedule and check it. Raises one of EXPECTED_ERRORS if that fails."""
        schedule = make()
        executable = tvm.compile(schedule.module, self._target)
        run = partial(executable["main"], *self._inputs, *self._outputs)
        run()
        names = [out.name for out in self._program.outputs]
        results = {name: tensor.numpy() for name, tensor in zip(names, self._outputs, strict=True)}
        check([schedule.name], self._program, results, expected)
        return Baseline(run, (schedule.name,), executable)
