"""The lines of the log are an interface: their forms are golden, and no prompt is in them."""

from __future__ import annotations

import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator

import pytest

from cupaged.errors import (
    BadValueError,
    ChatTemplateError,
    ConfigError,
    InvalidParameterError,
    PromptError,
    QueueFullError,
)
from cupaged.server.log_setup import (
    JsonFormatter,
    TextFormatter,
    configure,
    log,
    request_id_var,
    set_level,
)
from cupaged.server.request_log import RequestLog, text_without_prompt

SECRET = "the secret words of a prompt"
LOGGER = logging.getLogger("cupaged.server.test")
MOMENT = 1795975200.0625  # 2026-11-29T18:00:00.0625Z
START = "2026-11-29T18:00:00.062Z"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Put the logging of the test process back, whatever a test configures."""
    root, own = logging.getLogger(), logging.getLogger("cupaged")
    before = (root.handlers[:], root.level, own.level)
    token = request_id_var.set("-")
    yield
    request_id_var.reset(token)
    logging.captureWarnings(False)
    root.handlers[:], level, own_level = before
    root.setLevel(level)
    own.setLevel(own_level)


def record(message: str, *args: object, **more: object) -> logging.LogRecord:
    return logging.makeLogRecord(
        {
            "name": "cupaged.server.test", "levelname": "INFO", "levelno": logging.INFO,
            "msg": message, "args": args, "created": MOMENT, "msecs": 62.5, **more,
        }
    )  # fmt: skip


def text(one: logging.LogRecord) -> str:
    return TextFormatter("frontend-1").format(one)


def as_json(one: logging.LogRecord) -> dict[str, object]:
    line = JsonFormatter("frontend-1").format(one)
    assert "\n" not in line
    assert line.isascii()
    value = json.loads(line)
    assert isinstance(value, dict)
    return value


def test_golden_text() -> None:
    fields = {"tokens": 12, "seconds": 1.23456789, "reason": "a b", "none": None, "empty": ""}
    assert text(record("loaded %s", "tiny")) == f"{START} INFO frontend-1 - loaded tiny"
    request_id_var.set("req-7")
    assert text(record("request finished", fields=fields)) == (
        f"{START} INFO frontend-1 req-7 request finished "
        'tokens=12 seconds=1.23457 reason="a b" empty=""'
    )


def test_golden_json() -> None:
    request_id_var.set("req-7")
    line = JsonFormatter("engine").format(record("loaded %s", "tiny", fields={"a": 1, "b": None}))
    assert line == (
        '{"ts": "2026-11-29T18:00:00.062Z", "level": "info", "logger": "cupaged.server.test", '
        f'"process": "engine", "pid": {os.getpid()}, "request_id": "req-7", '
        '"message": "loaded tiny", "fields": {"a": 1}}'
    )


def test_json_without_a_request() -> None:
    assert as_json(record("loaded"))["request_id"] is None


def test_lines_of_a_traceback_stand_alone_in_text() -> None:
    try:
        raise RuntimeError("two\nlines")
    except RuntimeError as error:
        one = record("it failed", exc_info=(type(error), error, error.__traceback__))
    lines = text(one).splitlines()
    assert lines[0] == f"{START} INFO frontend-1 - it failed"
    assert lines[1] == f"{START} INFO frontend-1 - | Traceback (most recent call last):"
    assert lines[-2:] == [
        f"{START} INFO frontend-1 - | RuntimeError: two",
        f"{START} INFO frontend-1 - | lines",
    ]
    assert str(as_json(one)["exception"]).endswith("RuntimeError: two\nlines")


@pytest.mark.parametrize("bad", ["a\nb", "a\r\x1b[31mb", "a\u2028b", "a\x00b", "\ud800"])
def test_nobody_forges_a_line(bad: str) -> None:
    request_id_var.set(f"{bad} INFO")
    one = record("message %s", bad, fields={"field": bad})
    line = text(one)
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    assert line.startswith(f'{START} INFO frontend-1 "')  # an id of several words is quoted
    line.encode()
    value = as_json(one)
    assert (value["message"], value["fields"]) == (f"message {bad}", {"field": bad})


def test_a_field_of_any_type_is_printed() -> None:
    value = as_json(record("x", fields={"error": ValueError("bad"), "set": {1}}))
    assert value["fields"] == {"error": "bad", "set": "{1}"}
    assert text(record("x", fields={"error": ValueError("bad one")})).endswith('error="bad one"')


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_configure(log_format: str) -> None:
    stream = io.StringIO()
    configure("engine", log_format=log_format, stream=stream)
    configure("engine", log_format=log_format, stream=stream)  # a second time adds nothing
    LOGGER.debug("hidden")
    LOGGER.info("shown")
    logging.getLogger("some.library").info("hidden")
    logging.getLogger("some.library").warning("of a library")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("careful", UserWarning, stacklevel=1)
    lines = stream.getvalue().splitlines()
    assert [("shown" in line, "of a library" in line) for line in lines[:2]] == [
        (True, False),
        (False, True),
    ]
    assert "careful" in stream.getvalue()
    assert "hidden" not in stream.getvalue()


def test_levels() -> None:
    stream = io.StringIO()
    configure("engine", level="warning", stream=stream)
    LOGGER.info("one")
    set_level("DEBUG")
    LOGGER.debug("two")
    set_level("error")
    LOGGER.warning("three")
    assert [line.split()[-1] for line in stream.getvalue().splitlines()] == ["two"]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^log_format must be 'text' or 'json', got 'xml'$"):
        configure("engine", log_format="xml")
    with pytest.raises(
        ConfigError, match=r"^log_level must be one of debug, info, warning, error, got 'loud'$"
    ):
        set_level("loud")


def lines_of(use: Callable[[RequestLog], None], *, log_prompts: bool, level: str) -> list[str]:
    """What a use of the request log prints after the time, in text."""
    stream = io.StringIO()
    configure("frontend-1", level=level, stream=stream)
    request_id_var.set("req-7")
    use(RequestLog(LOGGER, log_prompts=log_prompts))
    return [line.partition("Z ")[2] for line in stream.getvalue().splitlines()]


def life(requests: RequestLog) -> None:
    requests.received("Generate", SECRET, prompt_tokens=6)
    requests.finished("Generate", reason="stop", prompt_tokens=6, tokens=3, seconds=0.25)
    requests.failed("Generate", code="CANCELLED")
    full = QueueFullError("the queue is full")
    requests.failed("Generate", code="RESOURCE_EXHAUSTED", reason="QUEUE_FULL", error=full)
    requests.failed("Generate", code="INVALID_ARGUMENT", error=PromptError("prompt", SECRET, "x"))


ENDS = [
    "INFO frontend-1 req-7 request finished method=Generate reason=stop prompt_tokens=6 tokens=3 "
    "seconds=0.25",
    "INFO frontend-1 req-7 request failed method=Generate code=CANCELLED",
    "INFO frontend-1 req-7 request failed method=Generate code=RESOURCE_EXHAUSTED "
    'reason=QUEUE_FULL error="the queue is full"',
]
WITHOUT_VALUE = 'error="prompt must be x, got another str"'
FAILED = "INFO frontend-1 req-7 request failed method=Generate code=INVALID_ARGUMENT"


def test_golden_lines_of_requests() -> None:
    received = "DEBUG frontend-1 req-7 request received method=Generate prompt_tokens=6"
    ends = [*ENDS, f"{FAILED} {WITHOUT_VALUE}"]
    assert lines_of(life, log_prompts=False, level="info") == ends
    assert lines_of(life, log_prompts=False, level="debug") == [received, *ends]


def test_golden_lines_of_requests_with_prompts() -> None:
    received = "INFO frontend-1 req-7 request received method=Generate prompt_tokens=6"
    assert lines_of(life, log_prompts=True, level="info") == [
        f'{received} prompt="{SECRET}"',
        *ENDS,
        f"""{FAILED} error="prompt must be x, got '{SECRET}'\"""",
    ]


