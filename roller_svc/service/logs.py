"""Logs of services and workers: every record as one line of JSON or text, with its context, without secrets.

The package and its libraries log by the standard module. structlog holds the context (the ids of the request and the
operation, the client, the worker) and renders all records alike.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterable, Iterator
from typing import cast
from urllib.parse import unquote, urlsplit

import structlog
from pydantic import SecretStr
from structlog.typing import EventDict, Processor

from roller_svc.settings import LogFormat, Settings
from roller_svc.terminal import has_colors

REDACTED = "***"
MIN_SECRET_CHARACTERS = 6  # of a known value that is redacted wherever it appears
QUIET_LOGGERS = ("celery", "kombu", "amqp", "alembic", "httpx")  # which log each message at level info

# Each is searched only in a text that contains one of its marks (after case folding), which is quicker to find out.
_PATTERNS = (
    (("://",), re.compile(r"(://[^\s:/@\"']*:)[^\s@\"']+(?=@)"), rf"\g<1>{REDACTED}"),  # the password in a URL
    (("bearer", "basic"), re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]+", re.IGNORECASE), rf"\g<1> {REDACTED}"),
    (("rk_",), re.compile(r"\b(rk_[0-9a-f]{12}_)[A-Za-z0-9_-]{20,}"), rf"\g<1>{REDACTED}"),  # an API key of the database
    (("eyj",), re.compile(r"\beyJ[\w-]+\.[\w-]+\.[\w-]*"), REDACTED),  # a JSON web token
    (
        ("x-amz-",),
        re.compile(r"(X-Amz-(?:Signature|Credential|Security-Token)=)[^&\s\"']+", re.IGNORECASE),
        rf"\g<1>{REDACTED}",
    ),
)


class Redactor:
    """Removes secrets from text: what looks like one, and known values."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        known = {form for secret in secrets if len(secret) >= MIN_SECRET_CHARACTERS for form in _forms(secret)}
        longest_first = sorted(known, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first))) if known else None

    def redact(self, text: str) -> str:
        if self._known is not None:
            text = self._known.sub(REDACTED, text)
        folded = text.casefold()
        for marks, pattern, replacement in _PATTERNS:
            if any(mark in folded for mark in marks):
                text = pattern.sub(replacement, text)
        return text


class LogFormatter(logging.Formatter):
    """Renders a record of any library with the context of the thread or task that logs it.

    Args:
        log_format: JSON or text.
        redactor: is applied to the rendered line, so that no field escapes it.
        has_colors: whether text has the colours of a terminal.
    """

    def __init__(self, log_format: LogFormat, redactor: Redactor, *, has_colors: bool = False) -> None:
        renderer: Processor = structlog.processors.JSONRenderer(default=str)
        if log_format == "console":
            renderer = structlog.dev.ConsoleRenderer(colors=has_colors, exception_formatter=structlog.dev.plain_traceback)
        super().__init__()
        self._processors: tuple[Processor, ...] = (
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.ExtraAdder(),
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _drop_internals,
            structlog.processors.format_exc_info,
        )
        self._renderer = renderer
        self._redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        event: EventDict = {"event": record.getMessage(), "_record": record}
        if record.exc_info:
            event["exc_info"] = record.exc_info
        if record.stack_info:
            event["stack_info"] = record.stack_info
        for processor in self._processors:
            event = cast(EventDict, processor(None, record.levelname.lower(), event))
        return self._redactor.redact(str(self._renderer(None, record.levelname.lower(), event)))


def configure_logging(settings: Settings) -> None:
    """Make all loggers of this process write to the standard error stream, as the settings say."""
    handler = logging.StreamHandler(sys.stderr)
    redactor = Redactor(secrets_of(settings))
    handler.setFormatter(LogFormatter(settings.log_format, redactor, has_colors=has_colors(sys.stderr)))
    root = logging.getLogger()
    root.handlers = [handler]
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    root.setLevel(level)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    logging.captureWarnings(capture=True)


def secrets_of(settings: Settings) -> Iterator[str]:
    """Yield the secrets in the settings: keys, and the passwords of URLs."""
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, SecretStr) and (text := value.get_secret_value()):
            if "://" not in text:
                yield from (part.strip() for part in text.split(","))
            elif password := urlsplit(text).password:
                yield from (password, unquote(password))


def _drop_internals(logger: object, method: str, event: EventDict) -> EventDict:
    """Drop the record, and uvicorn's copy of its message for terminals."""
    event.pop("_record", None)
    event.pop("color_message", None)
    return event


def _forms(secret: str) -> tuple[str, ...]:
    """Return a secret as it is, and as it appears in JSON."""
    return secret, json.dumps(secret)[1:-1], repr(secret)[1:-1]
