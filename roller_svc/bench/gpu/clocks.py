"""Clocks, power and temperature of the device while something runs on it, as its driver's NVML tells them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
LIBRARY = "libnvidia-ml.so.1"
# nvml.h: nvmlClockType_t, nvmlTemperatureSensors_t
_SM_CLOCK, _MEMORY_CLOCK, _GPU_SENSOR = 1, 2, 0
# nvml.h, nvmlClocksThrottleReason...: what lowers clocks though there is work. Idle and settings of users do not count.
_SLOWING = {0x4: "power cap", 0x8: "hardware", 0x20: "temperature", 0x40: "hardware temperature", 0x80: "power brake"}


class Nvml:
    """One device of the driver's management library."""

    def __init__(self, library: Any, bus_id: str) -> None:
        """Raises OSError where NVML does not start or does not know the device."""
        self._library = library
        self._device = ctypes.c_void_p()
        self._require("nvmlInit_v2")
        self._require("nvmlDeviceGetHandleByPciBusId_v2", bus_id.encode(), ctypes.byref(self._device))

    def sample(self) -> Json:
        """What it answers now; a figure that the device does not tell is left out."""
        found: Json = {}
        for name, function, more, scale in (
            ("sm_mhz", "nvmlDeviceGetClockInfo", (_SM_CLOCK,), 1), ("memory_mhz", "nvmlDeviceGetClockInfo",
            (_MEMORY_CLOCK,), 1), ("power_w", "nvmlDeviceGetPowerUsage", (), 1000),
            ("temperature_c", "nvmlDeviceGetTemperature", (_GPU_SENSOR,), 1),
        ):  # fmt: skip
            value = ctypes.c_uint()
            if self._try(function, self._device, *more, ctypes.byref(value)) == 0:
                found[name] = value.value / scale if scale > 1 else value.value
        reasons = ctypes.c_ulonglong()
        if self._try("nvmlDeviceGetCurrentClocksThrottleReasons", self._device, ctypes.byref(reasons)) == 0:
            found["slowed_by"] = [text for bit, text in _SLOWING.items() if reasons.value & bit]
        return found

    def _require(self, function: str, *arguments: Any) -> None:
        code = self._try(function, *arguments)
        if code:
            raise OSError(f"{function} answers {code}")

    def _try(self, function: str, *arguments: Any) -> int:
        return int(getattr(self._library, function)(*arguments))


def nvml_library() -> Any:
    """Raises OSError where there is none."""
    return ctypes.CDLL(LIBRARY)


def open_nvml(bus_id: str) -> Nvml | None:
    """None where there is no NVML, or it does not tell of the device."""
    try:
        return Nvml(nvml_library(), bus_id)
    except (OSError, AttributeError):
        return None


@dataclass(slots=True)
class Watch:
    """Samples of a device, taken between those of a block of measurements."""

    samples: list[Json] = field(default_factory=list)

    def summary(self) -> Json:
        """The first, the last, the least and the most of each figure, and all that slowed it down."""
        if not self.samples:
            return {}
        names = [name for name in self.samples[0] if name != "slowed_by"]
        during = {
            name: [pick(values) for pick in (min, max)]
            for name in names if (values := [one[name] for one in self.samples if name in one])
        }  # fmt: skip
        slowed = sorted({reason for one in self.samples for reason in one.get("slowed_by", [])})
        return {"before": self.samples[0], "during": {**during, "slowed_by": slowed, "samples": len(self.samples)},
                "after": self.samples[-1]}  # fmt: skip
