"""Hardware specs: YAML or JSON → HardwareSpec, and the CPU at hand."""

from __future__ import annotations

from roller_svc.hardware.catalog import LOCAL, all_specs, detect_local, ids, load, refusal_of_local, shipped_specs
from roller_svc.hardware.mapping import from_mapping, to_mapping
from roller_svc.hardware.yaml_text import load_yaml, yaml_of

__all__ = [
    "LOCAL", "all_specs", "detect_local", "from_mapping", "ids", "load", "load_yaml", "refusal_of_local",
    "shipped_specs", "to_mapping", "yaml_of",
]  # fmt: skip
