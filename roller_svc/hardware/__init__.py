"""Hardware specs: YAML or JSON → HardwareSpec, and detection of the local CPU."""

from __future__ import annotations

from roller_svc.hardware.catalog import (
    LOCAL,
    all_specs,
    calibrated_local,
    detect_local,
    expand_targets,
    find_id,
    find_meanings,
    forget_local,
    ids,
    load,
    local_spec_error,
    shipped_specs,
)
from roller_svc.hardware.faults import SpecFault, find_faults
from roller_svc.hardware.mapping import from_mapping, to_mapping
from roller_svc.hardware.yaml_text import load_yaml, to_yaml

__all__ = [
    "LOCAL", "SpecFault", "all_specs", "calibrated_local", "detect_local", "expand_targets", "find_faults", "find_id",
    "find_meanings", "forget_local", "from_mapping", "ids", "load", "load_yaml", "local_spec_error", "shipped_specs",
    "to_mapping", "to_yaml",
]  # fmt: skip
