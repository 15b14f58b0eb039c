"""YAML text → plain data, refusing what a stranger's YAML can do: size, depth, aliases, duplicate keys, tags."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

from roller_svc.errors import SpecError
from roller_svc.hardware.mapping import checked, from_mapping, refused
from roller_svc.hardware.schema import Problem
from roller_svc.ir.hardware import HardwareSpec

MOST_BYTES = 128 * 1024
MOST_DEPTH = 8  # a spec needs 4
_LIBYAML = hasattr(yaml, "CSafeLoader")  # a PyYAML built without libyaml reads the same, ten times slower
_BaseLoader: Any = yaml.CSafeLoader if _LIBYAML else yaml.SafeLoader


class _Loader(_BaseLoader):  # type: ignore[misc]  # the base is chosen at import
    """safe_load without duplicate keys, which YAML would silently let the last one win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen if isinstance(key, yaml.ScalarNode) else False:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} stands twice", key.start_mark)
            seen.add(str(key.value))
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return mapping


def load_yaml(text: str, where: str = "request") -> HardwareSpec:
    """A validated spec from YAML text; SpecError names `where`, the field, and where in the text it stands."""
    data = _plain_data(text, where)
    spec, problems = checked(data)
    if spec is None:
        line, column = _place(text, problems[0])
        raise refused(problems, where, line, column)
    return from_mapping(data, where)


def _plain_data(text: str, where: str) -> object:
    if len(text.encode()) > MOST_BYTES:
        raise refused([("", f"more than {MOST_BYTES} bytes")], where)
    try:
        _refuse_tricks(text)
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - _Loader is a SafeLoader
    except yaml.MarkedYAMLError as broken:
        mark = broken.problem_mark
        at = (mark.line + 1, mark.column + 1) if mark else (None, None)
        raise refused([("", f"not YAML: {broken.problem or broken.context}")], where, *at) from broken
    except (yaml.YAMLError, ValueError, OverflowError) as broken:  # a control character; 99 o'clock; a 5000-digit int
        raise refused([("", f"not YAML: {str(broken)[:200]}")], where) from broken


def _refuse_tricks(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_BaseLoader):
        if isinstance(event, yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases are not taken", problem_mark=event.start_mark)
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_DEPTH:
            raise yaml.MarkedYAMLError(problem="nested too deep", problem_mark=event.start_mark)


def _place(text: str, problem: Problem) -> tuple[int, int]:
    """Line and column, from 1, of the innermost part of a problem's path that the text has."""
    node = yaml.compose(text, Loader=_BaseLoader)
    mark = node.start_mark if node else yaml.Mark(None, 0, 0, 0, None, None)
    for part in problem[0].split("."):
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == part), None)
            if found is None:
                break
            mark, node = found[0].start_mark, found[1]
        elif isinstance(node, yaml.SequenceNode) and part.isdecimal() and int(part) < len(node.value):
            node = node.value[int(part)]
            mark = node.start_mark
        else:
            break
    return mark.line + 1, mark.column + 1
