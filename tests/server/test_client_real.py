"""The client against the real service with a tiny model: the same texts as in one process."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cupaged.client import AsyncClient, Client, Delta, Finished, Started, Usage, errors
from cupaged.client.errors import FieldViolation
from cupaged.llm import LLM
from cupaged.sampling_params import SamplingParams
from cupaged.server.auth import Tokens
from cupaged.server.front_end import FrontEndOptions
from cupaged.server.tls import TlsFiles
from tests.e2e.cli import Inline, environment
from tests.server.local_server import LocalServer, wait_until

PROMPT = "The memory of a process"
CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello, world!"}]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
CERTS = Path(__file__).parent / "certs"


@pytest.fixture(scope="module")
def llm(tiny_model: str) -> LLM:
    return LLM(tiny_model, device="cpu")


@pytest.fixture
def client(server: LocalServer) -> Iterator[Client]:
    with Client(server.address, timeout=30) as client:
        yield client
    server.wait_idle()


def offline(llm: LLM, prompt: Any, **options: Any) -> Any:
    return llm.generate(prompt, SamplingParams(**options), use_tqdm=False)[0]


@pytest.mark.parametrize(
    "options",
    [
        GREEDY,
        {**GREEDY, "temperature": 0.9, "top_p": 0.9, "top_k": 30, "seed": 5, "n": 3},
        {**GREEDY, "max_tokens": 30, "stop": ["e"], "include_stop_str_in_output": True},
        {**GREEDY, "repetition_penalty": 1.3, "logit_bias": {50: -5.0}, "bad_words": ["in"]},
        {**GREEDY, "trace_decode_token_ids": [40, 41, 42]},
        {**GREEDY, "detokenize": False},
    ],
)
def test_answers_are_those_of_one_process(
    client: Client, llm: LLM, options: dict[str, Any]
) -> None:
    expected = offline(llm, PROMPT, **options)
    got = client.generate(PROMPT, **options)
    assert [(o.text, o.token_ids, o.finish_reason, o.stop_reason) for o in got.outputs] == [
        (o.text, o.token_ids, o.finish_reason, o.stop_reason) for o in expected.outputs
    ]
    assert got.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert got.usage.completion_tokens == sum(len(o.token_ids) for o in expected.outputs)
    with client.stream(PROMPT, **options) as stream:
        events = list(stream)
    for index, output in enumerate(got.outputs):
        deltas = [e for e in events if isinstance(e, Delta) and e.index == index]
        assert "".join(delta.text for delta in deltas) == output.text
        assert [token for delta in deltas for token in delta.token_ids] == output.token_ids
        assert stream.finished[index].stop_reason == output.stop_reason
    assert isinstance(events[0], Started) and isinstance(events[-1], Usage)


def test_log_probabilities_are_those_of_one_process(client: Client, llm: LLM) -> None:
    options = {**GREEDY, "logprobs": 2, "prompt_logprobs": 1, "echo": True}
    got = client.generate(PROMPT, **options)
    del options["echo"]
    expected = offline(llm, PROMPT, **options)
    (output,), (offline_output,) = got.outputs, expected.outputs
    assert output.logprobs is not None and output.cumulative_logprob is not None
    assert [list(p) for p in output.logprobs] == [list(p) for p in offline_output.logprobs]
    for position, other in zip(output.logprobs, offline_output.logprobs, strict=True):
        for token, known in position.items():
            assert known.rank == other[token].rank
            assert known.logprob == pytest.approx(other[token].logprob, abs=1e-3)
    assert output.cumulative_logprob == pytest.approx(offline_output.cumulative_logprob, abs=1e-2)
    assert got.prompt_logprobs is not None and got.prompt_logprobs[0] is None
    assert len(got.prompt_logprobs) == len(expected.prompt_token_ids)
    assert (got.prompt, got.prompt_token_ids) == (PROMPT, expected.prompt_token_ids)


def test_chats_and_token_ids(client: Client, llm: LLM) -> None:
    rendered = llm.render_chat(CHAT)
    expected = offline(llm, rendered, **GREEDY).outputs[0].text
    assert client.chat(CHAT, **GREEDY).text == expected
    with client.stream_chat(CHAT, **GREEDY) as stream:
        assert "".join(stream.texts()) == expected
    assert client.generate(rendered["prompt_token_ids"], **GREEDY).text == expected
    chat = client.apply_chat_template(CHAT)
    assert chat.token_ids == rendered["prompt_token_ids"]
    assert chat.text.endswith("Hello, world!<|im_end|>\n<|im_start|>assistant\n")
    assert client.tokenize(CHAT) == rendered["prompt_token_ids"]
    ids = client.tokenize(PROMPT)
    assert ids == offline(llm, PROMPT, max_tokens=1).prompt_token_ids
    assert client.detokenize(ids) == PROMPT


def test_facts(client: Client, server: LocalServer) -> None:
    model = client.model_info()
    assert model.max_model_len == 1024 and model.has_chat_template
    assert client.model_info(model.name) == model
    assert [known.name for known in client.list_models()] == [model.name]
    assert "cupaged.v1" in client.server_info().api_packages
    load = client.load()
    assert (load.state, load.num_kv_blocks) == ("ready", model.num_kv_blocks)
    with client.watch_load(interval_s=0.1) as loads:
        assert next(loads).state == next(loads).state == "ready"
    assert client.health() == client.health("cupaged.v1.GenerationService") == "SERVING"
    with client.watch_health() as statuses:
        assert next(statuses) == "SERVING"


@pytest.mark.parametrize(
    ("options", "kind", "field"),
    [
        ({"top_p": 3}, errors.InvalidRequestError, "sampling.top_p"),
        ({"max_tokens": 0}, errors.InvalidRequestError, "stopping.max_new_tokens"),
        ({"stop_token_ids": [10**6]}, errors.InvalidRequestError, "stopping.stop_token_ids[0]"),
        ({"logprobs": 1000}, errors.InvalidRequestError, "output.logprobs"),
        ({"queue_timeout_s": -1}, errors.InvalidRequestError, "queue_timeout"),
    ],
)
def test_a_refused_field_is_named(
    client: Client, options: dict[str, Any], kind: type[Exception], field: str
) -> None:
    with pytest.raises(kind) as raised:
        client.generate("a", **options)
    assert isinstance(raised.value, errors.ClientError)
    (violation,) = raised.value.field_violations
    assert isinstance(violation, FieldViolation) and violation.field == field


def test_other_errors(client: Client) -> None:
    with pytest.raises(errors.ContextLengthError):
        client.generate([5] * 2000)
    with pytest.raises(errors.NotFoundError) as raised:
        client.generate("a", model="other")
    assert raised.value.reason == "MODEL_NOT_FOUND"
    with pytest.raises(errors.UnimplementedError):
        client.generate("a", spaces_between_special_tokens=False)
    with pytest.raises(errors.InvalidRequestError):
        client.generate("")


def test_cancelled_streams_leave_the_engine(paced: LocalServer) -> None:
    with Client(paced.address) as client:
        for how in ("exit", "drop", "close"):
            with Client(paced.address) as other:
                stream = other.stream("a", max_tokens=900, ignore_eos=True)
                assert isinstance(next(stream), Started)
                assert client.load().state == "ready"
                if how == "exit":
                    stream.cancel()
                elif how == "drop":
                    del stream
                else:
                    other.close()
                paced.wait_idle()
        with pytest.raises(errors.DeadlineError):
            client.generate("a", max_tokens=900, ignore_eos=True, timeout=0.3)
        paced.wait_idle()


def test_an_async_client_in_the_loop_of_the_front_end(paced: LocalServer) -> None:
    async def run() -> list[str]:
        async with AsyncClient(paced.address, timeout=30) as client:
            kept = client.stream("a", max_tokens=900, ignore_eos=True)
            seen = [type(await anext(kept)).__name__ for _ in range(2)]
            kept.cancel()
            async for event in client.stream("a", max_tokens=900, ignore_eos=True):
                seen.append(type(event).__name__)
                break  # nobody has the stream any more
            answer = await client.generate("a", max_tokens=3, ignore_eos=True)
            return [*seen, str(answer.usage.completion_tokens)]

    assert paced.run(run()) == ["Started", "Delta", "Started", "3"]
    paced.wait_idle()


def test_abort_ends_a_stream_in_order(paced: LocalServer) -> None:
    with Client(paced.address) as client:
        with client.stream("a", max_tokens=900, ignore_eos=True, request_id="mine") as stream:
            next(stream)
            assert client.abort("mine", "unknown") == ["mine"]
            events = list(stream)
        end = stream.finished[0]
        assert isinstance(events[-2], Finished) and end.finish_reason == "abort"
        assert stream.usage is not None and stream.usage.completion_tokens == end.num_tokens
        assert client.abort("mine") == []
    paced.wait_idle()


def test_a_full_queue_is_waited_for(paced: LocalServer) -> None:
    """One runs, one waits; the third is refused until the first has gone."""
    with Client(paced.address, retries=0) as client, Client(paced.address, retries=50) as patient:
        running = client.stream("a", max_tokens=900, ignore_eos=True)
        next(running)
        waiting = client.stream("a", max_tokens=900, ignore_eos=True)
        wait_until(lambda: paced.stats()["num_waiting"] == 1)
        with pytest.raises(errors.QueueFullError) as raised:
            client.generate("a", max_tokens=1)
        assert raised.value.retry_after_s is not None and raised.value.retry_after_s >= 0.1
        answers: list[int] = []

        def ask() -> None:
            answer = patient.generate("a", max_tokens=2, ignore_eos=True)
            answers.append(answer.usage.completion_tokens)

        asking = threading.Thread(target=ask)
        asking.start()
        running.cancel()
        waiting.cancel()
        asking.join(30)
        assert answers == [2]
    paced.wait_idle()


def test_ids_in_use_and_waits_that_are_too_long(paced: LocalServer) -> None:
    with Client(paced.address) as client:
        running = client.stream("a", max_tokens=900, ignore_eos=True, request_id="one")
        next(running)
        with pytest.raises(errors.DuplicateRequestError) as raised:
            client.generate("a", request_id="one")
        assert raised.value.request_id == "one"
        with pytest.raises(errors.QueueTimeoutError):
            client.generate("a", queue_timeout_s=0.1)
        running.cancel()
    paced.wait_idle()


def test_a_server_that_loads_is_waited_for(tiny_model: str) -> None:
    with LocalServer(tiny_model, starts_engine=False) as server:
        with Client(server.address, retries=0) as client:
            assert client.health() == "NOT_SERVING"
            with pytest.raises(errors.LoadingError) as raised:
                client.generate("a")
            assert raised.value.retry_after_s is not None
        with Client(server.address, retries=50) as client:
            answers: list[int] = []

            def ask() -> None:
                answer = client.generate(PROMPT, max_tokens=2, ignore_eos=True)
                answers.append(answer.usage.completion_tokens)

            asking = threading.Thread(target=ask)
            asking.start()
            server.start_engine()
            asking.join(30)
            assert answers == [2]


def test_tokens_and_mutual_tls(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUPAGED_API_KEY", raising=False)
    token = tmp_path / "token"
    token.write_text("secret\n")
    options = FrontEndOptions(
        tokens=Tokens(token),
        tls=TlsFiles(CERTS / "server.pem", CERTS / "server.key", CERTS / "root.pem"),
    )
    keys: dict[str, Any] = {
        "ca_file": CERTS / "root.pem",
        "cert_file": CERTS / "client.pem",
        "key_file": CERTS / "client.key",
    }
    with LocalServer(tiny_model, options) as server:
        with Client(server.address, token_file=token, **keys) as client:
            assert client.generate(PROMPT, **GREEDY).usage.completion_tokens == 8
        with Client(server.address, **keys) as client:
            assert client.health() == "SERVING"
            with pytest.raises(errors.UnauthenticatedError) as raised:
                client.generate(PROMPT)
            assert raised.value.reason == "TOKEN_MISSING"


def test_the_commands(
    server: LocalServer, llm: LLM, monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:  # fmt: skip
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
    cupaged = Inline(monkeypatch, capfdbinary)
    address = ("-a", server.address)
    short = ("--max-tokens", "8", "--ignore-eos")
    text = offline(llm, PROMPT, **GREEDY).outputs[0].text
    done = cupaged("client", "generate", *address, "-p", PROMPT, *short)
    assert (done.code, done.out, done.err) == (0, f"{text}\n", "")
    done = cupaged("client", "generate", *address, "-p", PROMPT, *short, "--json")
    events = [json.loads(line) for line in done.out.splitlines()]
    assert "".join(event.get("text", "") for event in events) == text
    done = cupaged("client", "chat", *address, *short, "-q", "Hello, world!")
    asked = llm.render_chat([{"role": "user", "content": "Hello, world!"}])
    assert done.out == offline(llm, asked, **GREEDY).outputs[0].text + "\n"
    assert cupaged("client", "health", *address).out == "SERVING\n"
    assert cupaged("client", "load", *address).out.startswith("state      ready\n")
    done = cupaged("client", "generate", *address, "-p", PROMPT, "-m", "other")
    assert done.code == 1 and "(MODEL_NOT_FOUND); leave the model out" in done.err


@pytest.mark.parametrize("name", ["grpc_stream", "grpc_async_many"])
def test_the_examples(server: LocalServer, name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"cupaged.examples.{name}", server.address],
        env=environment(GRPC_VERBOSITY="NONE"), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "tokens, " in done.stdout
    server.wait_idle()
