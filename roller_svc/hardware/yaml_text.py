"""YAML text ⇄ HardwareSpec. Untrusted YAML is limited: size, depth, no aliases, duplicate keys or tags."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import Any

import yaml

from roller_svc.hardware.mapping import spec_error, spec_of, to_mapping, validate
from roller_svc.ir.hardware import HardwareSpec

MAX_BYTES = 128 * 1024
MAX_DEPTH = 8  # a spec needs 4
_LIBYAML = hasattr(yaml, "CSafeLoader")  # without libyaml PyYAML parses the same, ten times slower
_BaseLoader: Any = yaml.CSafeLoader if _LIBYAML else yaml.SafeLoader


class _Loader(_BaseLoader):
    """safe_load that rejects duplicate keys, of which YAML silently takes the last."""

    def construct_mapping(
        self,
        node: yaml.MappingNode,
        deep: bool = False,  # noqa: FBT001, FBT002 - PyYAML calls it by position
    ) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen if isinstance(key, yaml.ScalarNode) else False:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value}", key.start_mark)
            seen.add(str(key.value))
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return mapping


# YAML 1.1 reads 80e9 and 5e-07 as text. Read them as numbers, so that JSON is valid YAML here.
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+"), list("-+0123456789"))


def load_yaml(text: str, where: str = "request") -> HardwareSpec:
    """Load a validated spec from YAML text. Raises SpecError with `where`, the field and its position in the text."""
    spec, problems = validate(parse_yaml(text, where))
    if spec is None:
        raise spec_error(problems, where, *Positions(text).locate(problems[0][0].split(".")))
    return spec_of(spec)


def to_yaml(spec: HardwareSpec) -> str:
    """Return the text of a spec file, the inverse of `load_yaml`. Empty fields are omitted."""
    data = _without_empty(to_mapping(spec))
    return str(yaml.safe_dump(data, sort_keys=False, width=120, default_flow_style=None, allow_unicode=True))


def _without_empty(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _without_empty(value) for key, value in data.items() if value not in (None, [])}
    return [_without_empty(item) for item in data] if isinstance(data, list) else data


def parse_yaml(text: str, where: str) -> object:
    """Return the value of YAML text. Raises SpecError."""
    if len(text.encode(errors="replace")) > MAX_BYTES:
        raise spec_error([("", f"more than {MAX_BYTES} bytes")], where)
    try:
        _check_structure(text, where)
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as broken:
        mark = broken.problem_mark
        at = (mark.line + 1, mark.column + 1) if mark else (None, None)
        raise spec_error([("", f"not YAML: {broken.problem or broken.context}"[:300])], where, *at) from broken
    except (yaml.YAMLError, ValueError, OverflowError) as broken:  # a control character; a 13th month; a 5000-digit int
        raise spec_error([("", f"not YAML: {str(broken)[:200]}")], where) from broken


def _check_structure(text: str, where: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_BaseLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or depth > MAX_DEPTH:
            what = "aliases are not allowed" if isinstance(event, yaml.AliasEvent) else "nested too deep"
            mark = event.start_mark
            raise spec_error([("", what)], where, *((mark.line + 1, mark.column + 1) if mark else (None, None)))


class Positions:
    """Positions of the parts of valid YAML text."""

    def __init__(self, text: str) -> None:
        self._root: yaml.Node | None = yaml.compose(text, Loader=_BaseLoader)
        self._fields: dict[int, dict[str, tuple[yaml.Node, yaml.Node]]] = {}  # of the mappings that were searched

    def locate(self, path: Sequence[str]) -> tuple[int, int]:
        """Return line and column, from 1, of the innermost part of a path that is in the text."""
        node, place = self._root, (1, 1)
        for part in path:
            at: yaml.Node | None
            if isinstance(node, yaml.MappingNode):
                at, node = self._fields_of(node).get(part, (None, None))
            elif isinstance(node, yaml.SequenceNode) and part.isdecimal() and int(part) < len(node.value):
                at = node = node.value[int(part)]
            else:
                at = None
            if at is None or at.start_mark is None:
                break
            place = (at.start_mark.line + 1, at.start_mark.column + 1)
        return place

    def _fields_of(self, node: yaml.MappingNode) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        if id(node) not in self._fields:
            self._fields[id(node)] = {str(key.value): (key, value) for key, value in node.value}
        return self._fields[id(node)]
