"""Announce queued operations to workers, and receive announcements: by a broker, or within the process."""

from __future__ import annotations

import contextlib
import pkgutil
from typing import Any

from roller_svc.errors import ArgumentError
from roller_svc.farm.courier import Courier, Handover, InProcessCourier
from roller_svc.farm.runner import BuildRunner, InProcessBuilders
from roller_svc.settings import Settings

BROKER_POLL_S = 5.0  # how often idle builders look into the database though a broker announces operations
# By name, so that Celery is loaded only where there is a broker.
COURIER = "roller_svc.farm.celery_courier:CeleryCourier"
RECEIVER = "roller_svc.farm.celery_courier:CeleryReceiver"


class Announcements:
    """The courier of this process and the receiver of its builders.

    Args:
        settings: of this process.
        environment: of its operations.
    """

    def __init__(self, settings: Settings, environment: str) -> None:
        self._url = settings.broker.get_secret_value()
        self._environment = environment
        self._handover = Handover()
        self._receiver: Any = None
        self._courier: Courier | None = None

    @property
    def courier(self) -> Courier:
        """The courier, which connects when it is first needed: workers announce nothing."""
        if self._courier is None:
            self._courier = _load(COURIER)(self._url, self._environment) if self._url else InProcessCourier()
        return self._courier

    def create_builders(self, runner: BuildRunner, count: int) -> InProcessBuilders:
        """Return threads that build what is announced to this process."""
        if not self._url:
            courier = self.courier
            assert isinstance(courier, InProcessCourier)
            return InProcessBuilders(runner, courier.wait, count=count)
        if count:
            self._receiver = _load(RECEIVER)(self._url, self._environment, runner.worker.queues, self._handover.offer)
            self._receiver.start()
        return InProcessBuilders(runner, self._handover.wait, count=count, poll_s=BROKER_POLL_S)

    def close_builders(self) -> None:
        """Announce nothing more to the builders of this process, and wake those that wait."""
        self._handover.close()
        if isinstance(self._courier, InProcessCourier):
            self._courier.close()
        if self._receiver is not None:
            self._receiver.close()

    def close(self) -> None:
        if self._courier is not None:
            self._courier.close()


def _load(name: str) -> Any:
    """Import a class that needs Celery."""
    with contextlib.suppress(ModuleNotFoundError):
        return pkgutil.resolve_name(name)
    raise ArgumentError("ROLLER_BROKER: Celery is not installed", code="invalid-setting", hint="pip install 'roller-svc[farm]'")
