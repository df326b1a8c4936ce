"""Traces in files: a line that says so, then records, each with its length and checksums.

A record is written with one call when its step is over, so a trace is whole however its engine
ends; only the last record can be cut. Reading believes nothing: every byte is covered by a
checksum. A trace holds the prompts and answers of all requests: only its owner may read it.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from struct import Struct
from types import TracebackType
from typing import Any, BinaryIO, Self
from zlib import crc32

import msgpack

from cupaged._version import __version__
from cupaged.config import EngineConfig
from cupaged.engine.preemption import PreemptionCosts
from cupaged.engine.step_events import Event
from cupaged.engine.trace_codec import DECODING_ERRORS, Decoder, Encoder
from cupaged.errors import ConfigError, CupagedError, TraceError

VERSION = 1
_MAGIC = b"cupaged trace "
_FIRST_LINE = b"%s%d\n" % (_MAGIC, VERSION)
_FRAME = Struct("<III")  # length of the body, checksum of these 4 bytes, checksum of the body
_MAX_TABLE_ENTRIES = 2**29  # 2 GiB; more than any engine has
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What a core must be built with to run the same schedule.

    scheduling_policy: the policy's name. swap_costs: by which sequences are swapped, None if they
    are wherever the host has room. version: of the cupaged that wrote the trace.
    """

    config: EngineConfig
    scheduling_policy: str
    swap_costs: PreemptionCosts | None = None
    version: str = __version__


def check_trace_path(path: str | Path) -> None:
    """Refuse a file that cannot be written, before anything is loaded.

    Raises:
        ConfigError: says why.
    """
    name = os.fspath(path)
    folder = os.path.dirname(name) or "."
    if not name or "\0" in name:
        raise _unwritable(path, "it is no name of a file")
    if os.path.isdir(name):
        raise _unwritable(path, os.strerror(errno.EISDIR))
    if not os.path.isdir(folder):
        raise _unwritable(path, f"there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK) and not os.access(name, os.W_OK):
        raise _unwritable(path, os.strerror(errno.EACCES))


def _unwritable(path: str | Path, why: str) -> ConfigError:
    return ConfigError("trace", os.fspath(path), f"a file that can be written ({why})")


class TraceWriter:
    """Writes events into a new file, which only its owner may read.

    A file that is there is kept under its name with `.old` behind it: what an engine left that
    died is not lost when the next one starts. When writing fails, one line in the log says so and
    the trace ends; the engine goes on.
    """

    def __init__(self, path: str | Path, header: TraceHeader) -> None:
        """Begin the file.

        Raises:
            ConfigError: it cannot be written.
        """
        check_trace_path(path)
        self._path = os.fspath(path)
        self._encoder = Encoder(header.config)
        try:
            self._file = _new_file(self._path)
            self._at_end = weakref.finalize(self, os.close, self._file)
            self._num_bytes = 0
            self._put(_FIRST_LINE + _framed(asdict(header)))
        except OSError as error:
            raise _unwritable(path, os.strerror(error.errno or 0)) from None
        _logger.info("every step is recorded in %s, with all prompts and answers", self._path)

    def write(self, event: Event) -> None:
        """Append an event."""
        if not self._at_end.alive:
            return
        frame = _framed(self._encoder.encode(event))
        try:
            self._put(frame)
        except OSError as error:
            _logger.error("the trace %s ends here: %s", self._path, os.strerror(error.errno or 0))
            self.close()

    def close(self) -> None:
        """No more is written; what was written of a last record in part is taken away."""
        if not self._at_end.alive:
            return
        try:
            os.ftruncate(self._file, self._num_bytes)
        except OSError:  # a device, not a file
            _logger.debug("%s cannot be cut", self._path)
        self._at_end()

    def _put(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._file, left) :]
        self._num_bytes += len(data)


