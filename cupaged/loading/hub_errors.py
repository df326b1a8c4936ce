"""What goes wrong at the hub, told in one line each.

Owns the translation of what `huggingface_hub`, the HTTP library beneath it and the disk raise into
the error tree. An access token is never part of a message. Nothing else is caught.
"""

from __future__ import annotations

import errno
import json
import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from cupaged.errors import CupagedError, HubError, HubUnreachableError, ModelNotFoundError
from cupaged.loading.hub_name import HubName

__all__ = ["DISK_FULL", "check_token", "hub_errors", "is_lost_connection", "shown_endpoint"]

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# The library has changed its HTTP library twice; they share no classes, but are known by name.
_HTTP_LIBRARIES = {"requests", "urllib3", "httpx", "httpcore", "httpx2", "httpcore2"}
_NETWORK_ERRORS = (ConnectionError, TimeoutError, socket.gaierror, ssl.SSLError)


@contextmanager
def hub_errors(name: HubName, file: str | None = None) -> Iterator[None]:
    """Turn what the library raises inside into errors of the tree.

    The original is not chained: its text or its requests may hold what must not be shown. An error
    that says that the disk is full passes, as only the caller knows how much was needed.
    """
    try:
        yield
    except CupagedError:
        raise
    except Exception as error:
        translated = _translated(error, name, file)
        if translated is None:
            raise
        raise translated from None


def check_token() -> None:
    """Refuse an access token that no request can carry, before a library quotes it in an error."""
    from huggingface_hub import get_token

    token = get_token()
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        raise HubError("the access token (HF_TOKEN) has a character that no token has: set it anew")


def is_lost_connection(error: Exception) -> bool:
    """Whether the network failed, rather than the hub answered with a refusal."""
    from huggingface_hub.errors import HfHubHTTPError

    libraries = {base.__module__.partition(".")[0] for base in type(error).__mro__}
    from_library = bool(libraries & _HTTP_LIBRARIES)
    return not isinstance(error, HfHubHTTPError) and (
        from_library or isinstance(error, _NETWORK_ERRORS)
    )


def shown_endpoint() -> str:
    """The address of the hub, without a password that may be part of it."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _translated(error: Exception, name: HubName, file: str | None) -> CupagedError | None:
    """The error to raise instead, or None where this is not the hub's business."""
    from huggingface_hub import errors

    cause = error.__cause__
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(cause, Exception):
        return _translated(cause, name, file)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return HubUnreachableError("offline mode is on (HF_HUB_OFFLINE): unset it to use the hub")
    if isinstance(error, errors.EntryNotFoundError):
        return ModelNotFoundError(f"{name}: there is no file {file!r} on {shown_endpoint()}")
    if isinstance(error, errors.HfHubHTTPError):
        return _refused(error, name)
    if isinstance(error, json.JSONDecodeError | errors.FileMetadataError):
        return _wrong_answer(error)
    if is_lost_connection(error):
        return HubUnreachableError(
            f"cannot reach the hub at {shown_endpoint()} ({_reason(error)}): check the network, "
            "the proxy and HF_ENDPOINT"
        )
    if isinstance(error, OSError):
        return None if error.errno in DISK_FULL else _cannot_write(error)
    if isinstance(error, ValueError):
        return _wrong_answer(error)
    if type(error).__module__.startswith("huggingface_hub"):
        return HubError(f"{name}: {_reason(error)}")
    return None


def _refused(error: Exception, name: HubName) -> CupagedError:
    """What a status code of 400 or more means."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", 0)
    hub = shown_endpoint()
    has_token = _token() is not None
    how = "set HF_TOKEN to an access token of an account that may read it"
    if isinstance(error, errors.GatedRepoError):
        if has_token:
            how = "then use a token of that account"
        return HubError(
            f"{name.repo} is gated: its owners decide who may read it. Ask for access at "
            f"{hub}/{name.repo}, {'and ' if not has_token else ''}{how}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFoundError(
            f"{name.repo} has no revision {name.revision!r} on {hub}: give a branch, a tag or a "
            "commit that it has"
        )
    if has_token and status == 401 and not isinstance(error, errors.RepositoryNotFoundError):
        return HubError(f"{hub} does not accept the access token: renew HF_TOKEN, or unset it")
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        with_token = "with this access token " if has_token else "without an access token "
        return ModelNotFoundError(
            f"there is no {name.repo} on {hub}, or it is private and cannot be seen {with_token}"
            f"(status {status}): check the name, or {how}"
        )
    if status == 429:
        return HubError(f"{hub} answers that there were too many requests: try again later")
    if status >= 500 or status == 408:
        return HubUnreachableError(f"the hub at {hub} is out of order (status {status})")
    said = _one_line(getattr(error, "server_message", None) or "it does not say why")
    return HubError(f"{hub} refuses {name.repo} (status {status}): {said}")


def _wrong_answer(error: Exception) -> HubError:
    return HubError(
        f"{shown_endpoint()} does not answer as a model hub does ({_reason(error)}): check "
        "HF_ENDPOINT and the proxy"
    )


def _cannot_write(error: OSError) -> HubError:
    from huggingface_hub import constants

    where = Path(str(error.filename or constants.HF_HUB_CACHE))
    return HubError(
        f"{where}: {error.strerror or _reason(error)}. Models are kept in the folder "
        f"{constants.HF_HUB_CACHE}; set HF_HOME or HF_HUB_CACHE to one that can be written"
    )


def _reason(error: BaseException) -> str:
    """The root of an error as one line that holds no token."""
    while (deeper := error.__cause__ or error.__context__) is not None:
        error = deeper
    return _one_line(str(error) or type(error).__name__)


def _one_line(text: str) -> str:
    token = _token()
    return " ".join((text.replace(token, "***") if token else text).split())[:300]


def _token() -> str | None:
    """The access token in use, if one can be had without a question."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return get_token()
    except (OSError, ValueError, HfHubHTTPError):
        return None
