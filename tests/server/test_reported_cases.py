"""Inputs by which other servers were reported to fail, on whole servers; the names are the cases'.

Parts of the same cases have tests nearer to the code: cancellation and deadlines (SV-01, SV-03) in
`test_streams.py` and `test_engine_loop.py`, smaller messages (SV-04) in `test_errors.py`, failing
steps (SV-07) in `test_core_failures.py`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from cupaged.client import Client
from cupaged.engine.detokenizer import IncrementalDetokenizer
from cupaged.llm import LLM
from cupaged.server.front_end import FrontEndOptions
from cupaged.server.grpc_server import GrpcOptions
from cupaged.v1 import generation_pb2 as pb
from cupaged.v1 import generation_pb2_grpc
from cupaged.v1 import model_pb2 as mpb
from tests.e2e.cli import command, environment
from tests.server.asking import (
    PROMPT,
    Started,
    check_answers,
    failure,
    health,
    joined,
    offline,
    output,
    request,
    stream_request,
    tokens,
)
from tests.server.kserve_messages import KServe, infer
from tests.server.local_server import SECONDS, LocalServer, wait_until
from tests.server.supervised import Supervised
from tests.tiny_models import TINIER, write_hf_folder

Code = grpc.StatusCode
SERVING, NOT_SERVING = 1, 2
LONG = 10 * SECONDS  # for thousands of log probabilities on a busy machine
NULL = ("--port", "0", "--metrics-port", "-1", "--runner", "null", "--null-steps-per-s", "100")


# ---- SV-04: large messages ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model with a context of 8,192 tokens."""
    spec = replace(TINIER, max_position_embeddings=8192)
    return str(write_hf_folder(tmp_path_factory.mktemp("long") / "tiny", spec))


@pytest.mark.slow
def test_sv_04_log_probabilities_of_4096_prompt_tokens(long_model: str) -> None:
    """Larger than a limit of the server, than one of the client, and than neither."""
    ids = [5 + i % 500 for i in range(4096)]
    asked = request(
        None, token_ids=pb.TokenIds(ids=ids), stopping=tokens(1), **output(prompt_logprobs=20)
    )
    limit = 2**18
    too_large = re.compile(rf"larger than max \((\d+) vs\. {limit}\)")
    for at_server in (True, False):
        server_limit, client_limit = (limit, -1) if at_server else (2**26, limit)
        options = FrontEndOptions(grpc=GrpcOptions(max_message_bytes=server_limit))
        with LocalServer(long_model, options) as server:
            options_here = [("grpc.max_receive_message_length", client_limit)]
            with grpc.insecure_channel(server.address, options_here) as channel:
                stub = generation_pb2_grpc.GenerationServiceStub(channel)
                other = stub.GenerateStream(stream_request(stopping=tokens(200)), timeout=LONG)
                next(other)
                status = failure(lambda: stub.Generate(asked, timeout=LONG))  # noqa: B023
                assert (status.code, status.reason) == (Code.RESOURCE_EXHAUSTED, None)
                size = too_large.search(status.message)
                assert size is not None and int(size[1]) > 20 * 4096 * 8, status.message
                assert sum(len(m.delta.token_ids) for m in other) == 200  # nobody else is harmed
            if not at_server:
                with Client(server.address, timeout=LONG) as client:
                    answer = client.generate(ids, max_tokens=1, prompt_logprobs=20)
                told = answer.prompt_logprobs
                assert told is not None and len(told) == 4096
            check_answers(server)


# ---- SV-05: the end of a server ----------------------------------------------------------------


def busy(server: Supervised, num_tokens: int) -> list[Any]:
    """Two streams that run and one that waits, on a server that runs two."""
    running = [
        Started(server, stopping=tokens(num_tokens)).call  # type: ignore[arg-type]
        for _ in range(2)
    ]
    queued = server.generation.GenerateStream(stream_request(stopping=tokens(20)), timeout=SECONDS)

    def num_waiting() -> int:
        load = server.models.GetLoad(mpb.GetLoadRequest(), timeout=SECONDS).load
        return load.num_waiting

    wait_until(lambda: num_waiting() == 1)
    return [*running, queued]


def test_sv_05_running_and_waiting_streams_come_to_their_ends(tiny_model: str) -> None:
    with Supervised(tiny_model, *NULL, "--max-num-seqs", "2", "--drain-delay", "1") as server:
        watch = health(server.channel).Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        assert next(watch).status == SERVING
        calls = busy(server, 300)
        server.terminate()
        assert next(watch).status == NOT_SERVING
        status = failure(lambda: server.generation.Generate(request(), timeout=SECONDS))
        assert status.code is Code.UNAVAILABLE
        ends = [[*call][-1].finished.completion_tokens for call in calls]
        assert ends == [300, 300, 20]
        assert server.end() == 0


def test_sv_05_a_second_signal_forces_the_end(tiny_model: str) -> None:
    with Supervised(tiny_model, *NULL, "--max-num-seqs", "2") as server:
        calls = busy(server, 1000)
        server.terminate()
        server.until("SIGTERM: the server ends")
        server.process.send_signal(signal.SIGINT)
        assert server.end() == 128 + signal.SIGINT
        for call in calls:
            assert failure(lambda: call).code is Code.UNAVAILABLE  # noqa: B023 - called at once


# ---- SV-07: one bad request --------------------------------------------------------------------


