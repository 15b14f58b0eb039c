"""YAML text → plain data, refusing what a stranger's YAML can do: size, depth, aliases, duplicate keys, tags."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from roller_svc.hardware.mapping import checked, refused, spec_of, to_mapping
from roller_svc.hardware.schema import Problem
from roller_svc.ir.hardware import HardwareSpec

MOST_BYTES = 128 * 1024
MOST_DEPTH = 8  # a spec needs 4
_LIBYAML = hasattr(yaml, "CSafeLoader")  # a PyYAML built without libyaml reads the same, ten times slower
_BaseLoader: Any = yaml.CSafeLoader if _LIBYAML else yaml.SafeLoader


class _Loader(_BaseLoader):  # type: ignore[misc]  # the base is chosen at import
    """safe_load without duplicate keys, which YAML would silently let the last one win."""

    def construct_mapping(
        self,
        node: yaml.MappingNode,
        deep: bool = False,  # noqa: FBT001, FBT002 - PyYAML calls it by position
    ) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen if isinstance(key, yaml.ScalarNode) else False:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} stands twice", key.start_mark)
            seen.add(str(key.value))
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return mapping


# YAML 1.1 takes 80e9 and 5e-07 for text: read them as the numbers they are, so that JSON is YAML here.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+"), list("-+0123456789")
)


def load_yaml(text: str, where: str = "request") -> HardwareSpec:
    """A validated spec from YAML text; SpecError names `where`, the field, and where in the text it stands."""
    spec, problems = checked(_plain_data(text, where))
    if spec is None:
        raise refused(problems, where, *_place(text, problems[0]))
    return spec_of(spec)


def yaml_of(spec: HardwareSpec) -> str:
    """The text of a spec file, which `load_yaml` takes; fields that say nothing are left out."""
    stated = _stated(to_mapping(spec))
    return str(yaml.safe_dump(stated, sort_keys=False, width=120, default_flow_style=None, allow_unicode=True))


def _stated(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _stated(value) for key, value in data.items() if value not in (None, [])}
    return [_stated(item) for item in data] if isinstance(data, list) else data


def _plain_data(text: str, where: str) -> object:
    if len(text.encode(errors="replace")) > MOST_BYTES:
        raise refused([("", f"more than {MOST_BYTES} bytes")], where)
    try:
        _refuse_tricks(text, where)
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as broken:
        mark = broken.problem_mark
        at = (mark.line + 1, mark.column + 1) if mark else (None, None)
        raise refused([("", f"not YAML: {broken.problem or broken.context}"[:300])], where, *at) from broken
    except (yaml.YAMLError, ValueError, OverflowError) as broken:  # a control character; a 13th month; a 5000-digit int
        raise refused([("", f"not YAML: {str(broken)[:200]}")], where) from broken


def _refuse_tricks(text: str, where: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_BaseLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or depth > MOST_DEPTH:
            what = "aliases are not taken" if isinstance(event, yaml.AliasEvent) else "nested too deep"
            mark = event.start_mark
            raise refused([("", what)], where, *((mark.line + 1, mark.column + 1) if mark else (None, None)))


def _place(text: str, problem: Problem) -> tuple[int, int]:
    """Line and column, from 1, of the innermost part of a problem's path that the text has."""
    node = yaml.compose(text, Loader=_BaseLoader)
    place = (1, 1)
    for part in problem[0].split("."):
        at: yaml.Node | None
        if isinstance(node, yaml.MappingNode):
            at, node = next(((key, value) for key, value in node.value if key.value == part), (None, None))
        elif isinstance(node, yaml.SequenceNode) and part.isdecimal() and int(part) < len(node.value):
            at = node = node.value[int(part)]
        else:
            at = None
        if at is None or at.start_mark is None:
            break
        place = (at.start_mark.line + 1, at.start_mark.column + 1)
    return place
