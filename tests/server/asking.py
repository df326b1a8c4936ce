"""Requests, and statuses taken apart, for tests that speak the protos themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from cupaged.llm import LLM
from cupaged.outputs import RequestOutput
from cupaged.sampling_params import SamplingParams
from cupaged.v1 import generation_pb2 as pb
from tests.server.local_server import SECONDS, LocalServer, wait_until

PROMPT = "The memory of a process"
M = TypeVar("M", pb.GenerateRequest, pb.GenerateStreamRequest)
GREEDY = pb.SamplingOptions(temperature=0)


@dataclass
class Told:
    """A status and its details."""

    code: grpc.StatusCode
    message: str
    reason: str | None = None  # None without an ErrorInfo
    domain: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    violations: list[tuple[str, str]] = field(default_factory=list)
    retry_s: float | None = None
    resource: tuple[str, str] | None = None
    debug: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


def told(error: Any) -> Told:
    """What a failed call says."""
    metadata = dict(error.trailing_metadata() or ())
    status = Told(error.code(), error.details(), metadata=metadata)
    data = metadata.pop("grpc-status-details-bin", None)
    if data is None:
        return status
    rich = status_pb2.Status.FromString(data)
    assert (rich.code, rich.message) == (status.code.value[0], status.message)
    for detail in rich.details:
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        retry, resource = error_details_pb2.RetryInfo(), error_details_pb2.ResourceInfo()
        debug = error_details_pb2.DebugInfo()
        if detail.Unpack(info):
            status.reason, status.domain, status.facts = info.reason, info.domain, {**info.metadata}
        elif detail.Unpack(bad):
            status.violations += [(v.field, v.description) for v in bad.field_violations]
        elif detail.Unpack(retry):
            status.retry_s = retry.retry_delay.ToTimedelta().total_seconds()
        elif detail.Unpack(resource):
            status.resource = (resource.resource_type, resource.resource_name)
        elif detail.Unpack(debug):
            status.debug = debug.detail
        else:
            raise AssertionError(f"a detail of another kind: {detail}")
    return status


def failure(call: Callable[[], Any]) -> Told:
    """The status of a call that has to fail; a stream is read to its end."""
    with pytest.raises(grpc.RpcError) as caught:
        answer = call()
        if isinstance(answer, grpc.Call):
            list(cast(Iterator[object], answer))
    return told(caught.value)


def request(text: str | None = PROMPT, /, **fields: Any) -> pb.GenerateRequest:
    """Greedy, and a few tokens, unless the fields say otherwise."""
    return _filled(pb.GenerateRequest(), text, fields)


def stream_request(text: str | None = PROMPT, /, **fields: Any) -> pb.GenerateStreamRequest:
    """The same for a stream."""
    return _filled(pb.GenerateStreamRequest(), text, fields)


def tokens(number: int, **others: Any) -> pb.StoppingOptions:
    """Exactly that many tokens, unless something else ends them."""
    return pb.StoppingOptions(max_new_tokens=number, ignore_eos=True, **others)


def health(channel: grpc.Channel) -> Any:
    """A stub of grpc.health.v1."""
    make: Any = health_pb2_grpc.HealthStub  # its types say nothing of its methods
    return make(channel)


def reflection(channel: grpc.Channel) -> Any:
    """A stub of server reflection."""
    make: Any = reflection_pb2_grpc.ServerReflectionStub
    return make(channel)


def _filled(message: M, text: str | None, fields: dict[str, Any]) -> M:
    if text is not None:
        message.text = text
    fields = {"sampling": GREEDY, "stopping": tokens(6), **fields}
    for name, value in fields.items():
        if isinstance(value, str | int | float):
            setattr(message, name, value)
        else:
            getattr(message, name).CopyFrom(value)
    return message


class Started:
    """A stream of 1,000 tokens that has brought its first one; cancelled at the end."""

    def __init__(self, server: LocalServer, **fields: Any) -> None:
        fields = {"stopping": tokens(1000), **fields}
        self.call = server.generation.GenerateStream(stream_request(**fields), timeout=SECONDS)
        assert next(self.call).WhichOneof("event") == "started"
        assert next(self.call).WhichOneof("event") == "delta"

    def __enter__(self) -> Any:
        return self.call

    def __exit__(self, *error: object) -> None:
        self.call.cancel()


def waiting(server: LocalServer, **fields: Any) -> Any:
    """A stream whose request waits in the engine's queue."""
    before = server.stats()["num_waiting"]
    call = server.generation.GenerateStream(stream_request(**fields), timeout=SECONDS)
    wait_until(lambda: server.stats()["num_waiting"] == before + 1)
    return call


def options(**fields: Any) -> dict[str, Any]:
    """Fields for `request`: how tokens are drawn."""
    return {"sampling": pb.SamplingOptions(**fields)}


def stopping(**fields: Any) -> dict[str, Any]:
    """Fields for `request`: when a sample ends."""
    return {"stopping": pb.StoppingOptions(**fields)}


def output(**fields: Any) -> dict[str, Any]:
    """Fields for `request`: what the answer holds."""
    return {"output": pb.OutputOptions(**fields)}


def asker(server: LocalServer, method: str) -> Callable[..., Told]:
    """The failure of a request, by Generate or GenerateStream."""
    make = request if method == "Generate" else stream_request
    call = getattr(server.generation, method)
    return lambda *text, **fields: failure(lambda: call(make(*text, **fields), timeout=SECONDS))


def check_answers(server: LocalServer) -> None:
    """The server still does its work, and nothing is left in the engine."""
    answer = server.generation.Generate(request(), timeout=SECONDS)
    assert answer.samples[0].completion_tokens == 6
    server.wait_idle()


def read(server: LocalServer, message: pb.GenerateStreamRequest) -> list[pb.GenerateStreamResponse]:
    """All events of a stream."""
    return list(server.generation.GenerateStream(message, timeout=SECONDS))


def joined(events: list[pb.GenerateStreamResponse], n: int = 1) -> list[dict[str, Any]]:
    """Each sample of a stream in one piece; checks the order of the events."""
    assert events[0].WhichOneof("event") == "started"
    assert [e.HasField("usage") for e in events] == [False] * (len(events) - 1) + [True]
    samples: list[dict[str, Any]] = [
        {"text": "", "token_ids": [], "logprobs": [], "end": None} for _ in range(n)
    ]
    for event in events[1:]:
        kind = event.WhichOneof("event")
        if kind == "delta":
            sample = samples[event.delta.index]
            assert sample["end"] is None, "a delta after the end of its sample"
            sample["text"] += event.delta.text
            sample["token_ids"] += event.delta.token_ids
            sample["logprobs"] += event.delta.logprobs
        elif kind == "finished":
            assert samples[event.finished.index]["end"] is None
            samples[event.finished.index]["end"] = event.finished
    assert all(sample["end"] is not None for sample in samples)
    return samples


def offline(llm: LLM, prompt: Any, **changes: Any) -> RequestOutput:
    """What the engine in one process answers to `request` with these parameters."""
    fields = {"temperature": 0, "ignore_eos": True, "max_tokens": 6, **changes}
    return llm.generate(prompt, SamplingParams(**fields), use_tqdm=False)[0]
