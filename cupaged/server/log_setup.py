"""Logs of the server's processes: text for people, JSON for machines, a request id in every line.

text:  2026-11-30T18:00:00.123Z INFO frontend-1 req-7 request finished reason=stop tokens=12
json:  {"ts": ..., "level": ..., "logger": ..., "process": ..., "pid": ..., "request_id": ...,
        "message": ..., "fields": {...}}, and "exception" where there is one

A record is one line; the lines of a traceback in text form begin as its record does, so that lines
of several processes may mix. Whatever a client sent is printed without its control characters.
`request_log.py` makes the lines about requests.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from contextvars import ContextVar
from typing import Any, Protocol

from cupaged.errors import ConfigError

FORMATS = ("text", "json")
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
NO_REQUEST = "-"
# Set by whoever works on a request, in its task: `request_id_var.set(request_id)`.
request_id_var: ContextVar[str] = ContextVar("request_id", default=NO_REQUEST)

_OWN = "cupaged"
_FIELDS = "fields"
_PLAIN = re.compile(r"[^\s\"'=\\]+")


class TextOutput(Protocol):
    """Takes lines."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> object: ...


def configure(
    process: str,
    *,
    log_format: str = "text",
    level: str = "info",
    stream: TextOutput | None = None,
) -> None:
    """Send the logs of this process to one stream. Call it once, first thing in the process.

    Libraries are heard from level warning on, cupaged from `level` on.

    Args:
        process: its name in the lines: "supervisor", "engine", "frontend-1".
        log_format: "text" or "json".
        level: "debug", "info", "warning" or "error".
        stream: standard error by default.

    Raises:
        ConfigError: an unknown format or level.
    """
    if log_format not in FORMATS:
        raise ConfigError("log_format", log_format, " or ".join(map(repr, FORMATS)))
    set_level(level)
    to: TextOutput = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(to)
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else TextFormatter(process))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)


def set_level(level: str) -> None:
    """Change from which level on cupaged's own lines are printed.

    Raises:
        ConfigError: an unknown level.
    """
    if not isinstance(level, str) or level.lower() not in LEVELS:
        raise ConfigError("log_level", level, f"one of {', '.join(LEVELS)}")
    logging.getLogger(_OWN).setLevel(LEVELS[level.lower()])


def log(
    logger: logging.Logger,
    level: int,
    message: str,
    *,
    exc_info: BaseException | None = None,
    **fields: Any,
) -> None:
    """Log a message with fields.

    They are an object in JSON, and `name=value` after the message in text; None is left out.
    """
    if logger.isEnabledFor(level):
        logger.log(level, "%s", message, exc_info=exc_info, extra={_FIELDS: fields})


class TextFormatter(logging.Formatter):
    """Time, level, process, request id, message, fields: one line a record."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record, and one for each line of its traceback."""
        request_id = _text_value(request_id_var.get())
        start = f"{_time(record)} {record.levelname} {self._process} {request_id}"
        parts = [_printable(record.getMessage())]
        parts += (
            f"{name}={_text_value(value)}"
            for name, value in getattr(record, _FIELDS, {}).items()
            if value is not None
        )
        lines = [" ".join(parts), *map(_printable, self._traceback(record))]
        return "\n".join(f"{start} {line}" for line in lines)

    def _traceback(self, record: logging.LogRecord) -> list[str]:
        text = _exception(self, record)
        return [] if text is None else [f"| {line}" for line in text.splitlines()]


class JsonFormatter(logging.Formatter):
    """One JSON object a line, in ASCII."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        fields = getattr(record, _FIELDS, {})
        line: dict[str, Any] = {
            "ts": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "pid": os.getpid(),
            "request_id": request_id_var.get(),
            "message": record.getMessage(),
            _FIELDS: {name: value for name, value in fields.items() if value is not None},
        }
        if line["request_id"] == NO_REQUEST:
            line["request_id"] = None
        exception = _exception(self, record)
        if exception is not None:
            line["exception"] = exception
        return json.dumps(line, default=str)


def _time(record: logging.LogRecord) -> str:
    """UTC with milliseconds."""
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03}Z"


def _printable(text: str) -> str:
    """A text without line breaks and other control characters, which become escapes."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def _text_value(value: object) -> str:
    """A value of a field: bare if it is one word, else as a JSON string."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return _printable(text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False))


def _exception(formatter: logging.Formatter, record: logging.LogRecord) -> str | None:
    parts = []
    if record.exc_info and record.exc_info[0] is not None:
        parts.append(formatter.formatException(record.exc_info))
    elif record.exc_text:
        parts.append(record.exc_text)
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return "\n".join(parts) if parts else None
