"""Requests to the service as a hostile client writes them: valid bodies with a few mutations, from a seed.

`request(seed, index)` is the same in every process. No two hostile texts share a marker, so a text is found again in
whatever the service generates.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml
from expensive import expensive, polyhedral
from hostile import ENDINGS, HEADERS, HOSTILE, NAMES, NUMBERS, PATHS, PICKLE, RAW, WRONG

ROOT = Path(__file__).parents[2]
SPECS = ROOT / "hwspecs"
SEEDS = ROOT / "tests" / "data" / "fuzz_seeds.txt"

JSON_HEADERS = {"Content-Type": "application/json"}
CHARACTERS_MOST = 3 << 19  # more than the service takes
COMPILE, ESTIMATES = "/v1/kernels:compile", "/v1/estimates"


@dataclass(frozen=True)
class Request:
    """`texts` are markers that no code may hold, `names` those that may stand in it as identifiers."""

    seed: str
    method: str
    path: str
    headers: dict[str, str]
    content: str
    texts: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    renamed_only: bool = False  # nothing is wrong with it: it must be built
    shipped: bool = False  # for a device of the catalog, but for texts: what is generated must compile

    def as_json(self) -> str:
        """The request in one line of ASCII, to be sent again by hand."""
        shown = {"seed": self.seed, "method": self.method, "path": self.path, "headers": self.headers}
        return json.dumps(shown | {"content": self.content})


def request(seed: int, index: int) -> Request:
    """The request with this number."""
    return _Maker(f"{seed}:{index}").request()


# -- what is valid -----------------------------------------------------------------------------------------------------

Body = dict[str, Any]


def _tensor(*shape: int, dtype: str = "float32") -> Body:
    return {"dtype": dtype, "shape": list(shape)}


PROGRAMS: tuple[tuple[str, Body], ...] = (
    ("y[i] = x[i] * 2.0", {"x": _tensor(64)}),
    ("C[m, n] +=! A[m, k] * B[k, n]", {"A": _tensor(16, 32), "B": _tensor(32, 16)}),
    ("C[m, n] +=! A[m, k] * B[k, n]", {"A": _tensor(64, 64, dtype="float16"), "B": _tensor(64, 64, dtype="float16")}),
    ("s[] +=! x[i]", {"x": _tensor(1000)}),
    ("high[i] >=! x[i, j]; e[i, j] = exp(x[i, j] - high[i]); total[i] +=! e[i, j]; y[i, j] = e[i, j] / total[i]",
     {"x": _tensor(8, 100)}),
    ("y[n, f, h, w] +=! x[n, c, h + a, w + b] * k[f, c, a, b] where h in 6, w in 6",
     {"x": _tensor(1, 3, 8, 8), "k": _tensor(4, 3, 3, 3)}),
    ("y[n, c] = table[ids[n], c]", {"table": _tensor(100, 16), "ids": _tensor(40, dtype="int32")}),
    ("grid[at[n], c] +=. x[n, c].when(at[n] >= 0)",
     {"grid": _tensor(100, 16), "at": _tensor(40, dtype="int32"), "x": _tensor(40, 16)}),
    ("y[j, i] = x[i, j]", {"x": _tensor(40, 30)}),
    ('einsum("mk,kn->mn")', {"a": _tensor(8, 8), "b": _tensor(8, 8)}),
    ("Y = softmax(X)", {"X": _tensor(4, 32)}),
    ("y[i] = x[i - 1].when([i >= 1], 0.0) where i in 64", {"x": _tensor(64)}),
    ("y[i, j] = (x[i, j] + b[j]).call(`max`, [0.0])", {"x": _tensor(32, 32), "b": _tensor(32)}),
)  # fmt: skip
COMPILED = ("cpu-x86-avx2", "local", "nvidia-h200-sxm")  # what can be compiled for on any machine with gcc and NVRTC
CATALOGED = ("cpu-x86-avx2", "nvidia-h200-sxm")  # of these, those whose specs are shipped
TARGETS = (*COMPILED, "amd-mi50", "amd-mi250x", "amd-mi300x", "cpu-arm-neon")
_INPUT = re.compile(r"(\w+)=(\w+)\[([\d,]*)\]")


@cache
def seed_programs() -> tuple[tuple[str, Body], ...]:
    """The parser's seeds as expression and inputs."""
    found = []
    for line in SEEDS.read_text(encoding="utf-8").splitlines():
        inputs, _, expression = line.partition(" | ")
        named = {
            name: _tensor(*(int(n) for n in shape.split(",") if n), dtype=dtype) for name, dtype, shape in _INPUT.findall(inputs)
        }
        found.append((expression, named))
    return tuple(found)


