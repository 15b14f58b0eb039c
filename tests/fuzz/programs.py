"""Random programs of several statements, drawn like those of the corpora.

`draw(seed, ...)` is the same in every process. Each pattern appends statements, and reads inputs or earlier results.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

EXTENTS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 100, 128)
FLOATS = ("float32", "float32", "float32", "float16", "bfloat16", "float64")
GPU_FLOATS = ("float32", "float32", "float16", "float16", "bfloat16")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "int32", "uint32", "int64", "uint64")
UNARY = (
    "exp({} * 0.25)", "tanh({})", "sigmoid({})", "abs({})", "-{}", "relu({})", "square({})", "sqrt(abs({}) + 0.5)",
    "rsqrt(abs({}) + 0.5)", "log(abs({}) + 1.0)", "gelu({})", "silu({})", "erf({})", "sin({})", "cos({})",
    "softplus({})", "rfloor({} * 3.0)", "round({} * 3.0)", "clip({}, -0.5, 0.75)", "sign({})", "exp2({})", "expm1({})",
    "atan({})", "reciprocal(abs({}) + 1.0)", "({} * 4.0).cast(`int8`).cast(`float32`)", "{}.cast(`float16`)",
    "({} * 90.0).cast(`uint8`).cast(`float32`)", "{}.cast(`float8_e4m3fn`).cast(`float32`)", "{}.cast(`bfloat16`)",
    "{}.cast(`float8_e5m2`).cast(`float32`)", "({} * 3e4).cast(`int16`) % 97 * 0.5", "isnan({}).cast(`float32`)",
    "{}.call(`max`, [0.0])", "trunc({} * 5.0)",
)  # fmt: skip
BINARY = ("{} + {}", "{} - {}", "{} * {}", "max({}, {})", "min({}, {})", "{} / (abs({}) + 1.0)", "fmax({}, {})",
          "hypot({}, {})", "atan2({}, {} + 2.5)", "fma({}, {}, 0.5)")  # fmt: skip
INTEGER_UNARY = ("abs({})", "-{}", "bitwise_not({})", "{} + 3", "{} * 5", "{} // 3", "{} % 7", "{} << 2", "{} >> 1",
                 "min({}, 100)", "max({}, -5)", "square({})", "sign({})", "bitwise_and({}, 15)", "trunc_div({}, 3)",
                 "{} // -2", "({} & 1)", "clip({}, 0, 9)", "relu({})")  # fmt: skip
INTEGER_BINARY = ("{} + {}", "{} - {}", "{} * {}", "max({}, {})", "min({}, {})", "{} // {}", "{} % {}",
                  "bitwise_and({}, {})", "bitwise_or({}, {})", "bitwise_xor({}, {})", "trunc_div({}, {})",
                  "{} << bitwise_and({}, 7)", "{} >> bitwise_and({}, 7)", "fmod({}, {})",
                  "{} // ({} % 3 + 5)")  # fmt: skip
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
LARGE_EXTENTS = (*EXTENTS, 192, 256, 384, 500, 512, 640, 768, 1000, 1024, 1280, 4096)
SMALL_POINTS, EMULATED_POINTS, LARGE_POINTS = 300_000, 60_000, 300_000_000  # of a statement, about


@dataclass(frozen=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def is_float(self) -> bool:
        return "float" in self.dtype

    def __getitem__(self, index: str | Sequence[str]) -> str:
        """Return the text that reads an element."""
        return f"{self.name}[{index if isinstance(index, str) else ', '.join(index)}]"


@dataclass(frozen=True)
class Program:
    """A program as a client sends it. `patterns` name what it was drawn from.

    `wide`: inputs whose integers are of the type's full range, so that sums and products wrap.
    """

    seed: int
    expression: str
    inputs: dict[str, dict[str, object]]
    outputs: tuple[str, ...] | None
    wide: tuple[str, ...]
    patterns: tuple[str, ...]


def draw(seed: int, *, is_gpu: bool = False, limit: int = SMALL_POINTS) -> Program:
    """Draw the program with this number, whose statements have up to about so many points."""
    return _Maker(random.Random(f"program {seed}"), is_gpu, limit).program(seed)


@dataclass
class _Maker:
    rng: random.Random
    is_gpu: bool
    limit: int
    inputs: dict[str, Tensor] = field(default_factory=dict)
    results: list[Tensor] = field(default_factory=list)
    statements: list[str] = field(default_factory=list)
    wide: list[str] = field(default_factory=list)
    places: list[Tensor] = field(default_factory=list)  # inputs whose elements are indices
    axes: int = 0
    is_wide: bool = False

    def program(self, seed: int) -> Program:
        patterns = []
        self.is_wide = self.chance(0.35)
        for _ in range(self.rng.choice((1, 1, 2, 2, 2, 3, 3, 4, 5))):
            name, _, make = self.rng.choices(_PATTERNS, [weight for _, weight, _ in _PATTERNS])[0]
            make(self)
            patterns.append(name)
        inputs = {t.name: {"dtype": t.dtype, "shape": list(t.shape)} for t in self.inputs.values()}
        separator = self.rng.choice(("; ", "\n"))
        outputs = self._outputs()
        return Program(seed, separator.join(self.statements), inputs, outputs, tuple(self.wide), tuple(patterns))

    def _outputs(self) -> tuple[str, ...] | None:
        """Return None, which means what is never read, or some results, the last among them."""
        if self.rng.random() < 0.6:
            return None
        names = list(dict.fromkeys(t.name for t in self.results))
        chosen = self.rng.sample(names[:-1], self.rng.randint(0, min(3, len(names) - 1)))
        return (*chosen, names[-1])

    # -- parts -------------------------------------------------------------------------------------------------------
    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    @property
    def is_large(self) -> bool:
        return self.limit >= LARGE_POINTS

    def extents(self, count: int, points: int | None = None) -> tuple[int, ...]:
        """Draw extents of `count` axes whose product is limited."""
        left = points or self.limit
        drawn = []
        for number in range(count):
            most = left if number == count - 1 else max(1.0, left ** (1.6 / (count - number)))
            fitting = [e for e in (LARGE_EXTENTS if self.is_large else EXTENTS) if e <= most] or [1]
            drawn.append(self.rng.choice(fitting))
            left //= drawn[-1]
        self.rng.shuffle(drawn)
        return tuple(drawn)

    def axis(self, letter: str = "i") -> str:
        self.axes += 1
        return f"{letter}{self.axes}"

    def names(self, count: int, letter: str = "i") -> list[str]:
        return [self.axis(letter) for _ in range(count)]

    def float_dtype(self) -> str:
        return self.rng.choice(GPU_FLOATS if self.is_gpu else FLOATS)

    def input(self, dtype: str, shape: Sequence[int]) -> Tensor:
        """Return an input of this type and shape; sometimes one that exists."""
        same = [t for t in self.inputs.values() if t.dtype == dtype and t.shape == tuple(shape) and t not in self.places]
        if same and self.chance(0.3):
            return self.rng.choice(same)
        tensor = self.new_input(dtype, shape)
        if self.is_wide and not tensor.is_float:
            self.wide.append(tensor.name)
        return tensor

    def new_input(self, dtype: str, shape: Sequence[int]) -> Tensor:
        tensor = Tensor(f"x{len(self.inputs)}", dtype, tuple(shape))
        self.inputs[tensor.name] = tensor
        return tensor

    def tensor(self, ranks: Sequence[int], *, is_float: bool | None = None, points: int | None = None) -> Tensor:
        """Return an earlier result of such a rank, or an input."""
        fitting = [
            t
            for t in self.results
            if len(t.shape) in ranks
            and (is_float is None or t.is_float is is_float)
            and math.prod(t.shape) <= (points or self.limit)
        ]
        if fitting and self.chance(0.65):
            return self.rng.choice(fitting[-3:])
        integer = is_float is False or (is_float is None and self.chance(0.2))
        dtype = self.rng.choice(INTEGERS) if integer else self.float_dtype()
        return self.input(dtype, self.extents(self.rng.choice(list(ranks)), points or self.limit // 8))

    def result(
        self, dtype: str, left: Sequence[str], shape: Sequence[int], text: str, operator: str = "=", stated: str = ""
    ) -> Tensor:
        """Append a statement that writes a new tensor, whose type may be stated."""
        tensor = Tensor(f"t{len(self.statements)}", dtype, tuple(shape))
        self.statements.append(f"{tensor[left]}{': ' if stated else ''}{stated} {operator} {text}")
        self.results.append(tensor)
        return tensor

    def where(self, axes: Sequence[str], shape: Sequence[int]) -> str:
        return " where " + ", ".join(f"{a} in {e}" for a, e in zip(axes, shape, strict=True)) if axes else ""

    def constant(self) -> str:
        return self.rng.choice(("0.5", "2.0", "1.25", "-0.75", "3.0"))

    def unary(self, text: str, dtype: str) -> str:
        """Return an operator of one operand; no literal is beyond an unsigned type."""
        form = self.rng.choice(UNARY if "float" in dtype else INTEGER_UNARY)
        form = form.replace(", -", ", ").replace("// -", "// ") if dtype.startswith("uint") else form
        return form.format(f"({text})")

    def condition(self, axes: Sequence[str], shape: Sequence[int]) -> str:
        """Return a condition on axes."""
        if not axes:
            return "1 > 0"
        at = self.rng.randrange(len(axes))
        axis, extent = axes[at], shape[at]
        other = self.rng.choice(list(axes))
        return self.rng.choice(
            (
                f"{axis} {self.rng.choice(COMPARISONS)} {self.rng.randint(0, extent)}",
                f"{axis} <= {other} + 1",
                f"{axis} % 3 == {self.rng.randint(0, 2)}",
                f"{axis} * 3 + {other} == {self.rng.randint(0, 4)}",
                f"{axis} // 2 < {other}",
                f"bitwise_xor({axis}, {other}) > 2",
            )
        )

    # -- patterns ----------------------------------------------------------------------------------------------------
    def contraction(self) -> None:
        """Sums of products: axes in one factor only, in several, in none; diagonals; epilogues."""
        rng = self.rng
        operands = rng.choice((2, 2, 2, 2, 2, 2, 3, 3, 4))
        roles = [("m", (0,)), ("n", (operands - 1,)), ("k", tuple(range(operands)) if operands == 2 else (0, 1))]
        roles += [("b", tuple(range(operands)))] * rng.choice((0, 0, 0, 1, 1, 2))
        for _ in range(rng.choice((0, 0, 1, 2, 3))):
            some = tuple(sorted(rng.sample(range(operands), rng.randint(1, operands))))
            roles.append((rng.choice("mnkkq"), some))
        if operands > 2:
            roles.append(("k", (1, operands - 1)))
        if self.chance(0.05):
            roles.append(("k", ()))
        is_reduced = [letter in "kq" for letter, _ in roles]
        sizes = self.extents(len(roles), self.limit * 4)
        axes = [self.axis(letter) for letter, _ in roles]
        dtype = self.float_dtype() if self.chance(0.75) else rng.choice(INTEGERS)
        factors, repeated = [], None
        for number in range(operands):
            own = [i for i, (_, users) in enumerate(roles) if number in users]
            rng.shuffle(own)
            if own and self.chance(0.04):
                own.append(rng.choice(own))  # a diagonal
            shape = tuple(sizes[i] for i in own)
            index = ", ".join(axes[i] for i in own)
            known = [t for t in self.results if t.shape == shape and t.dtype == dtype]
            if repeated is not None and repeated.shape == shape and self.chance(0.5):
                tensor = repeated
            else:
                tensor = rng.choice(known) if known and self.chance(0.7) else self.input(dtype, shape)
            repeated = tensor
            text = tensor[index]
            if self.chance(0.2):
                zero = "0.0" if tensor.is_float else "0"
                text = f"{text}.when([{self.condition([axes[i] for i in own], shape)}], {zero})"
            elif self.chance(0.15):
                text = self.unary(text, tensor.dtype)
            elif self.chance(0.1) and tensor.is_float:
                text = f"({text} * {self.constant()})"
            factors.append(text)
        if self.chance(0.2):
            factors.append(self.constant() if "float" in dtype else "2")
        if self.chance(0.15):
            factors.append(self.piecewise(axes, sizes, is_float="float" in dtype))
        rng.shuffle(factors)
        body = " * ".join(factors)
        if "float" in dtype and self.chance(0.1):
            body = f"{body} / 8.0"
        elif self.chance(0.05):
            body = f"-({body})"
        kept = [i for i, reduced in enumerate(is_reduced) if not reduced and roles[i][1]]
        rng.shuffle(kept)
        left, shape = [axes[i] for i in kept], [sizes[i] for i in kept]
        stated = self.accumulator(dtype)
        nowhere = [i for i, (_, users) in enumerate(roles) if not users]
        where = self.where(axes, sizes) if self.chance(0.3) or nowhere or ".when(" in body else ""
        made = self.result(stated or dtype, left, shape, body + where, "+=!", stated)
        if self.chance(0.5):
            self.epilogue(made)

    def accumulator(self, dtype: str) -> str:
        if dtype in ("float16", "bfloat16"):
            return "float32" if self.chance(0.6) else ""
        if dtype in ("int8", "uint8", "int16", "uint16"):
            return "int32" if self.chance(0.7) else ""
        return ""

    def piecewise(self, axes: Sequence[str], sizes: Sequence[int], *, is_float: bool) -> str:
        """Return a read of a constant table that a statement of its own computes."""
        count = min(2, len(axes))
        at = self.rng.sample(range(len(axes)), count)
        own = self.names(count, "c")
        shape = [sizes[i] for i in at]
        value = "const(1.0)" if is_float else "const(1)"
        other = "0.5" if is_float else "3"
        if count == 0:
            return value
        text = f"{value}.when([{self.condition(own, shape)}], {other}){self.where(own, shape)}"
        return self.result("float32" if is_float else "int32", own, shape, text)[[axes[i] for i in at]]

    def table(self) -> None:
        """A constant table read twice under a sum, as transforms of Winograd's algorithm are."""
        r, s, e, v = (self.rng.choice((1, 2, 3, 4, 5)) for _ in range(4))
        e, v = max(e, v), max(e, v)
        s = r
        co, ci = self.extents(2, 400)
        own = self.names(2, "c")
        condition = self.condition(own, (e, r))
        text = f"const({self.constant()}).when([{condition}], 0.5){self.where(own, (e, r))}"
        table = self.result("float32", own, (e, r), text)
        w = self.input("float32", (co, ci, r, s))
        a, b, c, d, p, q = self.names(6)
        body = f"{w[c, d, p, q]} * {table[a, p]} * {table[b, q]}"
        self.result("float32", (a, b, d, c), (e, v, ci, co), body, "+=!")

    def convolution(self) -> None:
        """Convolutions and pools of one or two dimensions, with strides, dilation, padding, groups."""
        rng = self.rng
        dims = rng.choice((1, 1, 2, 2, 2))
        kind = rng.choice(("conv", "conv", "conv", "depthwise", "grouped", "max", "avg", "transposed"))
        dtype = self.float_dtype() if self.chance(0.85) else rng.choice(("int8", "int32"))
        n, c, f, g = rng.choice((1, 1, 2, 3)), rng.choice((1, 2, 3, 8, 16)), rng.choice((1, 3, 4, 8, 16, 17)), 1
        if self.is_large:
            c, f = rng.choice((3, 16, 64, 256)), rng.choice((3, 40, 64, 256))
        taps = [rng.choice((1, 2, 3, 3, 5)) for _ in range(dims)]
        stride = [rng.choice((1, 1, 2, 3)) for _ in range(dims)]
        dilation = [rng.choice((1, 1, 1, 2)) for _ in range(dims)]
        padding = [rng.choice((0, 0, 1, 2)) for _ in range(dims)]
        budget = self.limit // (n * c * f * math.prod(taps)) + 1
        sizes = (28, 56, 112) if self.is_large else (4, 5, 7, 9, 12, 14, 20)
        size = [max(2, min(rng.choice(sizes), int(budget ** (1 / dims)) + 2)) for _ in range(dims)]
        spread = [(t - 1) * d + 1 for t, d in zip(taps, dilation, strict=True)]
        size = [max(s, w) for s, w in zip(size, spread, strict=True)]
        out = [(s + 2 * p - w) // st + 1 for s, p, w, st in zip(size, padding, spread, stride, strict=True)]
        o, r = self.names(dims, "o"), self.names(dims, "r")
        b, ch, fl, gr = self.axis("n"), self.axis("c"), self.axis("f"), self.axis("g")
        if kind == "grouped":
            g = rng.choice((2, 3))
        at = [
            _scaled(o[d], stride[d]) + " + " + _scaled(r[d], dilation[d]) + (f" - {padding[d]}" if padding[d] else "")
            for d in range(dims)
        ]
        if kind == "transposed":
            out = [(s - 1) * st + w for s, st, w in zip(size, stride, taps, strict=True)]
            at = [f"({o[d]} - {r[d]}) // {stride[d]}" for d in range(dims)]
        guards = [
            text for d in range(dims) if padding[d] or kind == "transposed" for text in (f"{at[d]} >= 0", f"{at[d]} < {size[d]}")
        ]
        if kind == "transposed":
            guards += [f"({o[d]} - {r[d]}) % {stride[d]} == 0" for d in range(dims) if stride[d] > 1]
        channels_last = self.chance(0.3)
        groups = (gr,) if kind == "grouped" else ()
        channel = (fl,) if kind in ("depthwise", "max", "avg") else (*groups, ch)
        extent = {fl: f, ch: c, gr: g}
        sizes_of_channels = [extent[a] for a in channel]
        x_shape = (n, *size, *sizes_of_channels) if channels_last else (n, *sizes_of_channels, *size)
        x = self.input(dtype, x_shape)
        x_index = (b, *at, *channel) if channels_last else (b, *channel, *at)
        fill = "const(-3.4e38)" if kind == "max" and "float" in dtype else "0.0" if "float" in dtype else "0"
        if kind == "max" and dtype in ("float16", "bfloat16"):
            fill = "const(-65504.0)"
        read = x[x_index] + (f".when([{', '.join(guards)}], {fill})" if guards else "")
        combine = ">=!" if kind == "max" else "+=!"
        body = read
        if kind == "avg" and "float" in dtype:
            body = f"{read} / {float(math.prod(taps))}"
        elif kind not in ("max", "avg"):
            own = (fl,) if kind == "depthwise" else (*groups, fl, ch)
            w_shape = (*(extent[a] for a in own), *taps)
            w_index = (*own, *r)
            if self.chance(0.25):
                w_shape, w_index = (*taps, *(extent[a] for a in reversed(own))), (*r, *reversed(own))
            w = self.input(dtype, w_shape)
            body = f"{read} * {w[w_index]}"
        stated = self.accumulator(dtype) if combine == "+=!" else ""
        results = (*groups, fl)
        left = (b, *o, *results) if channels_last else (b, *results, *o)
        shape = [n, *out, *(extent[a] for a in results)] if channels_last else [n, *(extent[a] for a in results), *out]
        extents = dict(zip((*o, *r), (*out, *taps), strict=True))
        text = body + self.where(list(extents), list(extents.values()))
        made = self.result(stated or dtype, left, shape, text, combine, stated)
        if self.chance(0.6):
            self.epilogue(made)

    def epilogue(self, made: Tensor) -> None:
        """A map over a result, with a bias along one axis and a residual."""
        axes = self.names(len(made.shape))
        text = made[axes]
        if axes and self.chance(0.6):
            at = self.rng.randrange(len(axes))
            bias = self.input(made.dtype, (made.shape[at],))
            text = f"{text} + {bias.name}[{axes[at]}]"
        if self.chance(0.25):
            residual = self.input(made.dtype, made.shape)
            text = f"({text}) * {residual[axes]}"
        if self.chance(0.6):
            text = self.unary(text, made.dtype)
        dtype = "?"
        if self.chance(0.3):
            dtype = self.rng.choice(("float16", "float32", "bfloat16") if made.is_float else ("int8", "uint8", "int32"))
            text = f"({text}).cast(`{dtype}`)"
        self.map_result(axes, made, text, dtype)

    def map_result(self, axes: Sequence[str], like: Tensor, text: str, dtype: str = "?") -> Tensor:
        """Append a map; a type that the rules decide is stated, so that later patterns know it."""
        if dtype == "?":
            dtype = like.dtype
        order = list(range(len(axes)))
        if self.chance(0.15):
            self.rng.shuffle(order)
        left, shape = [axes[i] for i in order], [like.shape[i] for i in order]
        return self.result(dtype, left, shape, text + self.where(axes, like.shape), stated=dtype)

    def elementwise(self) -> None:
        """A tree of operators over tensors of one shape, with broadcasts and selects."""
        base = self.tensor((1, 2, 3, 4))
        axes = self.names(len(base.shape))

        def leaf() -> str:
            if self.chance(0.25):
                kept = [i for i in range(len(axes)) if self.chance(0.5)]
                other = self.input(base.dtype, [base.shape[i] for i in kept])
                return other[[axes[i] for i in kept]]
            if self.chance(0.2):
                other = self.input(base.dtype, base.shape)
                return other[axes]
            return base[axes]

        def tree(depth: int) -> str:
            if depth == 0:
                return leaf()
            drawn = self.rng.random()
            if drawn < 0.4:
                return f"({self.unary(tree(depth - 1), base.dtype)})"
            if drawn < 0.8:
                form = self.rng.choice(BINARY if base.is_float else INTEGER_BINARY)
                return f"({form.format(tree(depth - 1), tree(self.rng.randrange(depth)))})"
            if drawn < 0.9 and self.chance(0.5):
                return f"({tree(depth - 1)}).when([{self.condition(axes, base.shape)}], {tree(self.rng.randrange(depth))})"
            comparison = f"{tree(0)} {self.rng.choice(COMPARISONS)} {leaf()}"
            return f"where({comparison}, {tree(depth - 1)}, {tree(self.rng.randrange(depth))})"

        self.map_result(axes, base, tree(self.rng.choice((1, 2, 2, 3, 4))))

    def reduction(self) -> None:
        base = self.tensor((1, 2, 3, 4))
        axes = self.names(len(base.shape))
        kept = [i for i in range(len(axes)) if self.chance(0.45)]
        if len(kept) == len(axes):
            kept.pop()
        self.rng.shuffle(kept)
        text = base[axes]
        combine = self.rng.choice(("+=!", "+=!", "+=!", ">=!", "<=!", "*=!", "&=!", "|=!"))
        dtype = base.dtype
        if combine == "*=!":
            text = f"(1.0 + {text} * 0.01)" if base.is_float else text
        elif combine in ("&=!", "|=!"):
            text, dtype = f"({text} > {'0.25' if base.is_float else '1'})", "int8"
        elif self.chance(0.4):
            text = self.unary(text, base.dtype)
        rows, shape = [axes[i] for i in kept], [base.shape[i] for i in kept]
        dtype = (self.accumulator(dtype) if combine == "+=!" else "") or dtype
        made = self.result(dtype, rows, shape, text + self.where(axes, base.shape), combine, dtype)
        if self.chance(0.5):  # a map over the rows
            self.map_result(axes, base, f"{base[axes]} - {made[rows]}")

    def normalisation(self) -> None:
        """Softmax, log-softmax, layer and RMS normalisation over the last axes."""
        base = self.tensor((1, 2, 3), is_float=True, points=min(50_000, self.limit // 8))
        axes = self.names(len(base.shape))
        cut = self.rng.randrange(len(axes))
        kept, where = axes[:cut], self.where(axes, base.shape)
        rows = base.shape[:cut]
        count = float(math.prod(base.shape[cut:]))
        text = base[axes]
        kind = self.rng.choice(("softmax", "softmax", "rms", "layer", "logsumexp"))
        if kind in ("softmax", "logsumexp"):
            scale = self.constant() if self.chance(0.3) else "1.0"
            high = self.result(base.dtype, kept, rows, f"{text} * {scale}{where}", ">=!")
            power = f"exp({text} * {scale} - {high[kept]})"
            if self.chance(0.5):
                e = self.result(base.dtype, axes, base.shape, power + where)
                power = e[axes]
            total = self.result(base.dtype, kept, rows, power + where, "+=!")
            if kind == "logsumexp":
                self.result(base.dtype, kept, rows, f"{high[kept]} + log({total[kept]})")
                return
            self.map_result(axes, base, f"{power} / {total[kept]}")
        elif kind == "rms":
            total = self.result(base.dtype, kept, rows, f"{text} * {text}{where}", "+=!")
            self.map_result(axes, base, f"{text} * rsqrt({total[kept]} / {count} + 0.01)")
        else:
            mean = self.result(base.dtype, kept, rows, f"{text} / {count}{where}", "+=!")
            centred = f"({text} - {mean[kept]})"
            total = self.result(base.dtype, kept, rows, f"{centred} * {centred}{where}", "+=!")
            self.map_result(axes, base, f"{centred} * rsqrt({total[kept]} / {count} + 0.01)")

    def attention(self) -> None:
        dtype = self.rng.choice(("float16", "bfloat16", "float32")) if self.is_gpu else self.float_dtype()
        heads, rows, keys, dim = self.rng.choice((1, 2, 3)), self.rng.choice((1, 5, 16, 24)), self.rng.choice(
            (7, 16, 33, 64)), self.rng.choice((8, 16, 32))  # fmt: skip
        if self.is_large:
            heads, rows, keys, dim = 8 * heads, 32 * rows, 32 * keys, 4 * dim
        q, k, v = (self.input(dtype, (heads, length, dim)) for length in (rows, keys, keys))
        h, i, j, d, e = self.names(5)
        s = self.result("float32", (h, i, j), (heads, rows, keys), f"{q[h, i, d]} * {k[h, j, d]}", "+=!", "float32")
        text = f"{s[h, i, j]} * 0.125"
        if self.chance(0.4):
            text = f"({text}).when([{j} <= {i} + {max(0, keys - rows)}], const(-30000.0))"
        p = self.result("float32", (h, i, j), s.shape, text + self.where((h, i, j), s.shape))
        m = self.result("float32", (h, i), s.shape[:2], p[h, i, j], ">=!")
        x = self.result("float32", (h, i, j), s.shape, f"exp({p[h, i, j]} - {m[h, i]})")
        z = self.result("float32", (h, i), s.shape[:2], x[h, i, j], "+=!")
        o = self.result("float32", (h, i, e), (heads, rows, dim), f"{x[h, i, j]} * {v[h, j, e]}", "+=!", "float32")
        self.result(dtype, (h, i, e), o.shape, f"({o[h, i, e]} / {z[h, i]}).cast(`{dtype}`)")

    def place(self, ids: Tensor, own: Sequence[str], size: int) -> str:
        """Return an index from data: an element, or one of any value that arithmetic bounds."""
        self.places.append(ids)
        if self.chance(0.5):
            return ids[own]
        self.wide.append(ids.name)
        return self.rng.choice((f"{ids[own]} % {size}", f"max(min({ids[own]}, {size - 1}), 0)"))

    def gather(self) -> None:
        table = self.tensor((1, 2, 3))
        rank = self.rng.choice((1, 1, 2))
        ids = self.new_input(self.rng.choice(("int32", "int32", "int64", "uint8")), self.extents(rank, 200))
        at = self.rng.randrange(len(table.shape))
        own, rest = self.names(rank, "g"), self.names(len(table.shape))
        place = self.place(ids, own, table.shape[at])
        index = [place if d == at else rest[d] for d in range(len(rest))]
        shape = (*ids.shape, *(e for d, e in enumerate(table.shape) if d != at))
        if math.prod(shape) > self.limit:
            return self.elementwise()
        left = (*own, *(a for d, a in enumerate(rest) if d != at))
        text = table[index]
        if self.chance(0.3):
            text = f"{text} * {table[index]}"
        made = self.result(table.dtype, left, shape, text, stated=table.dtype)
        if self.chance(0.4):
            self.epilogue(made)
        return None

    def scan(self) -> None:
        """Reductions of all elements before each one, along any axis: shifted, cut short, converted, reversed."""
        rng = self.rng
        base = self.tensor((1, 2, 3), points=max(4000, self.limit // 1000))
        at, shift = rng.randrange(len(base.shape)), rng.choice((0, 0, 0, 1, -1, 2, -3))
        size = base.shape[at]
        length = max(1, min(size, size - shift) - rng.choice((0, 0, 0, 1, 3)))  # of the scan
        axes, o = self.names(len(base.shape)), self.axis("o")
        axis, shape = axes[at], [length if d == at else e for d, e in enumerate(base.shape)]
        if math.prod(shape) * length > self.limit:
            return self.first_index()
        place = f"{length - 1} - {o}" if shift == 0 and self.chance(0.2) else f"{o} + {shift}" if shift > 0 else f"{o} - {-shift}"
        place = o if place == f"{o} - 0" else place
        conditions = [
            rng.choice(
                (f"{o} <= {axis}", f"{o} < {axis}", f"{o} >= {axis}", f"{o} > {axis}", f"{axis} >= {o}", f"{o} <= {axis} + 1")
            )
        ]
        conditions += [f"{o} >= {-shift}"] * (shift < 0) + [f"{o} + {shift} < {size}"] * (shift > 0)
        if len(axes) > 1 and self.chance(0.2):
            conditions.append(self.condition([a for a in axes if a != axis], [e for d, e in enumerate(shape) if d != at]))
        rng.shuffle(conditions)
        text = base[[place if d == at else a for d, a in enumerate(axes)]]
        dtype, combine = base.dtype, rng.choice(("+=!", "+=!", "+=!", "*=!", ">=!", "<=!"))
        if combine == "*=!":
            text = f"(1.0 + {text} * 0.01)" if base.is_float else text
        elif self.chance(0.3):
            text = self.unary(text, dtype)
        if self.chance(0.2):
            dtype = rng.choice(
                ("float32", "float64") if base.is_float and not self.is_gpu else ("float32",) if base.is_float else ("int64",)
            )
            text = f"({text}).cast(`{dtype}`)"
        text = f"({text}).when([{', '.join(conditions)}], {_neutral(combine, dtype)})"
        stated = dtype
        if self.chance(0.25) and combine in ("+=!", "*=!"):
            stated = "float32" if dtype != "float64" else dtype
        elif self.chance(0.2) and dtype == "float32":
            text = f"{text}.cast(`float16`)"
            stated = "float16"
        order = rng.sample(range(len(axes)), len(axes)) if self.chance(0.3) else range(len(axes))
        where = self.where((*axes, o), (*shape, length))
        made = self.result(stated, [axes[d] for d in order], [shape[d] for d in order], text + where, combine, stated)
        if self.chance(0.3):
            self.epilogue(made)
        return None

    def first_index(self) -> None:
        """Compute the first or last index of the greatest or least element of each row."""
        base = self.tensor((1, 2), points=max(4000, self.limit // 1000))
        axes = self.names(len(base.shape))
        *rows, last = axes
        high = self.result(base.dtype, rows, base.shape[:-1], base[axes], self.rng.choice((">=!", "<=!")))
        other, combine = self.rng.choice(((str(base.shape[-1]), "<=!"), ("-1", ">=!")))
        found = f"{last}.when([{base[axes]} == {high[rows]}], {other})"
        self.result("int32", rows, base.shape[:-1], found + self.where(axes, base.shape), combine)

    def indexing(self) -> None:
        """One tensor read in several forms: large coefficients, quotients, remainders, clamps, guards."""
        rng = self.rng
        base = self.tensor((1, 2, 3))
        shape = self.extents(rng.choice((1, 2, 3, 4)), 4000)
        axes = self.names(len(shape))
        reads = []
        for _ in range(rng.choice((1, 2, 3))):
            index, guards = [], []
            for size in base.shape:
                terms = [f"{a} * {rng.choice((1, 2, 3, -1, -4, 7, 77, 1000003, -1000003))}" for a in axes if self.chance(0.7)]
                value = " + ".join((*terms, str(rng.randint(-5, 9))))
                form = rng.choice(
                    (
                        f"({value}) % {size}",
                        f"({value}) // 3 % {size}",
                        f"min(max({value}, 0), {size - 1})",
                        f"abs({value}) % {size}",
                        "guard",
                    )
                )
                if form == "guard":
                    guards += [f"{value} >= 0", f"{value} < {size}"]
                    form = value
                index.append(form)
            fill = "1.5" if base.is_float else "1"
            reads.append(base[index] + (f".when([{', '.join(guards)}], {fill})" if guards else ""))
        self.map_result(axes, Tensor("", base.dtype, shape), " + ".join(f"({read})" for read in reads))

    def wide_rank(self) -> None:
        """A tensor of up to seven dimensions, permuted, reduced along some."""
        rank = self.rng.choice((5, 6, 7))
        shape = [self.rng.choice((1, 2, 3, 5)) for _ in range(rank)]
        base = self.input(self.float_dtype() if self.chance(0.6) else self.rng.choice(INTEGERS), shape)
        axes = self.names(rank)
        order = self.rng.sample(range(rank), self.rng.randint(0, rank))
        text = self.unary(base[axes], base.dtype) if self.chance(0.5) else base[axes]
        operator = "=" if len(order) == rank else self.rng.choice(("+=!", ">=!", "<=!"))
        self.result(
            base.dtype,
            [axes[i] for i in order],
            [shape[i] for i in order],
            text + self.where(axes, shape),
            operator,
            base.dtype,
        )

    def movement(self) -> None:
        """Transposes, slices, pads, flips, reshapes, concatenations."""
        base = self.tensor((1, 2, 3, 4))
        axes = self.names(len(base.shape))
        kind = self.rng.choice(("transpose", "pad", "flip", "reshape", "concat", "repeat", "stride"))
        at = self.rng.randrange(len(axes))
        extent, index, shape, text = base.shape[at], list(axes), list(base.shape), ""
        fill = "0.0" if base.is_float else "0"
        if kind == "pad":
            low, high = self.rng.randint(0, 3), self.rng.randint(0, 3)
            shape[at] = extent + low + high
            index[at] = f"{axes[at]} - {low}"
            text = f"{base[index]}.when([{index[at]} >= 0, {index[at]} < {extent}], {fill})"
        elif kind == "flip":
            index[at] = f"{extent - 1} - {axes[at]}"
        elif kind == "reshape":
            total = math.prod(base.shape)
            axes = self.names(1)
            strides = [math.prod(base.shape[d + 1 :]) for d in range(len(base.shape))]
            places = [f"{axes[0]} // {stride}" if stride > 1 else axes[0] for stride in strides]
            index = [f"{place} % {extent}" for place, extent in zip(places, base.shape, strict=True)]
            shape = [total]
        elif kind == "concat":
            other = self.input(base.dtype, base.shape)
            shape[at] = 2 * extent
            second = list(index)
            second[at] = f"{axes[at]} - {extent}"
            text = f"{base[index]}.when([{axes[at]} < {extent}], {other[second]})"
        elif kind == "repeat":
            times = self.rng.choice((2, 3))
            shape[at] = extent * times
            index[at] = self.rng.choice((f"{axes[at]} // {times}", f"{axes[at]} % {extent}"))
        elif kind == "stride":
            step = self.rng.choice((2, 3))
            shape[at] = -(-extent // step)
            index[at] = f"{axes[at]} * {step}"
        if math.prod(shape) > self.limit:
            return self.elementwise()
        text = text or base[index]
        self.map_result(axes, Tensor("", base.dtype, tuple(shape)), text)
        return None

    def scatter(self) -> None:
        """Up to three updates of an earlier result or an input; positions are distinct where the last write wins."""
        target = self.tensor((1, 2), points=max(4000, self.limit // 1000))
        for _ in range(self.rng.choice((1, 1, 1, 2, 3))):
            self.update(target, self.rng.choice(("+=.", "+=.", ">=.", "<=.", "=.")))
        if self.chance(0.5):
            self.epilogue(target)

    def update(self, target: Tensor, combine: str) -> None:
        rows = target.shape[0]
        count = self.rng.randint(1, rows) if combine == "=." else self.rng.choice((1, 3, 8, 17, 40))
        ids = self.new_input(self.rng.choice(("int32", "int64")), (count,))
        own, rest = self.axis("g"), self.names(len(target.shape) - 1)
        source = self.new_input(target.dtype, (count, *target.shape[1:]))
        value = source[(own, *rest)]
        if self.chance(0.3):
            value = f"{value}.when([{self.condition((own, *rest), (count, *target.shape[1:]))}])"
        where = self.where((own, *rest), source.shape)
        place = ids[(own,)] if combine == "=." else self.place(ids, (own,), rows)
        self.places.append(ids)
        self.statements.append(f"{target[(place, *rest)]} {combine} {value}{where}")
        self.results.append(target)

    def packed(self) -> None:
        """A product with weights of four bits."""
        dtype = "float16" if self.is_gpu else self.float_dtype()
        m, n, words = self.rng.choice((1, 3, 8, 16)), self.rng.choice((8, 16, 24)), self.rng.choice((1, 4, 8))
        k = words * 8
        x, q = self.input(dtype, (m, k)), self.input("int32", (words, n))
        i, j, p = self.names(3)
        text = f"bitwise_and({q[f'{p} // 8', j]} >> {p} % 8 * 4, 15) where {p} in {k}"
        code = self.result("int32", (p, j), (k, n), text)
        w = self.result(dtype, (p, j), (k, n), f"({code[p, j]} - 8).cast(`{dtype}`)")
        self.result(dtype, (i, j), (m, n), f"{x[i, p]} * {w[p, j]}", "+=!")


def _neutral(combine: str, dtype: str) -> str:
    """Return the element that changes no reduction of a type."""
    if combine in ("+=!", "*=!"):
        number = 0 if combine == "+=!" else 1
        return f"{number}.0" if "float" in dtype else str(number)
    if "float" in dtype:
        return "const(`-inf`)" if combine == ">=!" else "const(`inf`)"
    bits = int(dtype.lstrip("uint"))
    low, high = (0, (1 << bits) - 1) if dtype.startswith("u") else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    return f"const({low if combine == '>=!' else high}, `{dtype}`)"


def _scaled(axis: str, factor: int) -> str:
    return axis if factor == 1 else f"{axis} * {factor}"


_PATTERNS: tuple[tuple[str, float, Callable[[_Maker], None]], ...] = (
    ("contraction", 5, _Maker.contraction),
    ("convolution", 2.5, _Maker.convolution),
    ("table", 0.5, _Maker.table),
    ("elementwise", 4, _Maker.elementwise),
    ("reduction", 2.5, _Maker.reduction),
    ("normalisation", 1.5, _Maker.normalisation),
    ("attention", 0.6, _Maker.attention),
    ("gather", 1.2, _Maker.gather),
    ("scan", 1.2, _Maker.scan),
    ("first_index", 0.4, _Maker.first_index),
    ("movement", 2, _Maker.movement),
    ("indexing", 1.2, _Maker.indexing),
    ("wide_rank", 0.6, _Maker.wide_rank),
    ("scatter", 1.2, _Maker.scatter),
    ("packed", 0.5, _Maker.packed),
)