def _new_file(path: str) -> int:
    if os.path.isfile(path):
        os.replace(path, f"{path}.old")
    # Without waiting: a pipe that nobody reads is refused.
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o600)
    if stat.S_ISREG(os.fstat(file).st_mode):
        os.fchmod(file, 0o600)
    return file


def _framed(form: Any) -> bytes:
    body: bytes = msgpack.packb(form, use_bin_type=True, unicode_errors="surrogatepass")
    length = len(body).to_bytes(4, "little")
    return _FRAME.pack(len(body), crc32(length), crc32(body)) + body


class TraceReader:
    """The header, then the events of a file, one by one.

    num_cut_bytes: of a last record that is not whole, known when the last event was read.
    """

    def __init__(self, path: str | Path) -> None:
        """Open a trace and read its header.

        Raises:
            TraceError: the file cannot be read, is no trace, or is one of another version.
        """
        self.path = os.fspath(path)
        self.num_cut_bytes = 0
        self._number = 0
        try:
            self._file: BinaryIO = open(self.path, "rb")  # noqa: SIM115 - closed by `close`
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise TraceError(f"{self.path}: cannot be read: {why}") from None
        try:
            self.header = self._read_header()
        except BaseException:
            self.close()
            raise
        self._decoder = Decoder(self.header.config)

    def __iter__(self) -> Iterator[Event]:
        """The events that are left.

        Raises:
            TraceError: a record is damaged; those before it were given.
        """
        while (body := self._next_body()) is not None:
            try:
                yield self._decoder.decode(_unpacked(body))
            except (*DECODING_ERRORS, CupagedError) as error:
                raise self._damaged(f"cannot be understood ({error})") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the file back."""
        self._file.close()

    def _read_header(self) -> TraceHeader:
        line = self._read_line()
        if not line.startswith(_MAGIC):
            raise TraceError(f"{self.path}: is not a trace of cupaged")
        if line != _FIRST_LINE:
            version = line.removeprefix(_MAGIC).strip().decode("ascii", "replace")
            raise TraceError(
                f"{self.path}: is a trace of version {version!r}; this cupaged reads {VERSION}"
            )
        body = self._next_body()
        if body is None:
            raise TraceError(f"{self.path}: ends before its first record")
        try:
            form = _unpacked(body)
            config, costs = EngineConfig(**form.pop("config")), form.pop("swap_costs")
            if config.max_num_seqs * config.max_blocks_per_seq > _MAX_TABLE_ENTRIES:
                raise ValueError("its block table is too large")
            swap_costs = None if costs is None else PreemptionCosts(**costs)
            return TraceHeader(config, swap_costs=swap_costs, **form)
        except (*DECODING_ERRORS, CupagedError) as error:
            raise self._damaged(f"cannot be understood ({error})") from None

    def _next_body(self) -> bytes | None:
        """None at the end, and at a record that is cut."""
        head = self._read(_FRAME.size)
        self._number += 1
        if len(head) < _FRAME.size:
            self.num_cut_bytes = len(head)
            return None
        length, head_sum, body_sum = _FRAME.unpack(head)
        if crc32(head[:4]) != head_sum:
            raise self._damaged("is damaged")
        body = self._read(length)
        if len(body) < length:
            self.num_cut_bytes = len(head) + len(body)
            return None
        if crc32(body) != body_sum:
            raise self._damaged("is damaged")
        return body

    def _read_line(self) -> bytes:
        try:
            return self._file.readline(len(_MAGIC) + 20)
        except OSError as error:
            raise TraceError(f"{self.path}: cannot be read: {error.strerror}") from None

    def _read(self, length: int) -> bytes:
        try:
            return self._file.read(length)
        except OSError as error:
            raise TraceError(f"{self.path}: cannot be read: {error.strerror}") from None

    def _damaged(self, what: str) -> TraceError:
        return TraceError(f"{self.path}: record {self._number} {what}; what follows is not read")


def _unpacked(body: bytes) -> Any:
    return msgpack.unpackb(body, raw=False, strict_map_key=False, unicode_errors="surrogatepass")
