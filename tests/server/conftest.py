"""Fixtures of the tests of the service."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from cupaged.llm import LLM
from tests.server.asking import Told, asker
from tests.server.local_server import LocalServer
from tests.tiny_models import TINIER, write_hf_folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a model of 0.4 M parameters, a chat template and a context of 1,024 tokens."""
    return str(write_hf_folder(tmp_path_factory.mktemp("served") / "tiny", TINIER))


@pytest.fixture(scope="session")
def llm(tiny_model: str) -> LLM:
    """The tiny model in this process."""
    return LLM(tiny_model, device="cpu")


@pytest.fixture(scope="module")
def server(tiny_model: str) -> Iterator[LocalServer]:
    """The tiny model, served with everything at its default; shared by the tests of a module."""
    with LocalServer(tiny_model) as running:
        yield running


@pytest.fixture(scope="module")
def paced(tiny_model: str) -> Iterator[LocalServer]:
    """A model that draws the same token 100 times a second for ever, one request at a time.

    One more may wait, and 40 tokens of prompts.
    """
    engine = {"max_num_seqs": 1, "max_num_queued_reqs": 1, "max_num_queued_tokens": 40}
    with LocalServer(
        tiny_model, runner="null", null_steps_per_s=100.0, stream_buffer_tokens=64, engine=engine
    ) as running:
        yield running


@pytest.fixture(scope="module")
def endless(tiny_model: str) -> Iterator[LocalServer]:
    """A model that draws the same token 100 times a second for ever; slow readers keep theirs."""
    with LocalServer(tiny_model, runner="null", null_steps_per_s=100.0) as running:
        yield running


@pytest.fixture(params=["Generate", "GenerateStream"])
def ask(request: pytest.FixtureRequest, server: LocalServer) -> Callable[..., Told]:
    """The failure of a request, whole or as a stream."""
    return asker(server, request.param)
