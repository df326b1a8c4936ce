"""Random messages for every method of every service: a client's mistake is never INTERNAL.

The seed is in the test's name, so what fails is run again by it.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from cupaged.server.front_end import ADMIN, GENERATION, MODEL, FrontEndOptions
from cupaged.v1 import admin_pb2, admin_pb2_grpc
from tests.server import kserve_messages, test_vllm_service
from tests.server.asking import check_answers, request, stream_request, told
from tests.server.local_server import SECONDS, LocalServer
from tests.server.random_messages import RandomMessages

SERVICES = {
    "generation": GENERATION,
    "model": MODEL,
    # Drain ends nothing here: what is asked of the supervisor is heard by nobody.
    "admin": ADMIN,
    "kserve": kserve_messages.INTERFACE.service,
    "vllm": test_vllm_service.INTERFACE.service,
    "health": health_pb2.DESCRIPTOR.services_by_name["Health"],
}
OURS = {"INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED", "DATA_LOSS", "ABORTED", "CANCELLED"}
ENDLESS = {"WatchLoad", "Watch"}  # the first message is enough
MAX_GROWTH_MB = 64.0  # of this process with server and client, over all messages but the first
_PARAMETERS = {"max_tokens": 3, "temperature": 0.0, "n": 2}


def good_requests() -> list[Message]:
    """Of all services."""
    infer = kserve_messages.infer
    return [
        request(),
        stream_request(),
        test_vllm_service.asked([5, 6, 7], n=2),
        test_vllm_service.asked([5], stream=False, logprobs=2),
        infer(text_input="a page", max_tokens=3),
        infer(text_input="a page", parameters=_PARAMETERS, raw=False),
        infer(text_input="a page", stream=True, sampling_parameters='{"max_tokens": 4}'),
        admin_pb2.DrainRequest(timeout=Duration(seconds=9)),
        admin_pb2.StartProfileRequest(duration=Duration(nanos=10**6)),
        admin_pb2.SetLogLevelRequest(level=admin_pb2.LOG_LEVEL_INFO),
    ]


@pytest.fixture(scope="module")
def null(tiny_model: str) -> Iterator[LocalServer]:
    """The steps cost nothing; what does not fit fails at once."""
    options = FrontEndOptions(admin_port=0)
    with LocalServer(tiny_model, options, runner="null", engine={"max_num_seqs": 64}) as running:
        yield running


@pytest.fixture(autouse=True)
def profiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder for the files of profiles that nobody asks for."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


class Sender:
    """Sends messages of one service, and judges what comes back."""

    def __init__(self, server: LocalServer, service: Any, seed: int) -> None:
        self._server = server
        self._channel: Any = server.admin_channel() if service is ADMIN else server.channel
        self._service = service
        self._messages = RandomMessages(seed)
        self._good = good_requests()
        self.seen: Counter[tuple[str, str]] = Counter()

    def send(self) -> None:
        """One call of any method."""
        method = self._messages.choice(self._service.methods)
        kind = method.input_type
        good = [m for m in self._good if m.DESCRIPTOR is kind]
        number = self._messages.choice((0, 1, 1, 2, 3)) if method.client_streaming else 1
        data = [self._messages.request(kind, good) for _ in range(number)]
        try:
            self._read(method, data)
            self.seen[method.name, "OK"] += 1
        except grpc.RpcError as error:
            status = told(error)
            self.seen[method.name, status.code.name] += 1
            assert status.code.name not in OURS, (method.name, data, status)
            if status.code is grpc.StatusCode.INVALID_ARGUMENT:
                assert status.violations and status.violations[0][0], (method.name, data, status)

    def _read(self, method: Any, data: Sequence[bytes]) -> None:
        path = f"/{self._service.full_name}/{method.name}"
        kind: Any = GetMessageClass(method.output_type)
        read = kind.FromString
        if method.client_streaming:
            call = self._channel.stream_stream(path, response_deserializer=read)
            for answer in call(iter(data), timeout=SECONDS):
                assert "internal error" not in answer.error_message, (method.name, data)
        elif method.name in ENDLESS:
            call = self._channel.unary_stream(path, response_deserializer=read)
            answer = call(data[0], timeout=SECONDS)
            next(answer)
            answer.cancel()
        elif method.server_streaming:
            call = self._channel.unary_stream(path, response_deserializer=read)
            for _ in call(data[0], timeout=SECONDS):
                pass
        else:
            call = self._channel.unary_unary(path, response_deserializer=read)
            answer = call(data[0], timeout=SECONDS)
            if method.name == "StopProfile":
                Path(answer.path).unlink()  # or there would be tens of thousands

    def end(self) -> None:
        """Leave the server as it was."""
        if self._service is ADMIN:
            with suppress(grpc.RpcError):  # there is none
                admin_pb2_grpc.AdminServiceStub(self._channel).StopProfile(
                    admin_pb2.StopProfileRequest(), timeout=SECONDS
                )
            self._channel.close()
            self._server.told.clear()


def resident_mb() -> float:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("name", SERVICES)
def test_a_few(null: LocalServer, name: str, seed: int) -> None:
    sender = Sender(null, SERVICES[name], seed)
    for _ in range(250):
        sender.send()
    sender.end()
    answered = {method for method, code in sender.seen if code == "OK"}
    assert len(answered) > len(SERVICES[name].methods) // 3, sender.seen
    check_answers(null)


@pytest.mark.long
@pytest.mark.parametrize("name", SERVICES)
def test_a_hundred_thousand(null: LocalServer, name: str) -> None:
    sender = Sender(null, SERVICES[name], 7)
    for i in range(100_000):
        sender.send()
        if i == 10_000:
            before = resident_mb()
    sender.end()
    check_answers(null)
    assert resident_mb() - before < MAX_GROWTH_MB, sender.seen
