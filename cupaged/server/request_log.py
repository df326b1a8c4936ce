"""The lines that a front end logs about its requests; prompts only if it is told so."""

from __future__ import annotations

import logging
from typing import Any

from cupaged.errors import BadValueError, ChatTemplateError, CupagedError
from cupaged.server.log_setup import log

_MAX_PROMPT_CHARS = 10_000
_OUR_FAULTS = frozenset({"INTERNAL", "UNKNOWN", "DATA_LOSS"})


def text_without_prompt(error: BaseException) -> str:
    """What an error says, less every value that may be a part of what the client sent as text."""
    if isinstance(error, BadValueError):
        plain = error.value is None or isinstance(error.value, bool | int | float)
        got = f"got {error.value!r}" if plain else f"got another {type(error.value).__name__}"
        return f"{error.name} must be {error.allowed}, {got}"
    if isinstance(error, ChatTemplateError):
        return "the chat template refused the messages"
    if isinstance(error, CupagedError):
        return str(error)
    return type(error).__name__


class RequestLog:
    """Lines about the requests of one front end.

    The end of a request is a line of level info, or warning where the server is to blame; its
    arrival is one of level debug. Each shows the id that `request_id_var` has in the caller's task.

    Args:
        logger: of the service that answers them.
        log_prompts: show the text or the token ids of a prompt, at its arrival and at level info,
            and errors with all they say.
    """

    def __init__(self, logger: logging.Logger, *, log_prompts: bool = False) -> None:
        self._logger = logger
        self._log_prompts = log_prompts

    def received(self, method: str, prompt: object = None, **fields: Any) -> None:
        """A request came in; the prompt is a text, token ids or messages."""
        if not self._log_prompts:
            log(self._logger, logging.DEBUG, "request received", method=method, **fields)
            return
        shown = str(prompt)
        if len(shown) > _MAX_PROMPT_CHARS:
            shown = f"{shown[:_MAX_PROMPT_CHARS]}... ({len(shown)} characters)"
        log(self._logger, logging.INFO, "request received", method=method, **fields, prompt=shown)

    def finished(self, method: str, *, reason: str, **fields: Any) -> None:
        """A request was answered to its end; fields such as prompt_tokens, tokens, seconds."""
        log(self._logger, logging.INFO, "request finished", method=method, reason=reason, **fields)

    def failed(
        self,
        method: str,
        *,
        code: str,
        reason: str = "",
        error: BaseException | None = None,
        **fields: Any,
    ) -> None:
        """A request ended with another status than OK.

        Args:
            method: of the service.
            code: name of the gRPC code.
            reason: that of the ErrorInfo, empty without one.
            error: its traceback is logged as well if it is none of cupaged's own.
            fields: what else is worth knowing.
        """
        ours = code in _OUR_FAULTS
        text = None
        if error is not None:
            text = str(error) if self._log_prompts else text_without_prompt(error)
        traceback = error if ours and not isinstance(error, CupagedError) else None
        level = logging.ERROR if traceback else logging.WARNING if ours else logging.INFO
        log(
            self._logger,
            level,
            "request failed",
            exc_info=traceback,
            method=method,
            code=code,
            reason=reason or None,
            error=text,
            **fields,
        )
