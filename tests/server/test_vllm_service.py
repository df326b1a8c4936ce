"""`vllm.grpc.engine.VllmEngine` by its raw messages: token ids in, token ids out."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from functools import partial
from typing import Any

import grpc
import pytest

from cupaged.llm import LLM
from cupaged.server.auth import Tokens
from cupaged.server.compat.interface import Interface
from cupaged.server.compat.vllm_requests import paths_for
from cupaged.server.front_end import FrontEndOptions
from tests.server.asking import PROMPT, Told, check_answers, failure, offline
from tests.server.local_server import SECONDS, LocalServer, wait_until

SERVICE = "vllm.grpc.engine.VllmEngine"
INTERFACE = Interface("vllm", SERVICE)
message = INTERFACE.message
Code = grpc.StatusCode


def method(server: LocalServer, name: str) -> Any:
    """A callable for one RPC, as generated stubs would make it."""
    found = INTERFACE.service.methods_by_name[name]
    kind = server.channel.unary_stream if found.server_streaming else server.channel.unary_unary
    return kind(
        f"/{SERVICE}/{name}",
        request_serializer=lambda request: request.SerializeToString(),
        response_deserializer=message(found.output_type.name).FromString,
    )


def ask(server: LocalServer, name: str, **fields: Any) -> Any:
    """The answer of an RPC."""
    request = message(f"{name}Request")(**fields)
    return method(server, name)(request, timeout=SECONDS)


def asked(ids: list[int], *, stream: bool = True, request_id: str = "", **params: Any) -> Any:
    """A GenerateRequest: greedy, and six tokens, unless the parameters say otherwise."""
    params = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, **params}
    return message("GenerateRequest")(
        request_id=request_id, tokenized={"input_ids": ids}, sampling_params=params, stream=stream
    )


def generate(server: LocalServer, request: Any) -> tuple[list[Any], dict[int, Any]]:
    """Chunks, and the end of each sample."""
    answers = list(method(server, "Generate")(request, timeout=SECONDS))
    kinds = [answer.WhichOneof("response") for answer in answers]
    chunks = [a.chunk for a, kind in zip(answers, kinds, strict=True) if kind == "chunk"]
    ends = [a.complete for a, kind in zip(answers, kinds, strict=True) if kind == "complete"]
    assert len({end.index for end in ends}) == len(ends)
    return chunks, {end.index: end for end in ends}


def refused(server: LocalServer, request: Any) -> Told:
    return failure(lambda: method(server, "Generate")(request, timeout=SECONDS))


@pytest.fixture(scope="module")
def ids(llm: LLM) -> list[int]:
    return llm.get_tokenizer().encode(PROMPT)


# ---- Generate ----------------------------------------------------------------------------------


def test_chunks_are_what_the_engine_says_in_one_process(
    server: LocalServer, llm: LLM, ids: list[int]
) -> None:
    expected = offline(llm, PROMPT).outputs[0].token_ids
    chunks, ends = generate(server, asked(ids))
    assert [token for chunk in chunks for token in chunk.token_ids] == expected
    assert all(chunk.completion_tokens == len(chunk.token_ids) > 0 for chunk in chunks)
    assert {(c.prompt_tokens, c.index) for c in chunks} == {(len(ids), 0)}
    end = ends[0]
    assert (end.finish_reason, end.prompt_tokens, end.completion_tokens) == ("length", len(ids), 6)
    assert not end.output_ids and end.WhichOneof("matched_stop") is None
    server.wait_idle()


def test_an_answer_in_one_piece(server: LocalServer, llm: LLM, ids: list[int]) -> None:
    expected = offline(llm, PROMPT, n=2).outputs
    chunks, ends = generate(server, asked(ids, stream=False, n=2))
    assert not chunks and len(ends) == 2
    assert [[*ends[i].output_ids] for i in (0, 1)] == [o.token_ids for o in expected]
    assert [ends[i].completion_tokens for i in (0, 1)] == [6, 6]


def test_a_text_is_tokenised_here(server: LocalServer, ids: list[int]) -> None:
    params = {"temperature": 0, "max_tokens": 2, "ignore_eos": True}
    request = message("GenerateRequest")(text=PROMPT, sampling_params=params)
    _, ends = generate(server, request)
    assert (ends[0].prompt_tokens, ends[0].completion_tokens) == (len(ids), 2)


def test_samples_of_a_stream(server: LocalServer, llm: LLM, ids: list[int]) -> None:
    chunks, ends = generate(server, asked(ids, n=3, temperature=1, seed=7))
    expected = offline(llm, PROMPT, n=3, temperature=1, seed=7).outputs
    for i in range(3):
        got = [token for chunk in chunks if chunk.index == i for token in chunk.token_ids]
        assert got == expected[i].token_ids and ends[i].completion_tokens == 6


def test_what_ended_a_sample(server: LocalServer, llm: LLM, ids: list[int]) -> None:
    tokens = offline(llm, PROMPT, max_tokens=12).outputs[0].token_ids
    place = next(i for i in range(3, 12) if tokens[i] not in tokens[:i])
    for stream in (True, False):
        stop = asked(ids, stream=stream, max_tokens=12, stop_token_ids=[tokens[place]])
        chunks, ends = generate(server, stop)
        assert (ends[0].finish_reason, ends[0].matched_token_id) == ("stop", tokens[place])
        assert ends[0].completion_tokens == place + 1
        got = [t for c in chunks for t in c.token_ids] or [*ends[0].output_ids]
        assert got == tokens[: place + 1]
        text = llm.get_tokenizer().decode(tokens[:2])
        chunks, ends = generate(server, asked(ids, stream=stream, stop=[text], max_tokens=12))
        assert (ends[0].finish_reason, ends[0].matched_stop_str) == ("stop", text)
        expected = offline(llm, PROMPT, max_tokens=12, stop=[text]).outputs[0]
        assert expected.finish_reason == "stop"
        assert ends[0].completion_tokens == len(expected.token_ids) < 12


def test_log_probabilities(server: LocalServer, llm: LLM, ids: list[int]) -> None:
    output = offline(llm, PROMPT, logprobs=2, prompt_logprobs=1)
    told = output.outputs[0].logprobs
    assert told is not None and output.prompt_logprobs is not None
    chunks, ends = generate(server, asked(ids, logprobs=2, prompt_logprobs=1))
    assert chunks[0].HasField("input_logprobs") and not chunks[0].token_ids
    assert not any(chunk.HasField("input_logprobs") for chunk in chunks[1:])
    _, whole = generate(server, asked(ids, stream=False, logprobs=2, prompt_logprobs=1))
    for parts in ([c.output_logprobs for c in chunks[1:]], [whole[0].output_logprobs]):
        assert [t for p in parts for t in p.token_ids] == output.outputs[0].token_ids
        values = [v for p in parts for v in p.token_logprobs]
        assert values == pytest.approx(
            [d[t].logprob for d, t in zip(told, output.outputs[0].token_ids, strict=True)],
            abs=1e-4,
        )
        tops = [top for p in parts for top in p.top_logprobs]
        assert [len(top.token_ids) for top in tops] == [2] * 6
    known = [told for told in output.prompt_logprobs if told is not None]
    for prompt in (chunks[0].input_logprobs, whole[0].input_logprobs):
        assert [*prompt.token_ids] == ids
        assert not prompt.token_logprobs[0].HasField("value")
        likeliest = [max(p.logprob for p in told.values()) for told in known]
        tops = [top.values[0] for top in prompt.top_logprobs[1:]]
        assert tops == pytest.approx(likeliest, abs=1e-4)
        assert not prompt.top_logprobs[0].values
    _, ends = generate(server, asked(ids, stream=False, logprobs=0))
    assert len(ends[0].output_logprobs.token_ids) == 6 and not ends[0].output_logprobs.top_logprobs


def test_zeros_mean_the_defaults_of_the_model(server: LocalServer, ids: list[int]) -> None:
    request = asked(ids, top_p=0, min_p=0, repetition_penalty=0, n=0, max_tokens=3)
    assert generate(server, request)[1][0].completion_tokens == 3


def test_a_bias_decides(server: LocalServer, ids: list[int]) -> None:
    _, ends = generate(server, asked(ids, stream=False, logit_bias={77: 100.0}, max_tokens=3))
    assert [*ends[0].output_ids] == [77, 77, 77]


# ---- refused -----------------------------------------------------------------------------------


def test_refusals_name_the_fields(server: LocalServer, ids: list[int]) -> None:
    length = [5] * 1024
    cases = [
        (asked(ids, temperature=-1), "sampling_params.temperature", "INVALID_PARAMETER"),
        (asked(ids, top_k=2**32 - 1, n=2**32 - 1), "sampling_params.n", "INVALID_PARAMETER"),
        (asked(ids, max_tokens=0), "sampling_params.max_tokens", "INVALID_PARAMETER"),
        (asked(ids, seed=-2), "sampling_params.seed", "INVALID_PARAMETER"),
        (asked(ids, logit_bias={-1: 1.0}), "sampling_params.logit_bias", "INVALID_PARAMETER"),
        (asked(ids, logit_bias={9999: 1.0}), "sampling_params.logit_bias", "INVALID_PARAMETER"),
        (asked(ids, stop=[""]), "sampling_params.stop", "INVALID_PARAMETER"),
        (asked(ids, stop_token_ids=[9999]), "sampling_params.stop_token_ids", "INVALID_PARAMETER"),
        (asked(ids, max_tokens=1020), "sampling_params.max_tokens", "CONTEXT_LENGTH_EXCEEDED"),
        (asked([]), "tokenized.input_ids", "INVALID_PROMPT"),
        (asked([5, 9999]), "tokenized.input_ids[1]", "INVALID_PROMPT"),
        (asked(length), "tokenized.input_ids", "CONTEXT_LENGTH_EXCEEDED"),
        (asked(ids, request_id="\n"), "request_id", "INVALID_PARAMETER"),
        (message("GenerateRequest")(), "input", "INVALID_PROMPT"),
        (message("GenerateRequest")(text=""), "text", "INVALID_PROMPT"),
        (
            message("GenerateRequest")(text="a", data_parallel_rank=1),
            "data_parallel_rank",
            "INVALID_PARAMETER",
        ),
    ]
    for request, field, reason in cases:
        status = refused(server, request)
        assert (status.code, status.reason) == (Code.INVALID_ARGUMENT, reason), status
        assert status.violations[0][0].startswith(field), status
    check_answers(server)


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling_params": {"json_schema": "{}"}},
        {"sampling_params": {"regex": ""}},
        {"sampling_params": {"json_object": False}},
        {"sampling_params": {"choice": {"choices": ["a"]}}},
        {"sampling_params": {"truncate_prompt_tokens": 5}},
        {"kv_transfer_params_json": ""},
        {"kv_transfer_params": {}},
        {"mm_inputs": {}},
        {"extra_mm_inputs": [{}]},
        {"media_refs": {}},
    ],
)
def test_what_is_not_built_is_refused(server: LocalServer, fields: dict[str, Any]) -> None:
    status = refused(server, message("GenerateRequest")(text="a", **fields))
    assert (status.code, status.reason) == (Code.UNIMPLEMENTED, "NOT_SUPPORTED")
    group = fields.get("sampling_params", fields)
    assert next(iter(group)) in status.message


def test_bytes_that_are_no_request(server: LocalServer) -> None:
    call: Any = server.channel.unary_stream(f"/{SERVICE}/Generate")
    stop = b"\x22\x03\x52\x01\xff"  # sampling_params, of it one stop string, which is not UTF-8
    for data, field, reason in (
        (b"\xff\xff", "request", "MALFORMED_REQUEST"),
        (b"\x0a\x01\xff", "request_id", "INVALID_PROMPT"),
        (stop, "sampling_params.stop[0]", "INVALID_PROMPT"),
    ):
        status = failure(partial(call, data, timeout=SECONDS))
        assert (status.code, status.reason) == (Code.INVALID_ARGUMENT, reason)
        assert status.violations[0][0] == field


def test_methods_that_are_not_built(server: LocalServer) -> None:
    for name in ("Embed", "FlushCache", "StartProfile", "StopProfile", "SubscribeKvEvents"):
        kind = INTERFACE.service.methods_by_name[name].input_type.name
        call, request = method(server, name), message(kind)()
        status = failure(partial(call, request, timeout=SECONDS))
        assert status.code is Code.UNIMPLEMENTED


def test_field_names_of_errors() -> None:
    path = paths_for("tokenized")
    assert path("prompt") == path("prompt length in tokens") == "tokenized.input_ids"
    assert path("prompt_token_ids[3]") == "tokenized.input_ids[3]"
    assert path("logit_bias key") == "sampling_params.logit_bias"
    assert path("stop[2]") == "sampling_params.stop[2]"
    assert path("request_id") == "request_id"
    assert paths_for("text")("prompt length in characters") == "text"


# ---- the end of requests -----------------------------------------------------------------------


def test_abort_ends_the_work_and_the_stream(paced: LocalServer) -> None:
    for stream in (True, False):
        request = asked([5, 6], stream=stream, request_id="a", max_tokens=1000)
        call = method(paced, "Generate")(request, timeout=SECONDS)
        wait_until(lambda: paced.stats()["num_running"] == 1)
        ask(paced, "Abort", request_ids=["nobody", "a", "a"])
        *_, last = call
        assert last.complete.finish_reason == "abort"
        assert 0 <= last.complete.completion_tokens < 1000
        paced.wait_idle()
    ask(paced, "Abort", request_ids=["a"])
    many = failure(lambda: ask(paced, "Abort", request_ids=map(str, range(1025))))
    assert (many.code, many.violations[0][0]) == (Code.INVALID_ARGUMENT, "request_ids")


def test_a_cancelled_call_ends_its_request(paced: LocalServer) -> None:
    call = method(paced, "Generate")(asked([5, 6], max_tokens=1000), timeout=SECONDS)
    assert next(call).chunk.token_ids
    call.cancel()
    paced.wait_idle()


def test_overload_and_ids_in_use(paced: LocalServer) -> None:
    start = method(paced, "Generate")
    first = start(asked([5], request_id="one", max_tokens=1000), timeout=SECONDS)
    next(first)
    status = refused(paced, asked([5], request_id="one"))
    assert (status.code, status.reason) == (Code.ALREADY_EXISTS, "REQUEST_ID_IN_USE")
    second = start(asked([5], request_id="two"), timeout=SECONDS)
    wait_until(lambda: paced.stats()["num_waiting"] == 1)
    status = refused(paced, asked([5], request_id="three"))
    assert (status.code, status.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert status.retry_s is not None
    loads = ask(paced, "GetLoads").loads[0]
    assert loads.max_running_requests == 1
    assert ask(paced, "GetServerInfo").max_num_seqs == 1
    first.cancel()
    second.cancel()
    paced.wait_idle()


# ---- what it tells -----------------------------------------------------------------------------


def test_model_server_and_loads(server: LocalServer) -> None:
    health = ask(server, "HealthCheck")
    assert (health.healthy, health.message) == (True, "ready")
    model = ask(server, "GetModelInfo")
    assert (model.served_model_name, model.is_generation) == ("tiny", True)
    assert (model.max_context_length, model.max_req_input_len) == (1024, 1023)
    assert (model.vocab_size, [*model.eos_token_ids], model.bos_token_id) == (509, [0, 2], 1)
    assert [*model.architectures] == ["LlamaForCausalLM"] and not model.supports_vision
    assert model.default_sampling_params_json == ""
    info = ask(server, "GetServerInfo")
    assert (info.server_type, info.data_parallel_size) == ("cupaged", 1)
    assert (info.block_size, info.model_dtype, info.max_num_seqs) == (16, "float32", 64)
    loads = ask(server, "GetLoads", include=["core", "queues"])
    assert loads.dp_rank_count == len(loads.loads) == 1 and loads.timestamp.endswith("+00:00")
    assert ask(server, "GetLoads", dp_rank=0).loads == loads.loads
    assert not ask(server, "GetLoads", dp_rank=1).loads


def test_defaults_of_the_model_are_told(tiny_model: str, ids: list[int]) -> None:
    with LocalServer(tiny_model) as server:
        info = server.client.info
        assert info is not None
        object.__setattr__(info, "generation_defaults", {"top_p": 0.5, "max_tokens": 3})
        told = json.loads(ask(server, "GetModelInfo").default_sampling_params_json)
        assert told == {"top_p": 0.5}
        request = asked(ids)
        request.sampling_params.ClearField("max_tokens")
        assert generate(server, request)[1][0].completion_tokens == 3


def test_the_tokenizer_as_a_zip_file(server: LocalServer) -> None:
    chunks = list(ask(server, "GetTokenizer"))
    content = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks[:-1]] == [""] * (len(chunks) - 1)
    assert chunks[-1].sha256 == hashlib.sha256(content).hexdigest()
    assert content == b"".join(chunk.data for chunk in ask(server, "GetTokenizer"))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert {*archive.namelist()} == {
            "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        }  # fmt: skip
        folder = server.front_end._model.text.folder
        assert folder is not None
        assert archive.read("tokenizer.json") == (folder / "tokenizer.json").read_bytes()


def test_the_template_that_is_served_is_in_it(tiny_model: str) -> None:
    with LocalServer(tiny_model, chat_template="{{ messages[0].content }}") as server:
        content = b"".join(chunk.data for chunk in ask(server, "GetTokenizer"))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.read("chat_template.jinja") == b"{{ messages[0].content }}"


def test_while_the_model_is_loaded_and_after_the_end(tiny_model: str, ids: list[int]) -> None:
    with LocalServer(tiny_model, starts_engine=False) as server:
        health = ask(server, "HealthCheck")
        assert not health.healthy and "loaded" in health.message
        for call in (
            lambda: ask(server, "GetModelInfo"),
            lambda: method(server, "Generate")(asked(ids), timeout=SECONDS),
        ):
            status = failure(call)
            assert (status.code, status.reason) == (Code.UNAVAILABLE, "LOADING")
        assert not ask(server, "GetServerInfo").max_num_seqs
        assert ask(server, "GetLoads").loads[0].num_total_reqs == 0
        ask(server, "Abort", request_ids=["a"])
        server.start_engine()
        server.run(server.client.wait_ready())
        wait_until(lambda: ask(server, "HealthCheck").healthy)
        server.call(lambda: server.client.set_state("draining"))
        wait_until(lambda: not ask(server, "HealthCheck").healthy)
        status = refused(server, asked(ids))
        assert (status.code, status.reason) == (Code.UNAVAILABLE, "DRAINING")


def test_tokens_are_asked_for(tiny_model: str, ids: list[int]) -> None:
    options = FrontEndOptions(tokens=Tokens(secret="s3cret"))
    with LocalServer(tiny_model, options) as server:
        status = failure(lambda: ask(server, "GetModelInfo"))
        assert (status.code, status.reason) == (Code.UNAUTHENTICATED, "TOKEN_MISSING")
        call = method(server, "Generate")
        metadata = [("authorization", "Bearer s3cret")]
        assert [*call(asked(ids), timeout=SECONDS, metadata=metadata)][-1].HasField("complete")
