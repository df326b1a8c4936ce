"""`inference.GRPCInferenceService`: answers in one message, and what is said of the model."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
import pytest

from cupaged._version import __version__
from cupaged.llm import LLM
from cupaged.server.auth import Tokens
from cupaged.server.front_end import FrontEndOptions
from tests.server.asking import PROMPT, Started, failure, offline, waiting
from tests.server.kserve_messages import KServe, infer, message, outputs_of
from tests.server.local_server import LocalServer, wait_until

Code = grpc.StatusCode
SAMPLING = {"temperature": "0", "max_tokens": "6", "ignore_eos": "true"}


@pytest.fixture(scope="module")
def kserve(server: LocalServer) -> KServe:
    return KServe(server.channel)


def greedy(**tensors: Any) -> Any:
    """A request of six tokens, the likeliest ones; values are texts, as in samples of Triton."""
    sampling = json.dumps({**SAMPLING, **tensors.pop("sampling", {})})
    return infer(**{"text_input": PROMPT, "sampling_parameters": sampling, **tensors})


# ---- server and model --------------------------------------------------------------------------


def test_server_and_model_tell_of_themselves(kserve: KServe) -> None:
    assert kserve.ServerLive().live and kserve.ServerReady().ready
    told = kserve.ServerMetadata()
    assert (told.name, told.version) == ("cupaged", __version__)
    for name, version, ready in (("tiny", "", True), ("tiny", "1", True), ("tiny", "2", False),
                                 ("other", "", False)):  # fmt: skip
        asked = message("ModelReadyRequest", name=name, version=version)
        assert kserve.ModelReady(asked).ready is ready
    metadata = kserve.ModelMetadata(message("ModelMetadataRequest", name="tiny"))
    assert (metadata.name, [*metadata.versions]) == ("tiny", ["1"])
    inputs = {t.name: (t.datatype, [*t.shape]) for t in metadata.inputs}
    assert inputs["text_input"] == ("BYTES", [1]) and inputs["stream"] == ("BOOL", [1])
    outputs = {t.name: (t.datatype, [*t.shape]) for t in metadata.outputs}
    assert outputs["text_output"] == ("BYTES", [-1])
    assert outputs["num_input_tokens"] == ("UINT32", [1])
    config = kserve.ModelConfig(message("ModelConfigRequest", name="tiny", version="1")).config
    assert config.model_transaction_policy.decoupled and config.max_batch_size == 0
    assert {t.name: t.data_type for t in config.output}["text_output"] == 13  # TYPE_STRING
    assert {t.name for t in config.input if not t.optional} == {"text_input"}
    (entry,) = kserve.RepositoryIndex().models
    assert (entry.name, entry.version, entry.state, entry.reason) == ("tiny", "1", "READY", "")


def test_an_unknown_model(kserve: KServe) -> None:
    calls = [
        lambda: kserve.ModelMetadata(message("ModelMetadataRequest", name="other")),
        lambda: kserve.ModelConfig(message("ModelConfigRequest", name="tiny", version="2")),
        lambda: kserve.ModelStatistics(message("ModelStatisticsRequest", name="other")),
        lambda: kserve.ModelInfer(greedy(model_name="other")),
    ]
    for call in calls:
        status = failure(call)
        assert (status.code, status.reason) == (Code.NOT_FOUND, "MODEL_NOT_FOUND")


def test_what_is_not_served(server: LocalServer) -> None:
    channel: Any = server.channel
    for method in ("RepositoryModelLoad", "SystemSharedMemoryStatus", "TraceSetting"):
        call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
        assert failure(partial(call, b"", timeout=10)).code is Code.UNIMPLEMENTED


def test_loading_and_draining(tiny_model: str) -> None:
    with LocalServer(tiny_model, starts_engine=False) as server:
        kserve = KServe(server.channel)
        assert kserve.ServerLive().live and not kserve.ServerReady().ready
        (entry,) = kserve.RepositoryIndex().models
        assert entry.state == "UNAVAILABLE" and "loaded" in entry.reason
        ready = message("RepositoryIndexRequest", ready=True)
        assert not kserve.RepositoryIndex(ready).models
        assert failure(lambda: kserve.ModelInfer(greedy())).reason == "LOADING"
        server.start_engine()
        wait_until(lambda: bool(kserve.ServerReady().ready))
        server.call(lambda: server.client.set_state("draining"))
        wait_until(lambda: not kserve.ServerReady().ready)
        assert failure(lambda: kserve.ModelInfer(greedy())).reason == "DRAINING"


def test_tokens_are_asked_for(tiny_model: str) -> None:
    with LocalServer(tiny_model, FrontEndOptions(tokens=Tokens(secret="word"))) as server:
        kserve = KServe(server.channel)
        status = failure(lambda: kserve.ServerLive())
        assert (status.code, status.reason) == (Code.UNAUTHENTICATED, "TOKEN_MISSING")
        assert kserve.ServerLive(metadata=(("authorization", "Bearer word"),)).live


# ---- one answer --------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "typed"])
@pytest.mark.parametrize("shape", [[1], [1, 1]], ids=str)
def test_the_answer_is_the_engines(kserve: KServe, llm: LLM, raw: bool, shape: list[int]) -> None:
    reference = offline(llm, PROMPT, logprobs=0)
    expected = reference.outputs[0]
    answer = kserve.ModelInfer(
        greedy(
            raw=raw,
            id="17",
            text_input=("BYTES", shape, [PROMPT.encode()]),
            return_finish_reason=("BOOL", shape, [True]),
            return_cumulative_logprob=True,
            return_logprobs=True,
            return_num_input_tokens=True,
            return_num_output_tokens=True,
        )
    )
    assert (answer.id, answer.model_name, answer.model_version) == ("17", "tiny", "1")
    assert bool(answer.raw_output_contents) is raw
    told = outputs_of(answer)
    assert told["text_output"] == [(PROMPT + expected.text).encode()]
    assert told["finish_reason"] == [b"length"]
    assert told["num_input_tokens"] == [len(reference.prompt_token_ids)]
    assert told["num_output_tokens"] == [6]
    assert told["cumulative_logprob"] == [pytest.approx(expected.cumulative_logprob, rel=1e-5)]
    positions = json.loads(told["logprobs"][0])
    assert [[*p] for p in positions] == [[str(t)] for t in expected.token_ids]
    assert [next(iter(p.values()))["rank"] for p in positions] == [1] * 6


def test_the_prompt_may_be_left_out(kserve: KServe, llm: LLM) -> None:
    expected = offline(llm, PROMPT).outputs[0].text.encode()
    told = outputs_of(kserve.ModelInfer(greedy(exclude_input_in_output=True)))
    assert told == {"text_output": [expected]}


def test_samples_and_chosen_outputs(kserve: KServe, llm: LLM) -> None:
    request = greedy(sampling={"n": "2"}, return_finish_reason=True, return_logprobs=True,
                     outputs=["finish_reason", "text_output"])  # fmt: skip
    text = (PROMPT + offline(llm, PROMPT).outputs[0].text).encode()
    expected = {"text_output": [text] * 2, "finish_reason": [b"length"] * 2}
    assert outputs_of(kserve.ModelInfer(request)) == expected


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "typed"])
def test_names_of_the_other_backend(kserve: KServe, llm: LLM, raw: bool) -> None:
    changes = {"max_tokens": 9, "repetition_penalty": 1.5, "stop": ("o",), "n": 2}
    expected = offline(llm, PROMPT, ignore_eos=False, **changes).outputs[0].text
    request = infer(
        raw=raw, text_input=PROMPT, max_tokens=9, temperature=0.0, top_k=1, beam_width=1,
        repetition_penalty=1.5, stop_words=["o"], num_return_sequences=2, pad_id=2,
        seed=("UINT64", [1, 1], [2**64 - 1]), exclude_input_in_output=True,
    )  # fmt: skip
    assert outputs_of(kserve.ModelInfer(request)) == {"text_output": [expected.encode()] * 2}


def test_parameters_of_the_request(kserve: KServe, llm: LLM) -> None:
    expected = (PROMPT + offline(llm, PROMPT, max_tokens=4).outputs[0].text).encode()
    given = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, "priority": 0,
             "timeout": 60_000_000, "stop_token_ids": "[1]", "sequence_id": 0,
             "triton_enable_empty_final_response": True}  # fmt: skip
    answer = kserve.ModelInfer(infer(text_input=PROMPT, parameters=given))
    assert outputs_of(answer) == {"text_output": [expected]}


def test_sixteen_tokens_where_nobody_says_more(kserve: KServe) -> None:
    sampling = json.dumps({"ignore_eos": True})
    request = infer(text_input="x", sampling_parameters=sampling, return_num_output_tokens=True)
    assert outputs_of(kserve.ModelInfer(request))["num_output_tokens"] == [16]


def test_statistics(tiny_model: str) -> None:
    with LocalServer(tiny_model, served_model_name=("small", "default")) as server:
        kserve = KServe(server.channel)
        kserve.ModelInfer(greedy())
        failure(lambda: kserve.ModelInfer(greedy(text_input="")))
        stats = kserve.ModelStatistics().model_stats
        assert [s.name for s in stats] == ["small", "default"]
        small = message("ModelStatisticsRequest", name="small")
        (told,) = kserve.ModelStatistics(small).model_stats
        assert told.inference_count == told.execution_count == 1 and told.last_inference > 0
        numbers = told.inference_stats
        assert (numbers.success.count, numbers.fail.count, numbers.queue.count) == (1, 1, 1)
        assert numbers.success.ns >= numbers.compute_input.ns + numbers.compute_infer.ns > 0


# ---- limits ------------------------------------------------------------------------------------


def test_the_queue_and_its_time(paced: LocalServer) -> None:
    kserve = KServe(paced.channel)
    with Started(paced):
        soon = infer(text_input=PROMPT, parameters={"timeout": 50_000})
        status = failure(lambda: kserve.ModelInfer(soon))
        assert (status.code, status.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT")
        call = waiting(paced)
        status = failure(lambda: kserve.ModelInfer(greedy()))
        assert (status.code, status.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        call.cancel()
    paced.wait_idle()


def test_a_call_that_goes_takes_its_request_with_it(endless: LocalServer) -> None:
    kserve = KServe(endless.channel)
    request = infer(text_input=PROMPT, max_tokens=900)
    before = endless.num_aborted()
    with pytest.raises(grpc.RpcError) as caught:
        kserve_call(endless, request, 0.3)
    assert caught.value.code() is Code.DEADLINE_EXCEEDED
    endless.wait_idle()
    assert endless.num_aborted() == before + 1
    assert kserve.ServerReady().ready


def kserve_call(server: LocalServer, request: Any, seconds: float) -> Any:
    channel: Any = server.channel
    call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    return call(request.SerializeToString(), timeout=seconds)


@pytest.fixture(autouse=True)
def no_harm(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing is left in the engine."""
    yield
    if "kserve" in request.fixturenames:
        request.getfixturevalue("server").wait_idle()


