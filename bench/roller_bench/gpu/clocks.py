"""Read clocks, power and temperature of the device through NVML while kernels run."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
LIBRARY = "libnvidia-ml.so.1"
# nvml.h: nvmlClockType_t, nvmlTemperatureSensors_t
_SM_CLOCK, _MEMORY_CLOCK, _GPU_SENSOR = 1, 2, 0
# nvml.h, nvmlClocksThrottleReason*: throttling under load. Idle and user settings do not count.
_SLOWING = {0x4: "power cap", 0x8: "hardware", 0x20: "temperature", 0x40: "hardware temperature", 0x80: "power brake"}


class Nvml:
    """One device of the driver's management library."""

    def __init__(self, library: Any, bus_id: str) -> None:
        """Open the device; raise OSError if NVML does not start or does not know it."""
        self._library = library
        self._device = ctypes.c_void_p()
        self._require("nvmlInit_v2")
        self._require("nvmlDeviceGetHandleByPciBusId_v2", bus_id.encode(), ctypes.byref(self._device))

    def sample(self) -> Json:
        """Read all values; a value that the device does not report is left out."""
        values_by_name: Json = {}
        for name, function, extra, scale in (
            ("sm_mhz", "nvmlDeviceGetClockInfo", (_SM_CLOCK,), 1),
            ("memory_mhz", "nvmlDeviceGetClockInfo", (_MEMORY_CLOCK,), 1),
            ("power_w", "nvmlDeviceGetPowerUsage", (), 1000),
            ("temperature_c", "nvmlDeviceGetTemperature", (_GPU_SENSOR,), 1),
        ):
            value = ctypes.c_uint()
            if self._try(function, self._device, *extra, ctypes.byref(value)) == 0:
                values_by_name[name] = value.value / scale if scale > 1 else value.value
        reasons = ctypes.c_ulonglong()
        if self._try("nvmlDeviceGetCurrentClocksThrottleReasons", self._device, ctypes.byref(reasons)) == 0:
            values_by_name["slowed_by"] = [text for bit, text in _SLOWING.items() if reasons.value & bit]
        return values_by_name

    def _require(self, function: str, *arguments: Any) -> None:
        code = self._try(function, *arguments)
        if code:
            raise OSError(f"{function}: expected 0, got {code}")

    def _try(self, function: str, *arguments: Any) -> int:
        return int(getattr(self._library, function)(*arguments))


def nvml_library() -> Any:
    """Load NVML; raise OSError if there is none."""
    return ctypes.CDLL(LIBRARY)


def open_nvml(bus_id: str) -> Nvml | None:
    """Open a device, or return None if NVML or the device is not available."""
    try:
        return Nvml(nvml_library(), bus_id)
    except (OSError, AttributeError):
        return None


@dataclass(slots=True)
class Watch:
    """Readings of a device, taken between the rounds of a block of samples."""

    samples: list[Json] = field(default_factory=list)

    def summary(self) -> Json:
        """Return the first and last reading, minimum and maximum of each value, and all throttle reasons."""
        if not self.samples:
            return {}
        names = [name for name in self.samples[0] if name != "slowed_by"]
        during = {
            name: [pick(values) for pick in (min, max)]
            for name in names
            if (values := [reading[name] for reading in self.samples if name in reading])
        }
        slowed = sorted({reason for reading in self.samples for reason in reading.get("slowed_by", [])})
        return {
            "before": self.samples[0],
            "during": {**during, "slowed_by": slowed, "samples": len(self.samples)},
            "after": self.samples[-1],
        }