@pytest.fixture
def broken_detokenizer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A bug: the text of a request that shows special tokens fails after some tokens."""
    append = IncrementalDetokenizer.append

    def fail(self: IncrementalDetokenizer, token_ids: Any) -> str:
        text = append(self, token_ids)
        if not self._skip_special_tokens and len(self._window) > 10:
            raise RuntimeError("a planted bug")
        return text

    monkeypatch.setattr(IncrementalDetokenizer, "append", fail)
    yield


@pytest.mark.usefixtures("broken_detokenizer")
@pytest.mark.parametrize("method", ["Generate", "GenerateStream", "ModelStreamInfer"])
def test_sv_07_a_request_whose_text_cannot_be_made(
    endless_text: LocalServer, llm: LLM, method: str
) -> None:
    server = endless_text
    expected = offline(llm, PROMPT, max_tokens=60).outputs[0]
    before = server.num_aborted()
    other = server.generation.GenerateStream(stream_request(stopping=tokens(60)), timeout=SECONDS)
    events = [next(other)]
    bad = {"stopping": tokens(900), **output(skip_special_tokens=False)}
    if method == "ModelStreamInfer":
        sampling = '{"skip_special_tokens": false, "max_tokens": 900, "ignore_eos": true}'
        asked = infer(text_input=PROMPT, stream=True, sampling_parameters=sampling)
        *_, last = KServe(server.channel).ModelStreamInfer(iter([asked]))
        assert last.error_message == "internal error: see the server's log"
    else:
        make = request if method == "Generate" else stream_request
        call = getattr(server.generation, method)
        status = failure(lambda: call(make(**bad), timeout=SECONDS))
        assert (status.code, status.reason) == (Code.INTERNAL, "INTERNAL")
    events += other
    (sample,) = joined(events)
    assert sample["text"] == expected.text and sample["token_ids"] == [*expected.token_ids]
    wait_until(lambda: server.num_aborted() == before + 1)  # long before its 900 tokens
    state = health(server.channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
    assert state.status == SERVING
    check_answers(server)


@pytest.fixture(scope="module")
def endless_text(tiny_model: str) -> Iterator[LocalServer]:
    """A real model, one of its own: its streams are broken by a test."""
    with LocalServer(tiny_model) as running:
        yield running


# ---- CT-01: a container without a home ---------------------------------------------------------


class Nowhere:
    """Runs the command without a home, in a folder that it cannot write.

    Its user has no name, where the tests run as root and such a user can import the package.

    Attributes:
        model: of its own, which that user can read.
        temporary: the one folder that can be written.
    """

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o755)
        self.model = str(write_hf_folder(folder / "tiny", TINIER))
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.temporary.chmod(0o1777)
        here = folder / "here"
        here.mkdir(mode=0o555)
        caches = ("CUPAGED_CACHE_DIR", "CUPY_CACHE_DIR", "XDG_CACHE_HOME", "HF_HOME")
        changes = {"HOME": "/dev/null/home", "TMPDIR": str(self.temporary)}
        env = {k: v for k, v in environment(**changes).items() if k not in caches}
        self._options: dict[str, Any] = {"cwd": here, "env": env, "text": True}
        nobody = {**self._options, "user": 12345, "group": 12345, "extra_groups": []}
        if os.getuid() == 0:
            probe = [sys.executable, "-B", "-c", "import cupaged.cli.main, numpy"]
            with suppress(OSError, subprocess.SubprocessError):  # that user cannot even start it
                subprocess.run(probe, **nobody, capture_output=True, check=True)
                self._options = nobody

    def start(self, *words: str) -> subprocess.Popen[str]:
        """The command's process."""
        pipe = subprocess.PIPE
        return subprocess.Popen(command(*words), stdout=pipe, stderr=pipe, **self._options)


@pytest.fixture
def nowhere() -> Iterator[Nowhere]:
    """In a folder whose parents everybody may enter."""
    with tempfile.TemporaryDirectory() as folder:
        yield Nowhere(Path(folder))


def test_ct_01_a_server_starts(nowhere: Nowhere) -> None:
    options = ("--port", "0", "--metrics-port", "0", "--device", "cpu", "--disable-log-stats")
    with nowhere.start("serve", nowhere.model, *options, "--log-level", "warning") as process:
        try:
            assert process.stdout is not None
            place = re.search(r" on grpc://(\S+) ", process.stdout.readline())
            assert place is not None, process.communicate()
            with Client(place[1], timeout=SECONDS) as client:
                answer = client.generate("the cat", max_tokens=3, ignore_eos=True)
                assert answer.usage.completion_tokens == 3
            process.terminate()
            out, log = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    assert (process.returncode, out, log) == (
        0,
        "",
        "",
    )  # nothing is compiled, so nothing to warn of
    assert not any(nowhere.temporary.iterdir())


@pytest.mark.slow
def test_ct_01_kernels_are_compiled_all_the_same(nowhere: Nowhere) -> None:
    words = ("--device", "emulated", "--max-tokens", "2", "--ignore-eos")
    with nowhere.start("generate", nowhere.model, "-p", "a page", *words) as process:
        out, log = process.communicate(timeout=600)
    assert process.returncode == 0 and out.strip(), log
    (warning,) = [line for line in log.splitlines() if "compiled kernels are not kept" in line]
    assert "cannot be made: Not a directory; set CUPAGED_CACHE_DIR" in warning
    assert not any(nowhere.temporary.iterdir())