# ---- bad input ---------------------------------------------------------------------------------


def broken(**fields: Any) -> Any:
    """A request whose first input is changed: fields of the tensor, or its `raw` values."""
    request = greedy()
    for name, value in fields.items():
        if name == "raw":
            request.raw_input_contents[0] = value
        else:
            setattr(request.inputs[0], name, value)
    return request


BAD: list[tuple[Any, str]] = [
    (infer(), "text_input must be a tensor of one text, got None"),
    (infer(text_input=["a", "b"]), "text_input must be a tensor of one element"),
    (infer(text_input=7), "text_input must be a tensor of BYTES, got 7"),
    (infer(text_input=b"\xff"), "text_input must be text in UTF-8"),
    (infer(text_input=("BYTES", [2], [b"a"])), "text_input must be 2 values of BYTES"),
    (infer(text_input=("BYTES", [-1], [b"a"])), "text_input: shape must be 1 to 8 sizes"),
    (infer(text_input=("BYTES", [2**62] * 8, [b"a"])), "text_input: shape must be of at most 4096"),
    (infer(text_input=("BYTES", [1] * 9, [b"a"])), "text_input: shape must be 1 to 8 sizes"),
    (broken(raw=struct.pack("<I", 9) + b"abc"), "text_input must be elements that each are"),
    (broken(raw=b"ab"), "text_input must be elements that each are a length of 4 bytes"),
    (broken(datatype="TEXT"), "text_input: datatype must be one of BOOL, INT8"),
    (broken(name="text_inputs"), "text_input must be a tensor of one text"),
    (broken(name="sampling_parameters"), "inputs must be a list in which each name stands once"),
    (greedy(stream=True), "stream must be false, or sent by ModelStreamInfer, got True"),
    (greedy(stream=1), "stream must be a tensor of one BOOL, got 1"),
    (greedy(foo=1), "inputs must be tensors that ModelMetadata names, got 'foo'"),
    (greedy(max_tokens=5), "max_tokens must be absent where max_tokens is given, too"),
    (greedy(outputs=["text"]), "outputs must be one of text_output, finish_reason"),
    (greedy(sampling={"max_tokens": "many"}), "max_tokens must be an integer in"),
    (greedy(sampling={"temperature": -1}), "temperature must be a finite number >= 0, got -1"),
    (greedy(sampling={"foo": 1}), "parameter must be one of n, presence_penalty"),
    (greedy(sampling={"stop": [[1]]}), "stop must be a value, or a list or object of them"),
    (infer(text_input="x", sampling_parameters="[1]"), "sampling_parameters must be a JSON object"),
    (infer(text_input="x", sampling_parameters="{"), "sampling_parameters must be a JSON object"),
    (infer(text_input="x", sampling_parameters="[" * 10**5), "sampling_parameters must be a"),
    (infer(text_input="x", parameters={"foo": 1}), "parameter must be one of n"),
    (infer(text_input="x", parameters={"timeout": -1}), "timeout must be microseconds >= 0"),
    (infer(text_input="x", parameters={"priority": "high"}), "priority must be an integer in"),
    (infer(text_input="x", parameters={"priority": 3}), "priority must be absent: the server's"),
    (infer(text_input="x" * 2_000_000), "text_input prompt length in characters must be at most"),
    (infer(text_input="x", id="x" * 1025), "id must be at most 1024 characters, got 1025"),
    (infer(text_input="x", max_tokens=5000), "max_tokens must be at most"),
]  # fmt: skip


