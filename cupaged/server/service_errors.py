"""Failures that only a service has, as part of the tree of `cupaged.errors`.

What they become on the wire is the table of `error_status`.
"""

from __future__ import annotations

from cupaged.errors import BadValueError, CupagedError, EngineError

__all__ = [
    "DeadlinePassedError",
    "MalformedRequestError",
    "NotAllowedError",
    "NumericalError",
    "PreconditionError",
    "TokenInvalidError",
    "TokenMissingError",
    "UnauthenticatedError",
    "UnknownModelError",
]


class MalformedRequestError(BadValueError):
    """The bytes of a request are no message, or a text in them is not UTF-8."""


class UnknownModelError(BadValueError):
    """A request names a model that is not served."""


class DeadlinePassedError(CupagedError):
    """The deadline of a call had passed when the call arrived."""


class NumericalError(EngineError):
    """The model computed values that are no numbers."""


class PreconditionError(CupagedError):
    """The server is in a state in which it cannot do this."""


class UnauthenticatedError(CupagedError):
    """The server does not know who calls."""


class TokenMissingError(UnauthenticatedError):
    """The call brings no bearer token."""


class TokenInvalidError(UnauthenticatedError):
    """The call brings a token that the server does not know."""


class NotAllowedError(CupagedError):
    """The token of the call is known, and does not allow this."""
