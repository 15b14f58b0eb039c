"""docs/hardware.md explains every field of a spec and lists every spec."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from roller_svc import hardware
from roller_svc.hardware.schema import LevelModel, LimitsModel, MeasuredModel, SourceModel, SpecModel, UnitModel

PAGE = (Path(__file__).parents[2] / "docs" / "hardware.md").read_text(encoding="utf-8")
SECTIONS = {
    "### Top level": SpecModel,
    "### `levels`": LevelModel,
    "### `units`": UnitModel,
    "### `limits`": LimitsModel,
    "### `sources`": SourceModel,
    "### `measured`": MeasuredModel,
}


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_field_is_explained(heading: str) -> None:
    model: type[BaseModel] = SECTIONS[heading]
    section = PAGE.split(f"\n{heading}\n")[1].split("\n#")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == unordered(model, section)


def unordered(model: type[BaseModel], section: str) -> list[str]:
    """The model's fields in the page's order, then what the page lacks."""
    return sorted(model.model_fields, key=lambda field: section.find(f"| `{field}` |") % (len(section) + 1))


def test_every_spec_is_listed_with_its_figures() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| (\S+) \| (\d+) \| ([\d,]+) \| ([\d.]+) \|", PAGE, re.MULTILINE)
    specs = [spec for spec in hardware.all_specs() if spec.id != hardware.LOCAL]
    assert rows == [
        (
            spec.id,
            str(spec.arch),
            str(spec.num_cores),
            f"{spec.dram.bandwidth_bytes_per_s / 1e9:,.0f}",
            f"{next(u for u in spec.units if u.in_dtype.value == 'float32').flops_per_s / 1e12:.3g}",
        )
        for spec in specs
    ]


def test_the_example_is_what_is_printed() -> None:
    assert "hwspecs/h100.yaml: num_coers: unknown field; did you mean num_cores?" in PAGE
    assert "hwspecs/h100.yaml: levels.1.latency_s: missing" in PAGE
