"""Decode server-sent events (WHATWG HTML §9.2)."""

from __future__ import annotations

import json

from pydantic import ValidationError

from roller_svc.client.schemas import OperationEvent
from roller_svc.errors import BuildServiceError


class EventDecoder:
    """Collects the lines of a stream into events."""

    def __init__(self) -> None:
        self._data: list[str] = []

    def feed(self, line: str) -> OperationEvent | None:
        """Take a line without its end; return the event that it completes. Raises BuildServiceError."""
        if line:
            name, _, value = line.partition(":")  # a comment has an empty name
            if name == "data":
                self._data.append(value.removeprefix(" "))
            return None
        if not self._data:
            return None
        text, self._data = "\n".join(self._data), []
        try:
            return OperationEvent.model_validate(json.loads(text))
        except (ValueError, ValidationError) as failure:
            raise BuildServiceError("unexpected event from the service", code="bad-answer") from failure
