"""Who may call: bearer tokens, from a file or from the environment.

The file has a token a line; empty lines and lines that begin with # are passed over. A token alone
may call the services of generation; `TOKEN admin` may call AdminService, too. The file is read
again when it changes; one that cannot be read, or holds no token, changes nothing and is logged.
The one token that the environment may hold allows everything. grpc.health.v1 needs no token.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from cupaged.errors import ConfigError, CupagedError
from cupaged.server.error_status import status_of
from cupaged.server.service_errors import NotAllowedError, TokenInvalidError, TokenMissingError
from cupaged.server.settings import API_KEY_VARIABLE

_ADMIN = "admin"
_ADMIN_PREFIX = "/cupaged.v1.AdminService/"
_OPEN_PREFIXES = ("/grpc.health.v1.Health/",)
_CHECK_SECONDS = 1.0
_MAX_FILE_BYTES = 1 << 20
_SHOWN_CHARS = 200
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Token:
    digest: bytes  # what is compared: equal lengths, whatever the token
    is_admin: bool


class Tokens:
    """The tokens that are valid now.

    Args:
        path: of the file; None for no file.
        secret: a token that allows everything; space around it does not count.
        clock: seconds, monotonic; the file is looked at once a second at most.

    Raises:
        ConfigError: it cannot be read, or holds no token or a line that is none.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        secret: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = None if path is None else Path(path)
        self._secret = [] if secret is None else [_Token(_digest(_word(secret)), is_admin=True)]
        self._clock = clock
        self._stamp = self._stat()
        self._tokens = self._read()
        self._next_look = clock() + _CHECK_SECONDS

    def find(self, token: str) -> _Token | None:
        """The token, if it is one; takes equally long whichever it is."""
        self._look()
        digest = _digest(token)
        found = None
        for known in (*self._secret, *self._tokens):
            if hmac.compare_digest(known.digest, digest):
                found = known
        return found

    def _look(self) -> None:
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + _CHECK_SECONDS
        stamp = self._stat()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._tokens = self._read()
            _logger.info("api_key_file: read again, %d tokens", len(self._tokens))
        except ConfigError as error:
            _logger.error("the tokens stay as they are: %s", error)

    def _stat(self) -> tuple[int, int, int] | None:
        if self._path is None:
            return None
        try:
            stat = os.stat(self._path)
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns, stat.st_size

    def _read(self) -> list[_Token]:
        if self._path is None:
            return []
        try:
            with self._path.open("rb") as file:
                content = file.read(_MAX_FILE_BYTES + 1)
            text = content.decode("ascii")
        except OSError as error:
            raise ConfigError(
                "api_key_file", str(self._path), f"a file that can be read ({error.strerror})"
            ) from None
        except UnicodeDecodeError:
            raise ConfigError("api_key_file", str(self._path), "a file of ASCII text") from None
        if len(content) > _MAX_FILE_BYTES:
            allowed = f"a file of at most {_MAX_FILE_BYTES} bytes"
            raise ConfigError("api_key_file", str(self._path), allowed)
        tokens = []
        for number, line in enumerate(text.splitlines(), start=1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if words[1:] not in ([], [_ADMIN]):
                raise ConfigError(
                    f"api_key_file, line {number}",  # what it holds is a secret
                    f"{len(words)} words",
                    f"a token, or a token and the word {_ADMIN!r}",
                )
            tokens.append(_Token(_digest(words[0]), is_admin=len(words) > 1))
        if not tokens:
            raise ConfigError("api_key_file", str(self._path), "a file with at least one token")
        return tokens


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a token that allows them."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler of the method, or one that refuses."""
        method = str(handler_call_details.method)
        if not method.startswith(_OPEN_PREFIXES):
            error = self._check(method, dict(handler_call_details.invocation_metadata or ()))
            if error is not None:
                return _refusal(method, error)
        return await continuation(handler_call_details)

    def _check(self, method: str, metadata: dict[str, str | bytes]) -> CupagedError | None:
        scheme, _, token = str(metadata.get("authorization", "")).partition(" ")
        if not token:
            return TokenMissingError("the call needs the metadata 'authorization: Bearer TOKEN'")
        known = self._tokens.find(token.strip())
        if scheme.lower() != "bearer" or known is None:
            return TokenInvalidError("the server does not know this token")
        if method.startswith(_ADMIN_PREFIX) and not known.is_admin:
            return NotAllowedError("this token does not allow the calls of AdminService")
        return None


def _refusal(method: str, error: CupagedError) -> grpc.RpcMethodHandler[Any, Any]:
    """Ends a call of any kind before its request is read."""
    status = status_of(error)

    async def refuse(requests: Any, context: Any) -> None:
        _logger.info("refused %s of %s: %s", method[:_SHOWN_CHARS], context.peer(), error)
        await context.abort_with_status(status)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _word(secret: str) -> str:
    word = secret.strip()
    if not word or not word.isascii() or not word.isprintable() or " " in word:
        raise ConfigError(API_KEY_VARIABLE, "...", "a token: printable ASCII without spaces")
    return word


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