@cache
def catalog() -> tuple[Body, ...]:
    """Every spec that is shipped, as a client would send it."""
    return tuple(yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(SPECS.glob("*.yaml")))


class _Raw(str):
    """Stands in a body for a text that is written as it is."""


class _Pairs(list[tuple[str, Any]]):
    """An object whose keys need not differ."""


# -- making one --------------------------------------------------------------------------------------------------------

Place = tuple[Any, Any]  # a container and the key in it


class _Maker:
    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._rng = random.Random(seed)
        self._texts: list[str] = []
        self._names: list[str] = []
        self._tail = ""
        self._renamed_only = self._shipped = False

    def request(self) -> Request:
        draw = self._rng.random()
        method, headers = "POST", dict(JSON_HEADERS)
        if draw < 0.10:
            method, path, headers, content = "GET", self._path(), {}, ""
        elif draw < 0.55:
            path, content = COMPILE, self._written(self._compile())
            headers["Prefer"] = "wait=5"
        else:
            path, content = ESTIMATES, self._written(self._estimates())
        if self._rng.random() < 0.06:
            self._renamed_only = False
            headers |= {name: self._marked(text) for name, text in self._rng.choice(HEADERS).items()}
        return Request(
            self._seed,
            method,
            path,
            headers,
            content,
            tuple(self._texts),
            tuple(self._names),
            self._renamed_only,
            self._shipped or '"hardware"' not in content,
        )

    # bodies

    def _program(self) -> Body:
        programs = seed_programs() if self._rng.random() < 0.25 else PROGRAMS
        expression, inputs = self._rng.choice(programs)
        return {"expression": expression, "inputs": copy.deepcopy(inputs)}

    def _compile(self) -> Any:
        body = self._program()
        if self._rng.random() < 0.5:
            specs = catalog()
            if self._rng.random() < 0.7:
                specs = tuple(spec for spec in specs if spec["id"] in CATALOGED)
            body["hardware"] = copy.deepcopy(self._rng.choice(specs))
        else:
            body["target"] = self._rng.choice((*COMPILED, *TARGETS))
        body["options"] = {
            "top_k": self._rng.choice((1, 2, 3)), "select": "model", "allow_tf32": False, "runtime": "auto",
            "tiles": {}, "constants": [],
        }  # fmt: skip
        if self._rng.random() < 0.2:
            constant = next(iter(body["inputs"]), "x")
            body["options"] |= {"family": "simt", "tiles": {"split_k": 1}, "constants": [constant]}
        draw = self._rng.random()
        if draw < 0.12:
            return self._renamed(body)
        if draw < 0.40:
            return self._annotated(body)
        return self._mutated(body, self._compile_mutations())

    def _estimates(self) -> Any:
        items = [self._program() for _ in range(self._rng.choice((1, 1, 1, 2, 5)))]
        targets = self._rng.sample(TARGETS, self._rng.choice((1, 1, 2, 3)))
        body = {"items": items, "targets": targets, "top_k": 1, "allow_tf32": False}
        return self._mutated(body, self._estimate_mutations())

    def _mutated(self, body: Any, kinds: Sequence[Callable[[Any], None]]) -> Any:
        for _ in range(self._rng.choice((1, 1, 1, 2, 2, 3, 4))):
            self._rng.choice(kinds)(body)
        if self._rng.random() < 0.02:
            return self._rng.choice((*WRONG, [body], self._nest(self._rng.choice((10, 500, 3000)))))
        return body

    def _compile_mutations(self) -> Sequence[Callable[[Any], None]]:
        hostile = (self._text_of_spec,) * 5 + (self._text,) * 4
        return (*hostile, self._expression, self._expression, self._comment, self._comment, *self._any())

    def _estimate_mutations(self) -> Sequence[Callable[[Any], None]]:
        return (self._text, self._text, self._expression, self._expression, self._comment, self._many, *self._any())

    def _any(self) -> Sequence[Callable[[Any], None]]:
        return (
            self._number,
            self._number,
            self._wrong,
            self._key,
            self._unknown,
            self._removed,
            self._raw,
            self._twice,
            self._deep,
            self._long,
        )

    def _written(self, body: Any) -> str:
        return (_dumped(body) + self._tail)[:CHARACTERS_MOST]

    # hostile texts

    def _marker(self) -> str:
        return f"zq{self._rng.randrange(16**10):010x}"

    def _marked(self, form: str) -> str:
        """A hostile text; none of its markers may be in code."""
        marker = self._marker()
        if "@" in form:
            self._texts.append(marker)
        return form.replace("@", marker)

    def _hostile(self) -> str:
        if self._rng.random() < 0.03:
            return PICKLE
        if self._rng.random() < 0.1:
            return self._name()
        return self._marked(self._rng.choice(HOSTILE))

    def _name(self) -> str:
        """An identifier: it may be in code as one."""
        name = self._rng.choice(NAMES)
        if name == "@":
            name = self._marker()
            self._names.append(name)
        return name

    # places

    def _leaves(self, node: Any, wanted: type | tuple[type, ...]) -> list[Place]:
        found: list[Place] = []
        pending = [node]
        while pending:
            at = pending.pop()
            pairs = at.items() if isinstance(at, dict) else enumerate(at) if isinstance(at, list) else ()
            for key, value in pairs:
                if isinstance(value, wanted) and not isinstance(value, _Raw | _Pairs):
                    found.append((at, key))
                if isinstance(value, dict | list) and not isinstance(value, _Pairs):
                    pending.append(value)
        return found

    def _place(self, node: Any, wanted: type | tuple[type, ...]) -> Place | None:
        places = self._leaves(node, wanted)
        return self._rng.choice(places) if places else None

    # mutations

    def _text_of_spec(self, body: Any) -> None:
        """A hostile text in the spec, where it is free text first."""
        spec = body.get("hardware") if isinstance(body, dict) else None
        if not isinstance(spec, dict):
            self._text(body)
        elif self._rng.random() < 0.5:
            spec["name"] = self._hostile()[: self._rng.choice((120, 120, 120, 121))]
        elif self._rng.random() < 0.3 and isinstance(spec.get("sources"), list) and spec["sources"]:
            source = self._rng.choice(spec["sources"])
            if isinstance(source, dict):
                source["text"] = self._hostile()
        elif self._rng.random() < 0.3:
            row = {"name": "rate", "unit": "s", "cores": 1, "samples": 3, "how": self._hostile()}
            spec["measured"] = [row | dict.fromkeys(("min", "median", "max", "quiet"), 1.0)]
        else:
            self._text(spec)

    def _text(self, body: Any) -> None:
        """A hostile text in place of any other, or at one of its ends."""
        place = self._place(body, str)
        if place is None:
            return
        at, key = place
        if key == "expression":
            self._comment(at)
            return
        hostile, old = self._hostile(), at[key]
        at[key] = self._rng.choice((hostile, hostile, old + hostile, hostile + old))

    def _comment(self, body: Any) -> None:
        """A hostile text in a comment of the expression, or in its midst."""
        for at, key in self._leaves(body, str):
            if key == "expression":
                old = at[key]
                hostile = self._hostile()
                if self._rng.random() < 0.7:
                    at[key] = f"{old} # {hostile}"
                else:
                    # what the parser makes of a text in the midst may be a name
                    self._names += self._texts
                    self._texts.clear()
                    cut = self._rng.randrange(len(old) + 1)
                    at[key] = old[:cut] + hostile + old[cut:]
                return

    def _expression(self, body: Any) -> None:
        places = [(at, key) for at, key in self._leaves(body, str) if key == "expression"]
        if places:
            at, key = self._rng.choice(places)
            at[key] = expensive(self._rng)
            at["inputs"] = {"x": _tensor(64)}

    def _number(self, body: Any) -> None:
        if (place := self._place(body, (int, float))) is not None:
            place[0][place[1]] = self._rng.choice(NUMBERS)

    def _wrong(self, body: Any) -> None:
        if (place := self._place(body, object)) is not None:
            place[0][place[1]] = copy.deepcopy(self._rng.choice(WRONG))

    def _key(self, body: Any) -> None:
        """A hostile text for a key."""
        places = [(at, key) for at, key in self._leaves(body, object) if isinstance(at, dict)]
        if places:
            at, key = self._rng.choice(places)
            at[self._hostile()] = at.pop(key)

    def _unknown(self, body: Any) -> None:
        places = [at[key] for at, key in self._leaves(body, dict)]
        at = self._rng.choice([body, *places])
        if isinstance(at, dict):
            at[self._hostile()] = copy.deepcopy(self._rng.choice(WRONG))

    def _removed(self, body: Any) -> None:
        if (place := self._place(body, object)) is not None:
            del place[0][place[1]]

    def _raw(self, body: Any) -> None:
        if (place := self._place(body, (int, float, str))) is not None:
            place[0][place[1]] = _Raw(self._rng.choice(RAW))

    def _twice(self, body: Any) -> None:
        """An object with a key that stands in it twice."""
        if (place := self._place(body, dict)) is not None and (old := place[0][place[1]]):
            key = self._rng.choice(list(old))
            place[0][place[1]] = _Pairs([*old.items(), (key, self._hostile())])

    def _deep(self, body: Any) -> None:
        if self._rng.random() < 0.3 and (place := self._place(body, object)) is not None:
            place[0][place[1]] = self._nest(self._rng.choice((5, 100, 2000)))
        elif self._rng.random() < 0.2:
            self._tail = self._rng.choice((" ", "\n", "}", "]", ",", '{"a":1}', "\x00", "#"))

    def _nest(self, depth: int) -> _Raw:
        opened, closed = self._rng.choice((("[", "]"), ('{"a":', "}")))
        return _Raw(opened * depth + "1" + closed * depth)

    def _long(self, body: Any) -> None:
        """A list or an object that is much longer."""
        count = self._rng.choice((10, 65, 257, 1025, 20_000))
        place = self._place(body, (list, dict))
        if place is None:
            return
        at, key = place
        if isinstance(at[key], list):
            at[key] = (at[key] or [1]) * (1 if len(_dumped(at[key])) * count > 800_000 else count)
        else:
            at[key] = at[key] | {f"n{index}": 1 for index in range(count)}

    def _many(self, body: Any) -> None:
        """Many items, most of them cheap to refuse, now and then dear."""
        if not isinstance(body, dict) or not isinstance(body.get("items"), list):
            return
        count = self._rng.choice((3, 20, 64, 200, 1024, 1025, 200_000))
        item: Any = self._rng.choice(({}, 1, {"a": 1}, None))
        if count <= 20:
            item = {"expression": polyhedral(self._rng, 4, 1), "inputs": {"x": _tensor(64)}}
        elif count <= 1025 and self._rng.random() < 0.5:
            item = {"expression": "y[i] = x[i +", "inputs": {"x": _tensor(64)}}
        body["items"] = body["items"] + [item] * count

    def _annotated(self, body: Body) -> Body:
        """Hostile texts in free texts alone: where these are taken, it is built."""
        spec = copy.deepcopy(self._rng.choice([one for one in catalog() if one["id"] in CATALOGED]))
        if self._rng.random() < 0.5:
            spec["name"] = self._ending()[:120]
        spec["sources"][0]["text"] = self._ending()
        del body[next(key for key in ("hardware", "target") if key in body)]
        expression = body["expression"]
        if self._rng.random() < 0.5 and not re.search(r"[\n\r]", ending := self._ending()):
            expression += f" # {ending}"
        self._shipped = True
        return body | {"hardware": spec, "expression": expression}

    def _ending(self) -> str:
        """A text that should end a comment, a line or a literal."""
        return self._marked(self._rng.choice(ENDINGS))

    def _renamed(self, body: Body) -> Body:
        """One name of the program, wherever it stands, by another: as valid as before."""
        expression, inputs = self._rng.choice(PROGRAMS[:9])
        old = self._rng.choice(sorted(set(re.findall(r"\b[A-Za-z]\w*(?=\[)", expression))))
        new = self._name()
        reserved = ("where", "in", "einsum", "const", "extent", "exp", "min", "max", "fma", "float32", "bool", "int",
                    "float", "half", "uint8_t", "and", "true", "false", "None", "def")  # fmt: skip
        self._renamed_only = new not in reserved and not re.search(rf"\b{new}\b", expression) and "hardware" not in body
        changed = re.sub(rf"\b{old}\b", new, expression)
        body |= {"expression": changed, "inputs": {new if k == old else k: v for k, v in inputs.items()}}
        body["options"] = {"top_k": 1, "select": "model"}
        return body

    def _path(self) -> str:
        path = self._rng.choice(PATHS)
        path = path.replace("{z}", "0" * 64).replace("{long}", "a" * self._rng.choice((300, 5000, 40_000)))
        if self._rng.random() < 0.3:
            safe = self._rng.choice(HOSTILE).encode("utf-8", "surrogatepass")[:2000]
            return path.replace("@", self._marked("@") + quote(safe.replace(b"@", b"z"), safe=""))
        return path.replace("@", self._marker())


def _dumped(value: Any) -> str:
    """JSON in ASCII, with raw texts as they are and keys as often as they stand there."""
    parts: list[str] = []
    pending: list[Any] = [("value", value)]
    while pending:
        kind, at = pending.pop()
        if kind == "text":
            parts.append(at)
        elif isinstance(at, _Raw):
            parts.append(at if at.isascii() else json.dumps(str(at)))
        elif isinstance(at, dict | _Pairs):
            pairs = list(at.items()) if isinstance(at, dict) else list(at)
            pending.append(("text", "}"))
            for index in range(len(pairs) - 1, -1, -1):
                key, inner = pairs[index]
                pending.append(("value", inner))
                pending.append(("text", ("," if index else "") + json.dumps(str(key)) + ":"))
            pending.append(("text", "{"))
        elif isinstance(at, list):
            pending.append(("text", "]"))
            for index in range(len(at) - 1, -1, -1):
                pending.append(("value", at[index]))
                if index:
                    pending.append(("text", ","))
            pending.append(("text", "["))
        else:
            parts.append(json.dumps(at))
    return "".join(parts)
