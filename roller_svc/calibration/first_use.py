"""Calibrate the host CPU at the first use of `local`. See docs/adr/0040-calibrate-local-at-first-use.md.

The edges call this before they load `local`: the command line, the Python API, the start of the service. Worker
processes do not; they read what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Lock

from roller_svc import hardware, toolchain
from roller_svc.calibration.calibrate import calibrate_briefly
from roller_svc.errors import BuildError
from roller_svc.hardware.calibration_cache import (
    calibrated_path,
    find_calibrated,
    has_failed_lately,
    load_calibrated,
    lock_calibration,
    note_failure,
    save_calibrated,
)
from roller_svc.settings import pin_local, settings

FIRST_USE_SECONDS = 4.5
_attempt = Lock()
_has_attempted: list[bool] = []  # in this process: a busy machine delays one command, not each call


def calibrate_at_first_use(targets: Iterable[object], report: Callable[[str], None]) -> None:
    """Measure the host CPU for some seconds if `local` is among the targets and has no measured values yet.

    ROLLER_LOCAL_SPEC and ROLLER_CALIBRATE=0 prevent it. If it fails, `local` keeps its assumed rates, and no process
    tries again for an hour. Without a compiler it does nothing: whatever needs one says so.

    Args:
        targets: ids of devices, or specs.
        report: receives one line before a measurement, and one if it fails.
    """
    if hardware.LOCAL not in [target for target in targets if isinstance(target, str)]:
        return
    with _attempt:
        current = settings()
        if _has_attempted or current.local_spec is not None or not current.calibrate:
            return
        if hardware.LOCAL not in hardware.ids():
            return  # loading it says why
        _has_attempted.append(True)
        if hardware.calibrated_local() is None:
            _calibrate(report)
            hardware.forget_local()


def pin_calibration(report: Callable[[str], None]) -> None:
    """Calibrate at first use, and make the child processes of this one use the same spec of `local`."""
    calibrate_at_first_use((hardware.LOCAL,), report)
    if settings().local_spec is None:
        is_calibrated = hardware.LOCAL in hardware.ids() and hardware.calibrated_local() is not None
        pin_local(find_calibrated(hardware.detect_local()) if is_calibrated else None)


def _calibrate(report: Callable[[str], None]) -> None:
    """Measure and store the spec, unless another process has stored one meanwhile."""
    detected = hardware.detect_local()
    if has_failed_lately(detected) or not toolchain.availability(detected).ok:
        return
    try:
        with lock_calibration(detected):
            if load_calibrated(detected) is None:
                report(
                    f"measuring this CPU for about {FIRST_USE_SECONDS:g} s, once, for {calibrated_path(detected)} "
                    "(ROLLER_CALIBRATE=0 or --no-calibrate: use assumed rates)"
                )
                save_calibrated(calibrate_briefly(detected, FIRST_USE_SECONDS))
    except (BuildError, OSError) as failure:
        reason = f"{failure.message} ({failure.code})" if isinstance(failure, BuildError) else str(failure)
        note_failure(detected)
        report(f"this CPU is not measured, `local` has assumed rates; a use in an hour tries again: {reason}")