def test_a_long_prompt_is_cut() -> None:
    def use(requests: RequestLog) -> None:
        requests.received("Generate", "x" * 20_000)

    (line,) = lines_of(use, log_prompts=True, level="info")
    assert line.endswith('x... (20000 characters)"')
    assert len(line) < 10_200


def test_a_bug_is_an_error_with_its_traceback() -> None:
    def use(requests: RequestLog) -> None:
        try:
            raise RuntimeError("a bug")
        except RuntimeError as error:
            requests.failed("Generate", code="INTERNAL", error=error)

    lines = lines_of(use, log_prompts=False, level="info")
    start = "ERROR frontend-1 req-7"
    assert lines[0] == f"{start} request failed method=Generate code=INTERNAL error=RuntimeError"
    assert lines[1] == f"{start} | Traceback (most recent call last):"
    assert lines[-1] == f"{start} | RuntimeError: a bug"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PromptError("prompt", SECRET, "a text"), "prompt must be a text, got another str"),
        (PromptError("messages", [SECRET], "x"), "messages must be x, got another list"),
        (InvalidParameterError("top_p", 1.5, "in (0, 1]"), "top_p must be in (0, 1], got 1.5"),
        (BadValueError("n", None, "an integer"), "n must be an integer, got None"),
        (ChatTemplateError(f"it says: {SECRET}"), "the chat template refused the messages"),
        (QueueFullError("the queue is full"), "the queue is full"),
        (ValueError(SECRET), "ValueError"),
    ],
)  # fmt: skip
def test_errors_are_told_without_the_prompt(error: Exception, expected: str) -> None:
    assert text_without_prompt(error) == expected


def test_fields_cost_nothing_when_the_level_is_off() -> None:
    class Costly:
        def __str__(self) -> str:
            raise AssertionError("printed")

    configure("engine", level="warning", stream=io.StringIO())
    log(LOGGER, logging.INFO, "hidden", field=Costly())
