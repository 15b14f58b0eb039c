"""Bodies of vector loops → statements on vectors, where every part of them has a vector form."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.codegen.dialect import SHORT, C
from roller_svc.codegen.ranges import fold
from roller_svc.codegen.scalar import Scalar
from roller_svc.ir.affine import affine
from roller_svc.ir.build import num
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, Op, OpKind, axes_of, substitute

VECTOR_TYPES = (DType.FLOAT32, DType.FLOAT64, DType.INT32)
_ARITHMETIC = {OpKind.ADD: "+", OpKind.SUB: "-", OpKind.MUL: "*", OpKind.DIV: "/"}


class NotVectorError(Exception):
    """This expression has no vector form here: the loop is printed as a loop."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of a value; `wide`: a vector, else one value for all lanes."""

    text: str
    wide: bool


@dataclass(slots=True)
class Vector:
    """Prints expressions of `lanes` neighbouring iterations of the loop over `var`, from `first` on."""

    scalar: Scalar
    var: str
    lanes: int
    dtype: DType
    first: int
    registers: dict[str, int]  # storage nodes that are vector variables → lanes of each

    @property
    def type_name(self) -> str:
        return vector_type(self.dtype, self.lanes)

    def at_first(self, expr: Expr) -> Expr:
        return fold(substitute(expr, {self.var: num(self.first)}), self.scalar.values)

    def splat(self, piece: Piece) -> str:
        if piece.wide:
            return piece.text
        return f"({piece.text} - ({self.type_name}){{0}})"  # x - 0 keeps the sign of a zero, x + 0 does not

    def piece(self, expr: Expr) -> Piece:
        if not self._moves(expr):
            return Piece(self.scalar.value(expr), wide=False)
        if expr.dtype.compute is not self.dtype:
            raise NotVectorError
        match expr:
            case Load():
                return Piece(self._load(expr), wide=True)
            case Cast(arg=arg) if arg.dtype is self.dtype:
                return self.piece(arg)
            case Op(kind=kind, args=(x, y)) if kind in _ARITHMETIC and (kind is not OpKind.DIV or self.dtype.is_float):
                a, b = self.piece(x), self.piece(y)
                return Piece(f"({a.text} {_ARITHMETIC[kind]} {b.text})", wide=True)
            case Op(kind=OpKind.MAX | OpKind.MIN as kind, args=(x, y)):
                name = f"{'max' if kind is OpKind.MAX else 'min'}_{self.type_name}"
                a, b = self.piece(x), self.piece(y)
                return Piece(f"{self._helper(name)}({self.splat(a)}, {self.splat(b)})", wide=True)
            case Op(kind=OpKind.NEG, args=(x,)):
                return Piece(f"(-{self.piece(x).text})", wide=True)
            case Op(kind=OpKind.RELU, args=(x,)):
                maximum, zero = self._helper(f"max_{self.type_name}"), self.splat(Piece("0", wide=False))
                return Piece(f"{maximum}({self.piece(x).text}, {zero})", wide=True)
            case _:
                raise NotVectorError

    def _moves(self, expr: Expr) -> bool:
        return self.var in axes_of(expr)

    def _helper(self, name: str) -> str:
        self.scalar.helpers[name] = None
        return name

    def _load(self, load: Load) -> str:
        if any(load.checked):
            raise NotVectorError
        return self.element(load.tensor, load.index)

    def element(self, tensor: str, index: tuple[Expr, ...]) -> str:
        """The vector in memory, or the vector variable, that these neighbours are."""
        place = self.scalar.places[tensor]
        if place.dtype is not self.dtype or not index:
            raise NotVectorError
        for i in index[:-1]:
            if self.var in axes_of(i):
                raise NotVectorError
        last = affine(index[-1])
        if last is None or last.coeff(self.var) != 1:
            raise NotVectorError
        here = tuple(self.at_first(i) for i in index)
        if tensor in self.registers:
            return self._register(tensor, here)
        return f"*({self.type_name} *)({place.identifier} + {self.scalar.address(place, here)})"

    def _register(self, tensor: str, index: tuple[Expr, ...]) -> str:
        known = [i.value for i in index if isinstance(i, Const)]
        if len(known) != len(index) or int(known[-1]) % self.lanes:
            raise NotVectorError
        return register_name(self.scalar.places[tensor].identifier, [int(k) for k in known], self.lanes)


def register_name(identifier: str, index: list[int], lanes: int) -> str:
    """acc, (2, 32), 16 → acc_2_2: the variable that holds elements 32 to 47 of row 2."""
    return "_".join([identifier, *(str(i) for i in index[:-1]), str(index[-1] // lanes)])


def vector_type(dtype: DType, lanes: int) -> str:
    return f"v{SHORT[dtype]}x{lanes}"


def vector_header(dtype: DType, lanes: int, c_type: str) -> str:
    """Unaligned vector type: dense tensors give no more than element alignment."""
    name = vector_type(dtype, lanes)
    attributes = f"vector_size({dtype.bytes * lanes}), aligned({dtype.bytes}), may_alias"
    return f"typedef {c_type} {name} __attribute__(({attributes}));"


def vector_helper(name: str, dtype: DType, lanes: int) -> str:
    """max and min of vectors, NaN on either side staying."""
    which, type_ = name.split("_", 1)[0], vector_type(dtype, lanes)
    mask = vector_type(DType.INT32 if dtype.bits == 32 else DType.INT64, lanes)
    sign = ">" if which == "max" else "<"
    nan = " | (a != a)" if dtype.is_float else ""
    return (
        f"static inline {type_} {name}({type_} a, {type_} b) {{\n"
        f"  {mask} first = ({mask})((a {sign} b){nan});\n"
        f"  return ({type_})((first & ({mask})a) | (~first & ({mask})b));\n}}"
    )




def block_transpose(name: str, dtype: DType, lanes: int) -> str:
    """A block of lanes x lanes elements turned in registers: off-diagonal quarters change places, then quarters of
    those, ... (J. O. Eklundh, A fast computer method for matrix transposing, IEEE Trans. Comput. C-21, 1972)."""
    vector = vector_type(dtype, lanes)
    mask = vector_type(DType.INT32 if dtype.bits == 32 else DType.INT64, lanes)
    element = C.value_type(dtype)
    rows = range(lanes)
    lines = [f"  const {vector} r0_{i} = *(const {vector} *)(from + {i} * from_stride);" for i in rows]
    step, half = 0, lanes // 2
    while half:
        low = ", ".join(str(j - half + lanes if j & half else j) for j in rows)
        high = ", ".join(str(j + lanes if j & half else j + half) for j in rows)
        for i in rows:
            if not i & half:
                pair = f"r{step}_{i}, r{step}_{i + half}"
                for to, order in ((i, low), (i + half, high)):
                    lines.append(f"  const {vector} r{step + 1}_{to} = __builtin_shuffle({pair}, ({mask}){{{order}}});")
        step, half = step + 1, half // 2
    lines += [f"  *({vector} *)(to + {i} * to_stride) = r{step}_{i};" for i in rows]
    head = f"static inline void {name}({element} *to, long to_stride, const {element} *from, long from_stride) {{"
    return "\n".join([head, *lines, "}"])
