"""`cupaged.v1.AdminService`: what an operator does to a running server, on a port of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import mkstemp
from typing import Any

from google.protobuf.duration_pb2 import Duration

from cupaged.errors import CupagedError, InvalidParameterError
from cupaged.server.conversions import seconds_of
from cupaged.server.engine_client import EngineClient
from cupaged.server.rpc import Call
from cupaged.server.service_errors import PreconditionError
from cupaged.server.settings import MAX_SECONDS
from cupaged.server.wire_forms import stats_to_wire
from cupaged.v1 import admin_pb2 as pb

_STATS_S = 2.0  # an engine that hangs does not keep its server from ending
_PROFILE_S, _MAX_PROFILE_S = 60.0, 3600.0
_LEVELS: dict[pb.LogLevel.ValueType, str] = {
    pb.LOG_LEVEL_DEBUG: "debug",
    pb.LOG_LEVEL_INFO: "info",
    pb.LOG_LEVEL_WARNING: "warning",
    pb.LOG_LEVEL_ERROR: "error",
}
_NUMBERS = {name: number for number, name in _LEVELS.items()}


class AdminService:
    """Operates the server of which this front end is a part.

    Args:
        client: of the engine.
        tell: sends a message to the supervisor: `drain_requested [timeout_s | None]`,
            `log_level_set [level]`.
        drain_timeout_s: of the server, where a call names none.
        log_level: at the start.
        folder: where profiles are written; the system's folder for temporary files by default.
    """

    def __init__(
        self,
        client: EngineClient,
        tell: Callable[..., None],
        *,
        drain_timeout_s: float,
        log_level: str = "info",
        folder: Path | None = None,
    ) -> None:
        self._client = client
        self._tell = tell
        self._drain_timeout_s = drain_timeout_s
        self._log_level = log_level
        self._folder = folder
        self._profile_started: float | None = None
        self._profile_end: asyncio.Task[None] | None = None
        self._profile: tuple[str, float] | None = None  # one that has ended by itself

    async def Drain(self, request: pb.DrainRequest, call: Call) -> pb.DrainResponse:
        """End the server as SIGTERM does."""
        timeout_s = self._drain_timeout_s
        if request.HasField("timeout"):
            timeout_s = seconds_of(request.timeout, "timeout")
            if timeout_s < 0:
                raise InvalidParameterError("timeout", timeout_s, ">= 0 seconds")
            timeout_s = min(timeout_s, MAX_SECONDS)  # of --drain-timeout, too
        number = await self._num_unfinished()
        self._tell("drain_requested", timeout_s)
        return pb.DrainResponse(num_unfinished_requests=number, timeout=_duration(timeout_s))

    async def FlushPrefixCache(
        self, request: pb.FlushPrefixCacheRequest, call: Call
    ) -> pb.FlushPrefixCacheResponse:
        """UNIMPLEMENTED where the engine has no such cache."""
        freed = await self._client.call("flush_prefix_cache")
        return pb.FlushPrefixCacheResponse(num_blocks=freed)

    async def StartProfile(
        self, request: pb.StartProfileRequest, call: Call
    ) -> pb.StartProfileResponse:
        """Record the engine's loop with Python's profiler."""
        seconds = _PROFILE_S
        if request.HasField("duration"):
            seconds = seconds_of(request.duration, "duration")
            if not 0 < seconds <= _MAX_PROFILE_S:
                allowed = f"in (0, {_MAX_PROFILE_S:g}] seconds"
                raise InvalidParameterError("duration", seconds, allowed)
        if self._profile_started is not None:
            raise PreconditionError("a profile is being recorded already")
        await self._client.call("start_profile")
        self._profile = None
        self._profile_started = time.monotonic()
        self._profile_end = asyncio.create_task(self._end_profile_after(seconds))
        return pb.StartProfileResponse()

    async def StopProfile(
        self, request: pb.StopProfileRequest, call: Call
    ) -> pb.StopProfileResponse:
        """End the recording, if it has not ended by itself, and tell where it was written."""
        if self._profile_end is not None:
            self._profile_end.cancel()
        if self._profile_started is not None:
            self._profile = await self._end_profile()
        if self._profile is None:
            raise PreconditionError("no profile is being recorded")
        (path, seconds), self._profile = self._profile, None
        return pb.StopProfileResponse(path=path, duration=_duration(seconds))

    async def SetLogLevel(
        self, request: pb.SetLogLevelRequest, call: Call
    ) -> pb.SetLogLevelResponse:
        """Change the level of all processes of the server."""
        level = _LEVELS.get(request.level)
        if level is None:
            allowed = f"one of {', '.join(f'LOG_LEVEL_{name.upper()}' for name in _NUMBERS)}"
            raise InvalidParameterError("level", request.level, allowed)
        previous = _NUMBERS[self._log_level]
        self._tell("log_level_set", level)
        self._log_level = level
        return pb.SetLogLevelResponse(previous_level=previous)

    async def _num_unfinished(self) -> int:
        """Of the engine now; of an engine that does not answer, as it last was."""
        stats: dict[str, Any] = {}
        if self._client.stats is not None:
            stats = stats_to_wire(self._client.stats)
        if self._client.state.phase in ("ready", "draining"):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STATS_S):
                    stats = await self._client.call("stats")
        return sum(int(stats.get(f"num_{kind}", 0)) for kind in ("running", "waiting", "preempted"))

    async def _end_profile_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._profile_end = None  # not to be cancelled by a StopProfile that comes now
        try:
            self._profile = await self._end_profile()
        except CupagedError:
            self._profile_started = None  # the engine has ended, and its profile with it

    async def _end_profile(self) -> tuple[str, float]:
        """Path of the file, and how many seconds it tells of."""
        assert self._profile_started is not None
        seconds = time.monotonic() - self._profile_started
        self._profile_started = None
        text = await self._client.call("stop_profile")
        handle, path = mkstemp(prefix="cupaged-profile-", suffix=".txt", dir=self._folder)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        return path, seconds


def _duration(seconds: float) -> Duration:
    nanos = round(seconds * 1e9)
    return Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)
