"""AdminService: it is off unless asked for, and what it does reaches supervisor and engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from cupaged.server import admin_service
from cupaged.server.engine_client import EngineClient
from cupaged.server.front_end import FrontEndOptions
from cupaged.v1 import admin_pb2 as pb
from cupaged.v1 import admin_pb2_grpc
from cupaged.v1.generation_pb2 import TokenIds
from tests.server.asking import Started, failure, request, tokens
from tests.server.local_server import SECONDS, LocalServer, wait_until

Code = grpc.StatusCode


@pytest.fixture(scope="module")
def operated(tiny_model: str) -> Iterator[LocalServer]:
    options = FrontEndOptions(admin_port=0, drain_timeout_s=12.5)
    with LocalServer(tiny_model, options, runner="null", null_steps_per_s=100.0) as running:
        yield running


def test_it_is_not_on_the_port_of_everybody(operated: LocalServer, server: LocalServer) -> None:
    for running in (operated, server):
        stub = admin_pb2_grpc.AdminServiceStub(running.channel)
        status = failure(lambda: stub.Drain(pb.DrainRequest(), timeout=SECONDS))  # noqa: B023
        assert status.code is Code.UNIMPLEMENTED
    assert operated.told == server.told == []
    assert server.front_end.admin_port == 0
    assert operated.front_end.admin_port not in (0, operated.front_end.port)


def test_drain(operated: LocalServer) -> None:
    admin = operated.admin()
    with Started(operated):
        answer = admin.Drain(pb.DrainRequest(), timeout=SECONDS)
        assert (answer.num_unfinished_requests, answer.timeout.ToSeconds()) == (1, 12)
        assert operated.told.pop() == ("drain_requested", 12.5)
    operated.wait_idle()
    answer = admin.Drain(pb.DrainRequest(timeout=Duration(seconds=3)), timeout=SECONDS)
    assert (answer.num_unfinished_requests, answer.timeout) == (0, Duration(seconds=3))
    assert operated.told.pop() == ("drain_requested", 3.0)
    for seconds in (10**6 + 1, 30 * 86400, 2**63 - 1):  # more than the supervisor could wait
        answer = admin.Drain(pb.DrainRequest(timeout=Duration(seconds=seconds)), timeout=SECONDS)
        assert answer.timeout == Duration(seconds=10**6)
        assert operated.told.pop() == ("drain_requested", 10**6)
    status = failure(lambda: admin.Drain(pb.DrainRequest(timeout=Duration(seconds=-1))))
    assert (status.code, status.reason) == (Code.INVALID_ARGUMENT, "INVALID_PARAMETER")
    assert [field for field, _ in status.violations] == ["timeout"]
    assert operated.told == []


def test_drain_with_an_engine_that_hangs(
    operated: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_service, "_STATS_S", 0.01)
    monkeypatch.setattr(EngineClient, "call", lambda *args: asyncio.sleep(2 * SECONDS))
    operated.admin().Drain(pb.DrainRequest(), timeout=SECONDS)
    assert operated.told.pop() == ("drain_requested", 12.5)


def test_log_levels(operated: LocalServer) -> None:
    admin = operated.admin()
    seen = []
    for level in (pb.LOG_LEVEL_DEBUG, pb.LOG_LEVEL_WARNING, pb.LOG_LEVEL_ERROR, pb.LOG_LEVEL_INFO):
        answer = admin.SetLogLevel(pb.SetLogLevelRequest(level=level), timeout=SECONDS)
        seen.append(answer.previous_level)
    assert seen == [pb.LOG_LEVEL_INFO, pb.LOG_LEVEL_DEBUG, pb.LOG_LEVEL_WARNING, pb.LOG_LEVEL_ERROR]
    asked = [operated.told.pop(0) for _ in seen]
    assert asked == [("log_level_set", name) for name in ("debug", "warning", "error", "info")]
    for number in (0, 9):
        message = pb.SetLogLevelRequest()
        message.level = number  # type: ignore[assignment]
        status = failure(lambda: admin.SetLogLevel(message))  # noqa: B023
        assert (status.code, status.reason) == (Code.INVALID_ARGUMENT, "INVALID_PARAMETER")
        assert [field for field, _ in status.violations] == ["level"]
    assert operated.told == []


def test_profiles(operated: LocalServer) -> None:
    admin = operated.admin()
    status = failure(lambda: admin.StopProfile(pb.StopProfileRequest(), timeout=SECONDS))
    assert (status.code, status.reason) == (Code.FAILED_PRECONDITION, "FAILED_PRECONDITION")
    admin.StartProfile(pb.StartProfileRequest(), timeout=SECONDS)
    status = failure(lambda: admin.StartProfile(pb.StartProfileRequest(), timeout=SECONDS))
    assert (status.code, status.reason) == (Code.FAILED_PRECONDITION, "FAILED_PRECONDITION")
    operated.generation.Generate(request(), timeout=SECONDS)
    answer = admin.StopProfile(pb.StopProfileRequest(), timeout=SECONDS)
    path = Path(answer.path)
    assert "engine/core.py" in path.read_text() and answer.duration.ToNanoseconds() > 0
    path.unlink()
    status = failure(lambda: admin.StopProfile(pb.StopProfileRequest(), timeout=SECONDS))
    assert status.code is Code.FAILED_PRECONDITION


def test_a_profile_that_ends_by_itself(operated: LocalServer) -> None:
    admin = operated.admin()
    short = pb.StartProfileRequest(duration=Duration(nanos=1_000_000))
    admin.StartProfile(short, timeout=SECONDS)

    def has_ended() -> bool:
        try:
            admin.StartProfile(pb.StartProfileRequest(), timeout=SECONDS)  # this one stays
        except grpc.RpcError as error:
            assert error.code() is Code.FAILED_PRECONDITION
            return False
        return True

    wait_until(has_ended)
    path = Path(admin.StopProfile(pb.StopProfileRequest(), timeout=SECONDS).path)
    assert path.is_file()
    path.unlink()
    for seconds in (0, -1, 3601):
        long = pb.StartProfileRequest(duration=Duration(seconds=seconds))
        status = failure(lambda: admin.StartProfile(long))  # noqa: B023
        assert [field for field, _ in status.violations] == ["duration"]


def test_the_prefix_cache_is_flushed(operated: LocalServer) -> None:
    call = operated.admin().FlushPrefixCache
    call(pb.FlushPrefixCacheRequest(), timeout=SECONDS)
    message = request(None, token_ids=TokenIds(ids=range(10, 59)), stopping=tokens(1))
    answers = [operated.generation.Generate(message, timeout=SECONDS) for _ in range(2)]
    assert [a.usage.cached_tokens for a in answers] == [0, 48]
    assert call(pb.FlushPrefixCacheRequest(), timeout=SECONDS).num_blocks == 3
    answer = operated.generation.Generate(message, timeout=SECONDS)
    assert answer.usage.cached_tokens == 0
    call(pb.FlushPrefixCacheRequest(), timeout=SECONDS)
    assert call(pb.FlushPrefixCacheRequest(), timeout=SECONDS).num_blocks == 0
