"""Cached prefixes over gRPC: what was found is told, and salts keep requests apart."""

from __future__ import annotations

import pytest

from cupaged.v1 import generation_pb2 as pb
from cupaged.v1 import model_pb2 as mpb
from tests.server.asking import joined, read, request, stream_request, tokens
from tests.server.local_server import SECONDS, LocalServer


def prompt(first: int, length: int = 40) -> pb.TokenIds:
    """Ids that no other test of the module has."""
    return pb.TokenIds(ids=[10 + (first * 7 + i) % 400 for i in range(length)])


def found(server: LocalServer, token_ids: pb.TokenIds, salt: str = "") -> int:
    """Cached tokens of a request that is answered whole."""
    message = request(None, token_ids=token_ids, stopping=tokens(2), cache_salt=salt)
    return server.generation.Generate(message, timeout=SECONDS).usage.cached_tokens


@pytest.mark.parametrize(("length", "cached"), [(15, 0), (32, 16), (33, 32), (40, 32)])
def test_the_same_prompt_again(server: LocalServer, length: int, cached: int) -> None:
    ids = prompt(length, length)
    message = stream_request(None, token_ids=ids, stopping=tokens(2))
    first, second = read(server, message), read(server, message)
    for events, number in ((first, 0), (second, cached)):
        assert events[0].started.HasField("cached_tokens")
        assert events[0].started.cached_tokens == events[-1].usage.cached_tokens == number
    assert joined(first)[0]["token_ids"] == joined(second)[0]["token_ids"]


def test_salts_keep_requests_apart(server: LocalServer) -> None:
    before = server.stats()
    ids = prompt(1)
    assert [found(server, ids, salt) for salt in ("a", "b", "", "a", "b", "")] == [0] * 3 + [32] * 3
    after = server.stats()
    assert after["prefix_cache_queries_total"] - before["prefix_cache_queries_total"] == 240
    assert after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"] == 96


def test_the_feature_is_listed(server: LocalServer, tiny_model: str) -> None:
    info = server.models.GetServerInfo(mpb.GetServerInfoRequest(), timeout=SECONDS)
    assert [*info.features] == ["prefix_cache"]
    with LocalServer(tiny_model, engine={"enable_prefix_caching": False}) as without:
        info = without.models.GetServerInfo(mpb.GetServerInfoRequest(), timeout=SECONDS)
        assert [*info.features] == []
        assert [found(without, prompt(2)) for _ in range(2)] == [0, 0]
