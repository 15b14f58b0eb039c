"""Write the tables of operators in docs/models.md: ONNX operators, and overloads of ATen operators if torch is there.

`python tools/list_model_operators.py` replaces the parts of the page between the comments that name this file. The
operator sets are those of the installed onnx package.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx
import onnx.defs

from roller_svc.frontend.onnx.expansions import EXPANSIONS
from roller_svc.frontend.onnx.microsoft import DOMAIN as MICROSOFT_DOMAIN
from roller_svc.frontend.onnx.microsoft import MICROSOFT, SAME
from roller_svc.frontend.onnx.microsoft.functions import FUNCTIONS
from roller_svc.frontend.onnx.model import DOMAINS
from roller_svc.frontend.onnx.subgraphs import SUBGRAPHS
from roller_svc.frontend.onnx.table import NODES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
# Why an operator is refused → operators.
REFUSED = {
    "random numbers": ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
                       "RandomUniformLike"),
    "sequences and optional values": (
        "ConcatFromSequence", "Optional", "OptionalGetElement", "OptionalHasElement", "SequenceAt",
        "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap",
        "SplitToSequence",
    ),
    "strings and encoded images": ("ImageDecoder", "RegexFullMatch", "StringConcat", "StringNormalizer",
                                   "StringSplit", "TfIdfVectorizer"),
    "a shape that depends on data": ("NonMaxSuppression",),
    "not written yet": ("MaxRoiPool",),
}  # fmt: skip


def onnx_schemas() -> dict[str, Any]:
    """Return the latest schema of each operator of the default domain."""
    schemas: dict[str, Any] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        latest = schemas.get(schema.name)
        if schema.domain in DOMAINS and (latest is None or latest.since_version < schema.since_version):
            schemas[schema.name] = schema
    return schemas


def onnx_table() -> str:
    """Return the table of ONNX operators by how they are converted."""
    schemas = onnx_schemas()
    known = NODES.keys() | EXPANSIONS.keys() | SUBGRAPHS.keys()
    refused = {name for names in REFUSED.values() for name in names}
    bodies = {
        name
        for name, schema in schemas.items()
        if (schema.has_function or schema.has_context_dependent_function) and name not in known | refused
    }
    rows = [
        ("one call of a named operator", NODES.keys() - EXPANSIONS.keys()),
        ("several calls, several results, or a constant", EXPANSIONS.keys()),
        ("a loop node, or a branch", SUBGRAPHS.keys()),
        ("the function body of its schema", bodies),
        *((f"refused: {reason}", names) for reason, names in REFUSED.items()),
    ]
    listed = sorted(name for _, names in rows for name in names)
    if listed != sorted(known | schemas.keys()):
        raise SystemExit(f"REFUSED is not what the tables lack: {sorted(set(listed) ^ (known | schemas.keys()))}")
    lines = [f"| {how} | {_quoted(names)} |" for how, names in rows]
    lines.append(f"| operators of `{MICROSOFT_DOMAIN}` | {_quoted({*FUNCTIONS, *MICROSOFT, *SAME})} |")
    return "\n".join(["| becomes | ONNX operators |", "|---|---|", *lines]) + "\n"


def aten_list() -> str:
    """Return the overloads of ATen operators, those of one operator together. Needs torch."""
    from roller_svc.frontend.torch.aten import ATEN  # noqa: PLC0415 - loads torch

    overloads: dict[str, list[str]] = {}
    for name in sorted(ATEN):
        operator, _, overload = name.removeprefix("aten.").rpartition(".")
        overloads.setdefault(operator, []).append(overload)
    parts = [f"`{name}`" if names == ["default"] else f"`{name}.{'/'.join(names)}`" for name, names in overloads.items()]
    return " ".join(parts) + "\n"


def replaced(page: str, part: str, text: str) -> str:
    """Return the page with the text of a part in place of what is there."""
    pattern = rf"(<!-- {part}: tools/list_model_operators\.py -->\n\n).*?(\n<!-- end -->)"
    return re.sub(pattern, lambda match: match[1] + text + match[2], page, flags=re.DOTALL)


def _quoted(names: Iterable[str]) -> str:
    return " ".join(f"`{name}`" for name in sorted(names))


def main() -> None:
    page = replaced(PAGE.read_text(encoding="utf-8"), "onnx", onnx_table())
    if find_spec("torch") is not None:
        page = replaced(page, "aten", aten_list())
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
