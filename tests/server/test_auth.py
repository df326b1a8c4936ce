"""Bearer tokens: who is let in, what they may call, and how the file is followed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from cupaged.errors import ConfigError
from cupaged.server.auth import Tokens
from cupaged.server.front_end import FrontEndOptions
from cupaged.v1 import admin_pb2 as apb
from cupaged.v1 import model_pb2 as mpb
from tests.server.asking import failure, health, reflection, request, stream_request
from tests.server.local_server import SECONDS, LocalServer

Code = grpc.StatusCode
FILE = "# tokens of the tests\n\nplain-token\nroot-token admin\n"


@pytest.fixture(scope="module")
def guarded(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    path.write_text(FILE)
    options = FrontEndOptions(tokens=Tokens(path, secret="from-environment"), admin_port=0)
    with LocalServer(tiny_model, options) as running:
        yield running


def bearing(value: str | None) -> dict[str, Any]:
    metadata = () if value is None else (("authorization", value),)
    return {"metadata": metadata, "timeout": SECONDS}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "TOKEN_MISSING"),
        ("", "TOKEN_MISSING"),
        ("Bearer", "TOKEN_MISSING"),
        ("plain-token", "TOKEN_MISSING"),
        ("Bearer wrong", "TOKEN_INVALID"),
        ("Bearer plain-token x", "TOKEN_INVALID"),
        ("Bearer plain-toke", "TOKEN_INVALID"),
        ("Basic plain-token", "TOKEN_INVALID"),
        ("Bearer # tokens of the tests", "TOKEN_INVALID"),
        ("Bearer admin", "TOKEN_INVALID"),
    ],
)
def test_strangers(guarded: LocalServer, value: str | None, reason: str) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: guarded.generation.Generate(request(), **bearing(value)),
        lambda: guarded.generation.GenerateStream(stream_request(), **bearing(value)),
        lambda: guarded.models.ListModels(mpb.ListModelsRequest(), **bearing(value)),
        lambda: guarded.admin().Drain(apb.DrainRequest(), **bearing(value)),
    ]
    for status in map(failure, calls):
        assert (status.code, status.reason) == (Code.UNAUTHENTICATED, reason)
        assert status.domain == "cupaged"
        assert "token" in status.message.lower() and "wrong" not in status.message
    assert guarded.told == []


def test_strangers_stand_in_the_log_and_their_tokens_do_not(
    guarded: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "cupaged.server.auth"):
        failure(lambda: guarded.generation.Generate(request(), **bearing("Bearer secret-guess")))
    [line] = caplog.messages
    start = r"refused /cupaged.v1.GenerationService/Generate of ipv[46]:\S+: the server does not"
    assert re.match(start, line)
    assert "guess" not in line


@pytest.mark.parametrize(
    "value",
    ["Bearer plain-token", "bearer plain-token", "BEARER  root-token", "Bearer from-environment"],
)
def test_known_callers(guarded: LocalServer, value: str) -> None:
    answer = guarded.generation.Generate(request(), **bearing(value))
    assert answer.samples[0].completion_tokens == 6
    assert list(guarded.generation.GenerateStream(stream_request(), **bearing(value)))


def test_only_some_may_operate_the_server(guarded: LocalServer) -> None:
    admin = guarded.admin()
    level = apb.SetLogLevelRequest(level=apb.LOG_LEVEL_INFO)
    status = failure(lambda: admin.SetLogLevel(level, **bearing("Bearer plain-token")))
    assert (status.code, status.reason) == (Code.PERMISSION_DENIED, "NOT_ALLOWED")
    assert guarded.told == []
    for token in ("root-token", "from-environment"):
        admin.SetLogLevel(level, **bearing(f"Bearer {token}"))
        assert guarded.told.pop() == ("log_level_set", "info")


def test_health_needs_no_token_and_reflection_does(guarded: LocalServer) -> None:
    check = health(guarded.channel).Check
    answer = check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    list_services = reflection(guarded.channel).ServerReflectionInfo
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    status = failure(lambda: list_services(iter([ask]), timeout=SECONDS))
    assert status.code is Code.UNAUTHENTICATED


# ---- the file ----------------------------------------------------------------------------------


class Clock:
    """Seconds that the test moves on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def rewrite(path: Path, text: str) -> None:
    """As those do it who renew secrets: another file of the same name."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    os.replace(fresh, path)


def test_a_changed_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock = tmp_path / "tokens", Clock()
    path.write_text("one\n")
    tokens = Tokens(path, clock=clock)
    assert tokens.find("one") and not tokens.find("two")
    rewrite(path, "two\n")
    assert tokens.find("one")  # it was looked at less than a second ago
    clock.now += 1.5
    assert tokens.find("two") and not tokens.find("one")
    for bad in ("", "# nothing\n", "three words here\n", "two\nn\u00e4\n"):
        rewrite(path, bad)
        clock.now += 1.5
        assert tokens.find("two"), "a file that cannot be used changes nothing"
    path.unlink()
    clock.now += 1.5
    assert tokens.find("two")
    assert len([r for r in caplog.records if "stay as they are" in r.message]) == 5
    assert "three" not in caplog.text and "words here" not in caplog.text
    path.write_text("three admin\n")
    clock.now += 1.5
    found = tokens.find("three")
    assert found is not None and found.is_admin and not tokens.find("two")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "api_key_file must be a file with at least one token"),
        (b"\n# x\n", "api_key_file must be a file with at least one token"),
        (b"a\nsecret word\n", "api_key_file, line 2 must be a token, or a token and the word"),
        (b"secret admin x\n", "api_key_file, line 1 must be a token, or a token and the word"),
        (b"\xff\xfe", "api_key_file must be a file of ASCII text"),
        (b"x" * (1 << 21), "api_key_file must be a file of at most 1048576 bytes"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Tokens(path)
    assert str(caught.value).startswith(message)
    assert "secret" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a file that can be read"):
        Tokens(tmp_path / "none")
    with pytest.raises(ConfigError, match="a file that can be read"):
        Tokens(tmp_path)
