"""Expressions → source in a C-like dialect."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field, replace

from roller_svc.analysis.constant_folding import holds
from roller_svc.analysis.index_ranges import COMPARED, Range, fold, may_exceed_int32, range_of, split_sum
from roller_svc.analysis.operand import can_represent_all
from roller_svc.codegen.buffer_ref import BufferRef
from roller_svc.codegen.dialect import (
    APPROXIMATE_FUNCTIONS,
    EXACT_INTEGERS,
    HALVES,
    HELPER_FUNCTIONS,
    INTEGER_HELPER_FUNCTIONS,
    LIBRARY,
    NEEDS_LIBRARY,
    SHORT,
    Dialect,
    exceeds_type,
    literal,
)
from roller_svc.codegen.helpers import CVT_BITS, Helper, helper
from roller_svc.codegen.names import Names
from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import (
    COMPARISONS,
    AxisRef,
    Cast,
    Const,
    Expr,
    Load,
    Op,
    OpKind,
    Select,
    axes_of,
    iter_subexpressions,
    loads_of,
)
from roller_svc.ir.index import div, mod, mul, num
from roller_svc.ir.kernel import Language, RuntimeCheck
from roller_svc.ir.origin import shown

MAX_CONSTANT_DIVISOR = 2.0**100  # whose reciprocal is a normal float32


@dataclass(slots=True)
class Scalar:
    """Prints expressions. Collects variables in scope, used helpers and library functions, and checks."""

    dialect: Dialect
    names: Names
    index_type: str
    guard_reads: bool  # out of range: True reads 0 (GPU), False records it in the status and raises (CPU)
    buffers: dict[str, BufferRef] = field(default_factory=dict)
    values: dict[str, int] = field(default_factory=dict)  # loop variables with a known value
    ranges: dict[str, Range] = field(default_factory=dict)
    helpers: dict[str, None] = field(default_factory=dict)
    library: dict[str, None] = field(default_factory=dict)
    checks: list[RuntimeCheck] = field(default_factory=list)

    # indices --------------------------------------------------------------------------------------------------------
    def index(self, expr: Expr) -> str:
        """Print an index. Arithmetic of axes is exact, in the index type; values from data wrap as their type does."""
        expr = fold(expr, self.values)
        match expr:
            case Const(value=value):
                return shown(value)
            case AxisRef(name=name):
                return self.names.of(name)
            case Op() if self.comes_from_data(expr):
                return f"({self.index_type})({self.value(expr)})"
            case Op(kind=OpKind.ADD | OpKind.SUB | OpKind.MUL, args=(x, y)):
                return f"({self.index(x)} {expr.kind.value} {self.index(y)})"
            case Op(kind=OpKind.FLOORDIV | OpKind.MOD, args=(x, Const(value=by))) if by > 0 and self._is_non_negative(x):
                return f"({self.index(x)} {'/' if expr.kind is OpKind.FLOORDIV else '%'} {shown(by)})"
            case Op(kind=OpKind.FLOORDIV | OpKind.MOD | OpKind.MIN | OpKind.MAX, args=(x, y)):
                return f"{self._index_helper(expr.kind)}({self.index(x)}, {self.index(y)})"
            case Cast(arg=arg) if self._is_lossless(expr):
                return self.index(arg)
            case Select(cond=cond, then=then, otherwise=otherwise):
                return f"({self.value(cond)} ? {self.index(then)} : {self.index(otherwise)})"
            case _:
                return f"({self.index_type})({self.value(expr)})"

    @staticmethod
    def comes_from_data(expr: Expr) -> bool:
        """Return whether it reads a tensor. Tables made by schedules (`n.of`) do not count."""
        return not all(load.tensor.endswith(".of") for load in loads_of(expr))

    def _is_lossless(self, cast: Cast) -> bool:
        """Return whether the cast does not change the exact value of its operand."""
        source, target = cast.arg.dtype, cast.dtype
        if source.is_float or target is DType.BOOL:
            return False
        if cast.implicit or isinstance(cast.arg, Load):
            low, high = target.integer_range
            return low <= source.integer_range[0] and source.integer_range[1] <= high
        return range_of(cast, self.ranges) is not None

    def _is_non_negative(self, expr: Expr) -> bool:
        known = range_of(expr, self.ranges)
        return known is not None and known[0] >= 0

    def _index_helper(self, kind: OpKind) -> str:
        names = {OpKind.FLOORDIV: "floordiv", OpKind.MOD: "mod", OpKind.MIN: "min", OpKind.MAX: "max"}
        return self.helper(f"{names[kind]}_{'i32' if self.index_type == 'int' else 'i64'}")

    def address(self, buffer: BufferRef, index: tuple[Expr, ...]) -> str:
        """Print the offset of an element, in elements."""
        if buffer.swizzled and (near := self._swizzle_base(buffer, index)) is not None:
            return near
        terms = []
        for d, (i, stride) in enumerate(zip(index, buffer.strides, strict=True)):
            text = self.index(i)
            if buffer.swizzled and d == len(index) - 1:
                text = self._swizzled(buffer, index[-2], text)
            if text != "0":
                terms.append(text if stride == 1 else f"{text} * {shown(stride)}")
        return " + ".join(terms) or "0"

    def _swizzle_base(self, buffer: BufferRef, index: tuple[Expr, ...]) -> str | None:
        """Print the offset in a row longer than the swizzle period from a base that several columns share, or None.

        Whole pairs of chunks are added to the base, so that unrolled copies share one register.
        """
        _, masks, chunk = buffer.swizzle
        period = masks * chunk
        coarse, fine = split_sum(fold(index[-1], self.values), 2 * chunk)
        interval = range_of(fine, self.ranges)
        if buffer.pad or buffer.shape[-1] <= period or coarse is None:
            return None
        if interval is None or interval[0] < 0 or interval[1] >= 2 * chunk:
            return None
        base, column = self.address(buffer, (*index[:-1], fine)), self.index(coarse)
        if masks <= 2:
            return f"{base} + {column}"
        return f"(({base}) ^ ({column} & {period - 1})) + ({column} & {-period})"

    def _swizzled(self, buffer: BufferRef, row: Expr, column: str) -> str:
        rows, masks, chunk = buffer.swizzle
        if masks == 1:
            return column
        mask = mul(mod(div(row, rows), masks), num(chunk))
        return f"({column} ^ {self.index(mask)})"

    # values ---------------------------------------------------------------------------------------------------------
    def value(self, expr: Expr) -> str:
        """Print an expression in the value type of its dtype."""
        match expr:
            case Const(value=value, dtype=dtype):
                return literal(value, dtype, self.dialect)
            case AxisRef(name=name):
                if name in self.values:
                    return shown(self.values[name])
                whole = self.index_type == "int" or self.exceeds_int32(expr)
                return self.names.of(name) if whole else f"(int){self.names.of(name)}"
            case Load():
                return self.load(expr)
            case Cast(arg=arg, dtype=dtype, implicit=implicit):
                return self._cast(arg, dtype, implicit=implicit)
            case Select(cond=cond, then=then, otherwise=otherwise, dtype=dtype):
                return f"({self.value(cond)} ? {self.value(then)} : {self.value(otherwise)})"
            case Op():
                return self._op(expr)

    def exceeds_int32(self, axis: AxisRef) -> bool:
        known = self.ranges.get(axis.name)
        return known is not None and known[1] > DType.INT32.integer_range[1]

    def may_exceed_int32(self, side: Expr) -> bool:
        """Return whether a compared index may exceed 32 bits: it is computed exactly then."""
        leaves = side.dtype is DType.INT32 and may_exceed_int32(side, self.ranges, COMPARED)
        if leaves and self.index_type == "int":
            raise InvariantError("a compared index exceeds 32 bits, but the index type has 32 bits")
        return leaves

    def load(self, load: Load) -> str:
        buffer = self.buffers[load.tensor]
        if not buffer.shape:
            return self.to_value(buffer.identifier if self._is_scalar(load.tensor) else f"{buffer.identifier}[0]", buffer)
        if buffer.in_words and buffer.dtype is DType.BFLOAT16 and self.dialect.language is Language.CUDA:
            # the upper half of a word takes one instruction, the lower half another
            return f"{self.helper('bf16_of_word')}({buffer.identifier}, {self.address(buffer, load.index)})"
        checked = [d for d, wanted in enumerate(load.bounds_checked) if wanted]
        if not checked:
            return self.to_value(f"{buffer.identifier}[{self.address(buffer, load.index)}]", buffer)
        if not self.guard_reads:
            return self.to_value(f"{buffer.identifier}[{self.checked_address(load, buffer)}]", buffer)
        if any(any(inner.bounds_checked) for d in checked for inner in loads_of(load.index[d])):
            return self.to_value(self._gather(load, buffer, checked), buffer)
        guards = [self.in_range(load.tensor, d, buffer.shape[d], load.index[d]) for d in checked]
        read = self.to_value(f"{buffer.identifier}[{self.address(buffer, load.index)}]", buffer)
        return f"({' && '.join(guards)} ? {read} : {literal(0, load.dtype, self.dialect)})"

    def checked_address(self, load: Load, buffer: BufferRef) -> str:
        """Print the offset of an element with checked indices; an index out of range is recorded."""
        terms = []
        for d, (i, stride) in enumerate(zip(load.index, buffer.strides, strict=True)):
            text = self.checked_index(load.tensor, d, i) if load.bounds_checked[d] else self.index(i)
            terms.append(text if stride == 1 else f"{text} * {shown(stride)}")
        return " + ".join(terms)

    def _gather(self, load: Load, buffer: BufferRef, checked: list[int]) -> str:
        """Print a gather with each index printed once, so that chains of gathers do not double."""
        unchecked = tuple(Const(0, DType.INT32) if d in checked else i for d, i in enumerate(load.index))
        args = [f"{buffer.identifier} + {self.address(buffer, unchecked)}"]
        for d in checked:
            text = self._wide(load.index[d])
            number = self.add_check(load.tensor, d, buffer.shape[d], text)
            args += [text, shown(buffer.shape[d]), shown(buffer.strides[d]), str(number)]
        return f"{self.helper(f'gather{len(checked)}_{SHORT[buffer.dtype]}')}({', '.join(args)})"

    def checked_index(self, tensor: str, d: int, index: Expr) -> str:
        """Print an index in range; an index out of range is recorded and replaced by 0."""
        text, size = self.index(index), self.buffers[tensor].shape[d]
        return f"checked({text}, {shown(size)}, {self.add_check(tensor, d, size, text)}, status)"

    def _is_scalar(self, tensor: str) -> bool:
        """Return whether it is a storage node. Without dimensions that is a variable; a buffer is a pointer."""
        return "." in tensor

    def in_range(self, tensor: str, d: int, size: int, index: Expr) -> str:
        """Print the test that an index from data is in range, in 64 bits, where it is exact."""
        text = self._wide(index)
        return f"{self.helper('in_range')}({text}, {shown(size)}, {self.add_check(tensor, d, size, text)})"

    def add_index_check(self, tensor: str, d: int, size: int, index: Expr) -> int:
        """Add the run-time check of an index and return its number."""
        return self.add_check(tensor, d, size, self.index(index))

    def _wide(self, index: Expr) -> str:
        return replace(self, index_type=self.dialect.wide_index).index(index)

    def add_check(self, tensor: str, d: int, size: int, text: str) -> int:
        whole = tensor.partition(".")[0]  # a storage node that stands for the tensor
        self.checks.append(RuntimeCheck(whole, d, size, text))
        return len(self.checks) - 1

    def to_value(self, text: str, buffer: BufferRef) -> str:
        """Convert an element in memory to a value."""
        match buffer.dtype:
            case DType.FLOAT16 if self.dialect.half == "_Float16":
                return f"(float){text}"
            case dtype if dtype.is_narrow_float:
                return f"{self.helper(f'{SHORT[dtype]}_to_f32')}({text})"
            case _:
                return text

    def to_element(self, value: Expr, dtype: DType) -> str:
        """Print an expression as an element in memory of a type."""
        if dtype.is_narrow_float:
            value = self.skip_casts(value, dtype)
            if (copied := self._copied_bits(value, dtype)) is not None:
                return copied
            text = self.value(value)
            if self.needs_odd(value, dtype):
                text = self._round_to_odd(value, text)
            if dtype is DType.FLOAT16 and self.dialect.half == "_Float16":
                return f"(_Float16)({text})"
            return f"{self.helper(f'f32_to_{SHORT[dtype]}')}({text})"
        if value.dtype.compute is dtype.compute:
            return self.value(value)
        return self._cast(value, dtype, implicit=True)

    def skip_casts(self, value: Expr, dtype: DType) -> Expr:
        """Return the value that is rounded to a narrow type: rounding twice to one type is rounding once."""
        while (
            isinstance(value, Cast)
            and value.dtype is dtype
            and (value.arg.dtype.compute is dtype.compute or self.needs_odd(value.arg, dtype))
        ):
            value = value.arg
        return value

    def needs_odd(self, value: Expr, dtype: DType) -> bool:
        """Return whether rounding a value to float32, and then to a narrow type, may differ from rounding it once.

        Integers that float32 does not represent are beyond the greatest number of float16 and float8.
        """
        if value.dtype.is_float:
            return value.dtype is DType.FLOAT64
        is_exact = can_represent_all(DType.FLOAT32, value.dtype) or self.is_exact(value, DType.FLOAT32)
        return not is_exact and holds(EXACT_INTEGERS[DType.FLOAT32], dtype)

    def _round_to_odd(self, value: Expr, text: str) -> str:
        """Print a value as the float32 whose rounding to any narrow type is that of the value."""
        source = DType.INT64 if not value.dtype.is_float and self._is_wide(value) else value.dtype
        return f"{self.helper(f'odd_{SHORT[source]}')}({text})"

    def _copied_bits(self, value: Expr, dtype: DType) -> str | None:
        """Print the element's bits in memory if the value is only loaded and has that type, else return None."""
        match value:
            case Load(tensor=tensor, index=index, bounds_checked=checked) if not any(checked):
                buffer = self.buffers[tensor]
                if buffer.dtype is not dtype:
                    return None
                is_variable = not buffer.shape and self._is_scalar(tensor)
                return buffer.identifier if is_variable else f"{buffer.identifier}[{self.address(buffer, index)}]"
            case Select(cond=cond, then=then, otherwise=otherwise):
                a, b = self._copied_bits(then, dtype), self._copied_bits(otherwise, dtype)
                return None if a is None or b is None else f"({self.value(cond)} ? {a} : {b})"
            case Const(value=0.0) if math.copysign(1, value.value) > 0:
                return "0"
            case _:
                return None

    def _cast(self, arg: Expr, dtype: DType, *, implicit: bool) -> str:
        source, type_ = arg.dtype.compute, self.dialect.value_type(dtype)
        if isinstance(arg, Const) and arg.dtype is dtype and not dtype.is_narrow_float:
            return self.value(arg)
        text = self.value(arg)
        if dtype.is_float:
            wide = text if source is dtype.compute else f"({type_})({text})"
            if implicit or not dtype.is_narrow_float or self.is_rounded_to(dtype, arg):
                return wide
            if self.needs_odd(arg, dtype):
                wide = self._round_to_odd(arg, text)
            if dtype is DType.FLOAT16 and self.dialect.half == "_Float16":
                return f"(float)(_Float16)({wide})"
            back, to = self.helper(f"{SHORT[dtype]}_to_f32"), self.helper(f"f32_to_{SHORT[dtype]}")
            return f"{back}({to}({wide}))"
        if dtype is DType.BOOL:
            return text if arg.dtype is DType.BOOL else f"(({text}) != 0)"
        if source.is_float:
            return f"{self._truncate(source, dtype)}({text})"
        return text if source is dtype and not self._is_wide(arg) else f"({type_})({text})"

    def _truncate(self, source: DType, dtype: DType) -> str:
        """Return the helper that converts a float to an integer."""
        is_one_instruction = source is DType.FLOAT32 and dtype.bits <= CVT_BITS
        base = "f32_to" if is_one_instruction and self.dialect.language is Language.CUDA else "to"
        return self.helper(f"{base}_{SHORT[dtype]}")

    def is_rounded_to(self, dtype: DType, value: Expr) -> bool:
        """Return whether a narrow type has the value: an element in memory, the result of a cast, or an integer."""
        match value:
            case Load(tensor=tensor, dtype=source):
                return self.buffers[tensor].dtype is source and can_represent_all(dtype, source)
            case Cast(dtype=source, implicit=False):
                return can_represent_all(dtype, source)
            case _:
                return self.is_exact(value, dtype)

    def _is_wide(self, expr: Expr) -> bool:
        """Return whether the expression has an index variable of 64 bits."""
        return any(isinstance(part, AxisRef) and self.exceeds_int32(part) for part in iter_subexpressions(expr))

    def is_exact(self, arg: Expr, dtype: DType) -> bool:
        """Return whether the type can represent every integer that the operand may be."""
        known = None if arg.dtype.is_float else range_of(arg, self.ranges)
        return known is not None and max(-known[0], known[1]) <= EXACT_INTEGERS[dtype]

    # operators ------------------------------------------------------------------------------------------------------
    def _op(self, op: Op) -> str:
        kind, dtype = op.kind, op.dtype
        if kind in COMPARISONS:
            side = self.index if any(exceeds_type(arg) or self.may_exceed_int32(arg) for arg in op.args) else self.value
            return f"({side(op.args[0])} {kind.value} {side(op.args[1])})"
        if kind in (OpKind.LAND, OpKind.LOR):
            sign = "&&" if kind is OpKind.LAND else "||"
            return f"({self.value(op.args[0])} {sign} {self.value(op.args[1])})"
        if kind is OpKind.LNOT:
            return f"(!{self.value(op.args[0])})"
        operand = op.args[0].dtype.compute
        if kind is OpKind.ISNAN:
            return f"{self.typed_helper('isnan', operand)}({self.value(op.args[0])})" if operand.is_float else "0"
        if kind in (OpKind.FLOOR, OpKind.CEIL):
            rounded = self.library_function("floor" if kind is OpKind.FLOOR else "ceil", operand)
            return f"{self._truncate(operand, DType.INT32)}({rounded}({self.value(op.args[0])}))"
        if kind is OpKind.ISINF and not operand.is_float:
            return "0"
        if dtype.is_float or operand.is_float:
            return self._float_op(op, operand)
        text = self._integer_op(op)
        return f"({text} != 0)" if dtype is DType.BOOL else text

    def _float_op(self, op: Op, operand: DType) -> str:
        args = [self.value(a) for a in op.args]
        match op.kind:
            case OpKind.MUL if not loads_of(op) and axes_of(op):
                return f"{self.typed_helper('mul_rn', operand)}({args[0]}, {args[1]})"
            case OpKind.DIV if (divisor := self._constant_divisor(op, operand)) is not None:
                inverse = literal(1.0 / divisor, operand, self.dialect)
                return f"{self.typed_helper('div_const', operand)}({args[0]}, {args[1]}, {inverse})"
            case OpKind.ADD | OpKind.SUB | OpKind.MUL | OpKind.DIV:
                return f"({args[0]} {op.kind.value} {args[1]})"
            case OpKind.NEG:
                return f"(-{args[0]})"
            case OpKind.RSQRT if operand is DType.FLOAT32 and self.dialect.language is Language.CUDA:
                return f"{self.library_function('rsqrt', operand)}({args[0]})"  # within 2 ulp, as a division
            case OpKind.RSQRT:
                return f"({literal(1.0, operand, self.dialect)} / {self.library_function('sqrt', operand)}({args[0]}))"
            case OpKind.RECIPROCAL:
                return f"({literal(1.0, operand, self.dialect)} / {args[0]})"
            case OpKind.CLIP:
                return self._clip(args, operand)
            case kind if kind in APPROXIMATE_FUNCTIONS and self.dialect.language is Language.CUDA and op.dtype in HALVES:
                return f"{self.typed_helper(APPROXIMATE_FUNCTIONS[kind], operand)}({', '.join(args)})"
            case kind if kind in HELPER_FUNCTIONS:
                return f"{self.typed_helper(HELPER_FUNCTIONS[kind], operand)}({', '.join(args)})"
            case kind if kind in LIBRARY:
                return f"{self.library_function(LIBRARY[kind], operand)}({', '.join(args)})"
            case _:
                raise InvariantError(f"the {self.dialect.language.value} dialect has no float operation {op.kind.value}")

    def _constant_divisor(self, op: Op, operand: DType) -> float | None:
        """Return the constant of at least 1, not a power of two, by which CUDA code divides a float32."""
        divisor = op.args[1]
        if self.dialect.language is not Language.CUDA or operand is not DType.FLOAT32 or not isinstance(divisor, Const):
            return None
        if not 1.0 <= abs(divisor.value) <= MAX_CONSTANT_DIVISOR:
            return None
        rounded: float = struct.unpack("f", struct.pack("f", divisor.value))[0]
        return None if abs(math.frexp(rounded)[0]) == 0.5 else rounded

    def _integer_op(self, op: Op) -> str:
        args, type_ = [self.value(a) for a in op.args], self.dialect.value_type(op.dtype)
        match op.kind:
            case OpKind.ADD | OpKind.SUB | OpKind.MUL:
                return self._wrapping(op, args)
            case OpKind.NEG:
                minus = "-" if self.dialect.wraps else f"0u - ({self._unsigned(op.dtype)})"
                return f"(-{args[0]})" if op.dtype is DType.BOOL else f"({type_})({minus}{args[0]})"
            case OpKind.BITAND | OpKind.BITOR | OpKind.BITXOR:
                sign = {OpKind.BITAND: "&", OpKind.BITOR: "|", OpKind.BITXOR: "^"}[op.kind]
                return f"({type_})({args[0]} {sign} {args[1]})"
            case OpKind.BITNOT:
                return f"(~{args[0]})" if op.dtype is DType.BOOL else f"({type_})(~{args[0]})"
            case OpKind.FMA:
                product = Op(OpKind.MUL, op.args[:2], op.dtype)
                return self._wrapping(Op(OpKind.ADD, (product, op.args[2]), op.dtype), [self.value(product), args[2]])
            case OpKind.CLIP:
                return self._clip(args, op.dtype)
            case kind if kind in INTEGER_HELPER_FUNCTIONS:
                return f"{self.typed_helper(INTEGER_HELPER_FUNCTIONS[kind], op.dtype)}({', '.join(args)})"
            case kind if kind in HELPER_FUNCTIONS:
                return f"{self.typed_helper(HELPER_FUNCTIONS[kind], op.dtype)}({', '.join(args)})"
            case _:
                raise InvariantError(f"the {self.dialect.language.value} dialect has no integer operation {op.kind.value}")

    def _clip(self, args: list[str], dtype: DType) -> str:
        value, low, high = args
        return f"{self.typed_helper('min', dtype)}({self.typed_helper('max', dtype)}({value}, {low}), {high})"

    def _wrapping(self, op: Op, args: list[str]) -> str:
        type_ = self.dialect.value_type(op.dtype)
        if op.dtype is DType.BOOL:
            return f"({args[0]} {op.kind.value} {args[1]})"
        known = range_of(op, self.ranges)
        least, greatest = op.dtype.integer_range
        fits = known is not None and least <= known[0] and known[1] <= greatest
        fits = fits or self._is_wide(op)
        if op.dtype.bits >= 32 and (fits or self.dialect.wraps or not op.dtype.is_signed):
            return f"({args[0]} {op.kind.value} {args[1]})"
        unsigned = self._unsigned(op.dtype)
        return f"({type_})(({unsigned}){args[0]} {op.kind.value} ({unsigned}){args[1]})"

    @staticmethod
    def _unsigned(dtype: DType) -> str:
        return "unsigned long long" if dtype.bits == 64 else "unsigned int"

    # helpers --------------------------------------------------------------------------------------------------------
    def typed_helper(self, base: str, dtype: DType) -> str:
        for function in NEEDS_LIBRARY.get(base, ()):
            self.library_function(function, dtype)
        return self.helper(f"{base}_{SHORT[dtype if dtype is not DType.BOOL else DType.UINT8]}")

    def library_function(self, function: str, dtype: DType) -> str:
        name = function if dtype is DType.FLOAT64 else f"{function}f"
        self.library[name] = None
        return name

    def helper(self, name: str) -> str:
        """Return the name of a helper, and emit it with the helpers it needs."""
        for needed in self.find_helper(name).needs:
            self.helper(needed)
        self.helpers[name] = None
        return name

    def find_helper(self, name: str) -> Helper:
        return helper(name, self.dialect)
