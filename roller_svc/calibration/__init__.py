"""Micro-benchmarks of a device → its spec with measured figures; a spec beside the device."""

from __future__ import annotations

from roller_svc.calibration.calibrate import SECONDS, calibrated

__all__ = ["SECONDS", "calibrated"]
