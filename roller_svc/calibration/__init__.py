"""Calibration: measure a device by micro-benchmarks, update its spec, or compare a spec with the device."""

from __future__ import annotations

from roller_svc.calibration.calibrate import SECONDS, adapt_to_this_machine, calibrate_spec
from roller_svc.calibration.check import Comparison, compare_spec
from roller_svc.calibration.cpu.spec import merge_calibrations, recompute_derived
from roller_svc.calibration.cuda.spec import calibrate_cuda, find_shipped_spec
from roller_svc.calibration.first_use import calibrate_at_first_use, pin_calibration
from roller_svc.calibration.presence import check_cuda, check_present

calibrated = calibrate_spec  # the former name

__all__ = [
    "SECONDS", "Comparison", "adapt_to_this_machine", "calibrate_at_first_use", "calibrate_cuda", "calibrate_spec",
    "calibrated", "check_cuda", "check_present", "compare_spec", "find_shipped_spec", "merge_calibrations",
    "pin_calibration", "recompute_derived",
]  # fmt: skip
