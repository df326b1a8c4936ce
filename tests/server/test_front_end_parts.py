"""Small parts of the front end by themselves: parsing, paths, options, batched observations."""

from __future__ import annotations

import grpc
import pytest
from prometheus_client import CollectorRegistry, Histogram

from cupaged import errors
from cupaged.errors import CupagedError, PromptError
from cupaged.server import service_errors
from cupaged.server.batched_histogram import BatchedHistogram
from cupaged.server.error_status import TABLE, row_of, status_of
from cupaged.server.field_paths import paths_for
from cupaged.server.grpc_server import GrpcOptions
from cupaged.server.request_parsing import parse
from cupaged.server.service_errors import MalformedRequestError
from cupaged.v1 import generation_pb2 as pb


def test_the_table_covers_the_tree() -> None:
    """Everything in it that a request can meet has a row of its own or of a class above it."""
    for module in (errors, service_errors):
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, CupagedError):
                row = next(TABLE[k] for k in kind.__mro__ if k in TABLE)
                assert row.code is not grpc.StatusCode.OK and row.reason.isupper()
    reasons = [row.reason for row in TABLE.values()]
    assert len(set(reasons)) == len(reasons)
    assert row_of(KeyError("x")).reason == "INTERNAL"
    assert row_of(errors.EngineDeadError("x", restarting=True)).code is grpc.StatusCode.UNAVAILABLE


def test_messages_fit_into_headers() -> None:
    status = status_of(errors.EngineError("line\nbreak\t" + "x" * 5000))
    assert len(status.details) == 1000 and status.details.startswith("line break xxx")
    assert sum(len(value) for _, value in status.trailing_metadata) < 4096
    retry = status_of(errors.QueueFullError("x", retry_after_s=0.0123))
    assert dict(retry.trailing_metadata)["grpc-retry-pushback-ms"] == "100"


@pytest.mark.parametrize(
    ("name", "kind", "path"),
    [
        ("max_tokens", "text", "stopping.max_new_tokens"),
        ("stop_token_ids[3]", "text", "stopping.stop_token_ids[3]"),
        ("logit_bias[5]", "text", "sampling.logit_bias[5]"),
        ("logit_bias key", "text", "sampling.logit_bias"),
        ("bad_words_token_ids[0]", "text", "sampling.bad_words"),
        ("prompt", "text", "text"),
        ("prompt length in tokens", "chat", "chat"),
        ("prompt_token_ids[7]", "token_ids", "token_ids.ids[7]"),
        ("prompt_token_ids[7]", "chat", "chat"),
        ("messages[2].role", "chat", "chat.messages[2].role"),
        ("request_id", "text", "request_id"),
        ("stream.interval", "text", "stream.interval"),
        ("[odd", "text", "[odd"),
    ],
)
def test_field_paths(name: str, kind: str, path: str) -> None:
    assert paths_for(kind)(name) == path


def test_bytes_become_messages() -> None:
    message = pb.GenerateRequest(text="é", sampling=pb.SamplingOptions(logit_bias={5: 1.0}))
    assert parse(pb.GenerateRequest, message.SerializeToString()) == message
    unknown = message.SerializeToString() + b"\xfa\x3e\x02\xff\xff"  # a field of a later version
    assert parse(pb.GenerateRequest, unknown).text == "é"
    nested = pb.GenerateRequest(stopping=pb.StoppingOptions(stop=["a", "XY"])).SerializeToString()
    with pytest.raises(PromptError) as caught:
        parse(pb.GenerateRequest, b"\x5a\x01s" + nested.replace(b"XY", b"\xe2\x28"))
    assert caught.value.name == "stopping.stop[1]"
    for data in (b"\x08", b"\x1a\xff", b"\xff" * 12, b"\x1a\x05abc", b"\x0b"):
        with pytest.raises(MalformedRequestError):
            parse(pb.GenerateRequest, data)


def test_options_of_the_server() -> None:
    """An interface to proxies and clients: long silent calls must not be cut."""
    options = dict(GrpcOptions(max_connection_age_s=300).channel_options())
    assert options == {
        "grpc.max_receive_message_length": 67108864,
        "grpc.max_send_message_length": 67108864,
        "grpc.so_reuseport": 1,
        "grpc.keepalive_time_ms": 60000,
        "grpc.keepalive_timeout_ms": 20000,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.max_pings_without_data": 0,
        "grpc.http2.min_recv_ping_interval_without_data_ms": 10000,
        "grpc.max_connection_age_ms": 300000,
    }
    assert "grpc.max_connection_age_ms" not in dict(GrpcOptions().channel_options())


def test_observations_in_batches() -> None:
    registry, bounds = CollectorRegistry(), (0.1, 1.0, 10.0)
    values = (0.05, 0.1, 0.5, 1.0, 1.5, 50.0)
    expected = Histogram("a", "a", buckets=bounds, registry=registry)
    histogram = Histogram("b", "b", buckets=bounds, registry=registry)
    batched = BatchedHistogram(histogram, bounds)
    for i, value in enumerate(values):
        expected.observe(value)
        batched.observe(value, now=1.0 + i / 100)
    assert registry.get_sample_value("b_count") == 1  # the first one is due at once
    batched.flush()
    batched.flush()
    for suffix, labels in [("_sum", {}), ("_count", {})] + [
        ("_bucket", {"le": le}) for le in ("0.1", "1.0", "10.0", "+Inf")
    ]:
        theirs = registry.get_sample_value(f"a{suffix}", labels)
        assert registry.get_sample_value(f"b{suffix}", labels) == theirs
    batched.observe(2.0, now=1.3)
    assert registry.get_sample_value("b_count") == 7
