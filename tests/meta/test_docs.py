"""The docs say what is there: modules, verbs, routes, settings, functions; and their examples are programs."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from roller_svc.cli.command import COMMANDS
from roller_svc.frontend.lang import parse
from roller_svc.frontend.lang.names import FUNCTIONS
from roller_svc.ir.canonical import to_json
from roller_svc.ir.dtype import DType, dtype_named
from roller_svc.ir.kernel import Resources, RuntimeCheck
from roller_svc.ir.program import TensorType
from roller_svc.ir.tensor_map import MapMode, Swizzle, TensorMap
from roller_svc.runtime.saved import metadata, models
from roller_svc.service.app import create_app
from roller_svc.settings import Settings
from roller_svc.verify.lint import FindingKind

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = ["Status", "Context", "Decision", "Consequences"]
DECISIONS = ROOT / "docs" / "adr"
DOCS = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}


def test_the_map_has_every_folder_and_module() -> None:
    there = {
        path.name if path.suffix == ".py" else f"{path.name}/"
        for path in (ROOT / "roller_svc").iterdir()
        if (path.suffix == ".py" and not path.name.startswith("__")) or (path / "__init__.py").exists()
    }
    named = set(re.findall(r"`(?:roller_svc/)?(\w+(?:\.py|/))`", DOCS["map.md"]))
    assert sorted(name for name in there if name not in named) == []


def test_the_map_names_no_file_that_is_not_there() -> None:
    package = {path.name for path in (ROOT / "roller_svc").rglob("*.py")}
    benchmarks = {path.name for path in (ROOT / "bench").rglob("*.py")}
    known = package | benchmarks | {"test_contracts.py"}
    assert sorted(set(re.findall(r"(\w+\.py)\b", DOCS["map.md"])) - known) == []


def test_every_verb_is_described() -> None:
    assert [verb for verb in COMMANDS if f"`roller {verb}" not in DOCS["api.md"]] == []


def test_every_setting_is_described_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(ROLLER_\w+)` \| `?([^`|]*?)`? \|", DOCS["api.md"], re.MULTILINE))
    assert set(rows) == {f"ROLLER_{name.upper()}" for name in Settings.model_fields}
    for name, field in Settings.model_fields.items():
        shown = rows[f"ROLLER_{name.upper()}"]
        default = str(field.default)
        assert shown == (default.removesuffix(".0") if isinstance(field.default, float) else default) or shown == "none"


def test_formats_and_fields_of_saved_kernels_are_described() -> None:
    section = DOCS["api.md"].split("### Saved kernels")[1].split("\n### ")[0]
    assert re.findall(r"`(roller-kernel/\d+)`", DOCS["api.md"]) == [metadata.FORMAT]
    assert re.findall(r"`(roller-model/\d+)`", DOCS["api.md"]) == [models.FORMAT]
    view = TensorMap("map", "x", DType.FLOAT16, MapMode.TILED, (64, 64), (128,), (64, 64), (1, 1), (), (), Swizzle.B128)
    of_every_parameter = {"kind", "symbol", "bytes", "alignment"}
    described = set(to_json(metadata.MapParameter.of(view))) - of_every_parameter
    records = (metadata.Metadata, metadata.LaunchEntry, metadata.BufferEntry, metadata.PhaseEntry, metadata.FileEntry)
    described |= {field.name for record in (*records, metadata.Report, RuntimeCheck, Resources) for field in fields(record)}
    assert sorted(field for field in described if f"`{field}`" not in section) == []


def test_every_route_is_described(tmp_path: Path) -> None:
    app = create_app(Settings(store=tmp_path))
    paths = [path.replace("operation_id", "id").replace("device_id", "id") for path in app.openapi()["paths"]]
    assert len(paths) == 32
    assert [path for path in paths if path not in DOCS["api.md"]] == []


def test_every_function_and_type_is_described() -> None:
    words = set(re.findall(r"\w+", DOCS["language.md"]))
    kinds = {function.kind for name, function in FUNCTIONS.items() if name in words}
    assert {function.kind for function in FUNCTIONS.values() if function.kind.value.isidentifier()} <= kinds
    assert {dtype.value for dtype in DType} <= words


@pytest.mark.parametrize("example", re.findall(r"^```tensor\n(.*?)^```$", DOCS["language.md"], re.MULTILINE | re.DOTALL))
def test_the_language_page_has_programs_that_parse(example: str) -> None:
    inputs = {}
    for name, dtype, shape in re.findall(r"^# (\w+): (\w+)\[([\d, ]+)\]$", example, re.MULTILINE):
        kind = dtype_named(dtype)
        assert kind is not None
        inputs[name] = TensorType(kind, tuple(int(extent) for extent in shape.split(",")))
    program = parse(example, inputs, None)
    assert program.outputs


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_to_pages_and_headings() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for link, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", page.read_text(encoding="utf-8")):
            target = page.parent / link if link else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}#{anchor}"


def test_numbers_of_decisions_are_unique_and_none_is_lost() -> None:
    """A decision that moved to another page leaves its number in the table of docs/adr/README.md."""
    numbers = [path.name[:4] for path in DECISIONS.glob("[0-9]*.md")]
    moved = re.findall(r"^\| (\d{4}) \|", (DECISIONS / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(numbers + moved) == sorted({*numbers, *moved})
    assert {f"{number:04}" for number in range(1, int(max(moved)) + 1)} <= {*numbers, *moved}


@pytest.mark.parametrize("path", sorted(DECISIONS.glob("[0-9]*.md")), ids=lambda path: path.name[:4])
def test_decisions_have_the_sections_of_the_template(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.match(rf"# {path.name[:4]}\. [A-Z]", text)
    sections = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert sections in (SECTIONS, [*SECTIONS, "Alternatives considered"])


def test_paths_in_pages_exist() -> None:
    """Paths in backquotes are below the root, the package or docs/."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        paths = re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.(?:py|h|cpp|json|md))`", page.read_text(encoding="utf-8"))
        roots = (ROOT, ROOT / "roller_svc", ROOT / "docs")
        assert [path for path in paths if not any((root / path).exists() for root in roots)] == [], page.name


def test_every_finding_of_lint_is_described() -> None:
    assert [kind.value for kind in FindingKind if f"`{kind.value}`" not in DOCS["api.md"]] == []