@pytest.mark.parametrize(("request_", "text"), BAD, ids=[text[:40] for _, text in BAD])
def test_bad_requests(kserve: KServe, request_: Any, text: str) -> None:
    status = failure(lambda: kserve.ModelInfer(request_))
    assert status.code is Code.INVALID_ARGUMENT
    assert status.message.startswith(text)


@pytest.mark.parametrize(
    "tensors",
    [
        {"beam_width": 2}, {"image": "x"}, {"return_log_probs": True}, {"length_penalty": 2.0},
        {"sampling": {"use_beam_search": "true"}}, {"sampling": {"lora_name": "a"}},
        {"sampling": {"guided_decoding": {"json": {"a": {"b": 1}}}}},
        {"parameters": {"sequence_id": 4}}, {"sampling": {"prompt_logprobs": 1}},
    ],
    ids=str,
)  # fmt: skip
def test_not_built(kserve: KServe, tensors: dict[str, Any]) -> None:
    status = failure(lambda: kserve.ModelInfer(greedy(**tensors)))
    assert (status.code, status.reason) == (Code.UNIMPLEMENTED, "NOT_SUPPORTED")


def test_shared_memory_is_refused(kserve: KServe) -> None:
    request = greedy(raw=False)
    request.inputs[0].parameters["shared_memory_region"].string_param = "region"
    assert failure(lambda: kserve.ModelInfer(request)).code is Code.UNIMPLEMENTED


def test_raw_and_typed_values_do_not_mix(kserve: KServe) -> None:
    request = greedy()
    request.inputs[0].contents.bytes_contents.append(b"x")
    message = failure(lambda: kserve.ModelInfer(request)).message
    assert message.startswith("text_input: contents must be absent")
    del request.raw_input_contents[1]
    message = failure(lambda: kserve.ModelInfer(request)).message
    assert message.startswith("raw_input_contents must be 2 items, one for each input, or none")
