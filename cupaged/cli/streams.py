"""Files and standard streams: what can go wrong with them becomes one line.

Text is UTF-8 whatever the locale says, and a byte that is not is refused where it stands.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
from typing import BinaryIO

from cupaged.errors import CupagedError

STDIN = "-"


class StreamError(CupagedError):
    """A file or a standard stream that cannot be read or written."""


def read_text(path: str) -> str:
    """The text of a file, or of standard input for `-`, without its final line break."""
    name = shown(path)
    try:
        if path == STDIN:
            data = standard_input().read()
        else:
            with open(path, "rb") as file:
                data = file.read()
    except OSError as error:
        raise StreamError(f"{name}: cannot be read: {reason(error)}") from None
    text = decoded(data.removeprefix(codecs.BOM_UTF8), name)
    if not text:
        raise StreamError(f"{name}: is empty; it must hold a text")
    return text.removesuffix("\n").removesuffix("\r")


def decoded(data: bytes, name: str) -> str:
    """UTF-8 as text; StreamError names the first byte that is not."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise StreamError(
            f"{name}: is not UTF-8: byte 0x{data[error.start]:02x} at position {error.start}"
        ) from None


def standard_input() -> BinaryIO:
    """The bytes of standard input; StreamError where it is closed."""
    if sys.stdin is None:
        raise StreamError("standard input is closed")
    return sys.stdin.buffer


def check_standard_output() -> None:
    """Refuse to work for a closed standard output; make any text printable on an open one."""
    if sys.stdout is None:
        raise StreamError("standard output is closed")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def tell(text: str, *, end: str = "\n") -> None:
    """A line on standard error, if anybody listens there."""
    if sys.stderr is None:
        return
    with contextlib.suppress(OSError, UnicodeEncodeError):  # there is no other place to say so
        print(text, end=end, file=sys.stderr, flush=True)


def discard_output() -> None:
    """Write what is still buffered to nowhere, so that the interpreter can end in peace."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def shown(path: str) -> str:
    """A path as people read it."""
    return "standard input" if path == STDIN else ascii_surrogates(path)


def ascii_surrogates(text: str) -> str:
    """The text with bytes that were no UTF-8 written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def reason(error: OSError) -> str:
    """Why, without number and path."""
    return error.strerror or str(error)
