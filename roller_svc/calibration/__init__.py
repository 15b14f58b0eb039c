"""Micro-benchmarks of a device → its spec with measured figures; a spec beside the device."""

from __future__ import annotations

from roller_svc.calibration.calibrate import SECONDS, calibrated, on_this_machine
from roller_svc.calibration.check import Comparison, compared
from roller_svc.calibration.cpu.spec import quietest, refigured
from roller_svc.calibration.cuda.spec import calibrated_cuda, shipped_spec
from roller_svc.calibration.presence import check_cuda, check_present

__all__ = [
    "SECONDS", "Comparison", "calibrated", "calibrated_cuda", "check_cuda", "check_present", "compared",
    "on_this_machine", "quietest", "refigured", "shipped_spec",
]  # fmt: skip
