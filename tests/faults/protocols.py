"""The ways to ask: how a request is written, and what the messages of an answer say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cupaged.server.compat.interface import Interface
from cupaged.v1 import generation_pb2 as pb
from tests.faults.expected import Answer
from tests.server.asking import request, stream_request, tokens
from tests.server.kserve_messages import infer, message, outputs_of

VLLM = Interface("vllm", "vllm.grpc.engine.VllmEngine")
_GREEDY = {"temperature": 0.0, "ignore_eos": True}
_STALLED_SAMPLES, STALLED_LOGPROBS = 4, 10  # of an answer that fills every buffer


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request asks for.

    fills_buffers: more of it than the server keeps for a reader. padding: of its own text.
    """

    answer: Answer
    num_tokens: int
    request_id: str
    model: str = ""
    fills_buffers: bool = False
    padding: int = 0

    @property
    def prompt(self) -> str:
        return self.answer.prompt + " " * self.padding


@dataclass(slots=True)
class Sample:
    """What came of one sample of an answer."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    ends: list[str] = field(default_factory=list)  # why it has ended; one, in the end


@dataclass(slots=True)
class Heard:
    """All that the messages of a call say.

    errors: told in the place of an answer. late: messages of a sample that had ended.
    """

    samples: dict[int, Sample] = field(default_factory=lambda: defaultdict(Sample))
    errors: list[str] = field(default_factory=list)
    late: int = 0

    def of(self, index: int) -> Sample:
        """A sample that goes on."""
        sample = self.samples[index]
        self.late += bool(sample.ends)
        return sample


@dataclass(frozen=True, slots=True)
class Protocol:
    """One method.

    write: the bytes of a request. read: what the messages say. abort: method that ends a request,
    and the message of that, by its id.
    """

    method: str
    write: Callable[[Wish], bytes]
    read: Callable[[Sequence[bytes]], Heard]
    descriptor: Any
    abort: tuple[str, Callable[[str], bytes]] | None = None


# ---- cupaged.v1 --------------------------------------------------------------------------------


def _v1(make: Callable[..., Any]) -> Callable[[Wish], bytes]:
    def write(wish: Wish) -> bytes:
        fields: dict[str, Any] = {"stopping": tokens(wish.num_tokens)}
        if wish.fills_buffers:
            fields["sampling"] = pb.SamplingOptions(temperature=0, n=_STALLED_SAMPLES)
            fields["output"] = pb.OutputOptions(logprobs=STALLED_LOGPROBS)
        made = make(wish.prompt, request_id=wish.request_id, model=wish.model, **fields)
        return bytes(made.SerializeToString())

    return write


def _read_v1(messages: Sequence[bytes]) -> Heard:
    heard = Heard()
    for each in map(pb.GenerateResponse.FromString, messages):
        for told in each.samples:
            sample = heard.of(told.index)
            sample.token_ids += told.token_ids
            sample.text += told.text
            sample.ends.append(pb.FinishReason.Name(told.finish_reason))
    return heard


def _read_v1_stream(messages: Sequence[bytes]) -> Heard:
    heard = Heard()
    for event in map(pb.GenerateStreamResponse.FromString, messages):
        kind = event.WhichOneof("event")
        if kind == "delta":
            sample = heard.of(event.delta.index)
            sample.token_ids += event.delta.token_ids
            sample.text += event.delta.text
        elif kind == "finished":
            sample = heard.of(event.finished.index)
            sample.ends.append(pb.FinishReason.Name(event.finished.reason))
    return heard


def _abort_v1(request_id: str) -> bytes:
    return pb.AbortRequest(request_ids=[request_id]).SerializeToString()


# ---- KServe ------------------------------------------------------------------------------------


def _kserve(stream: bool) -> Callable[[Wish], bytes]:
    def write(wish: Wish) -> bytes:
        parameters = {**_GREEDY, "max_tokens": wish.num_tokens}
        made = infer(
            id=wish.request_id, model_name=wish.model, parameters=parameters,
            text_input=wish.prompt, stream=stream, exclude_input_in_output=True,
        )  # fmt: skip
        return bytes(made.SerializeToString())

    return write


def _read_kserve(messages: Sequence[bytes]) -> Heard:
    heard = Heard()
    for each in map(message("ModelInferResponse").__class__.FromString, messages):
        _hear_texts(heard, each, is_last=True)
    return heard


def _read_kserve_stream(messages: Sequence[bytes]) -> Heard:
    heard = Heard()
    for each in map(message("ModelStreamInferResponse").__class__.FromString, messages):
        if each.error_message:
            heard.errors.append(each.error_message)
        else:
            is_last = each.infer_response.parameters["triton_final_response"].bool_param
            _hear_texts(heard, each.infer_response, is_last=is_last)
    return heard


def _hear_texts(heard: Heard, response: Any, *, is_last: bool) -> None:
    for index, text in enumerate(outputs_of(response).get("text_output", ())):
        sample = heard.of(index)
        sample.text += text.decode()
        if is_last:
            sample.ends.append("final")


# ---- vllm.grpc.engine --------------------------------------------------------------------------


def _write_vllm(wish: Wish) -> bytes:
    params = {**_GREEDY, "max_tokens": wish.num_tokens}
    if wish.fills_buffers:
        params |= {"n": _STALLED_SAMPLES, "logprobs": STALLED_LOGPROBS}
    made = VLLM.message("GenerateRequest")(
        request_id=wish.request_id,
        tokenized={"input_ids": wish.answer.prompt_token_ids, "original_text": wish.prompt},
        sampling_params=params,
        stream=True,
    )
    return bytes(made.SerializeToString())


def _read_vllm(messages: Sequence[bytes]) -> Heard:
    heard = Heard()
    for each in map(VLLM.message("GenerateResponse").FromString, messages):
        if each.WhichOneof("response") == "chunk":
            heard.of(each.chunk.index).token_ids += each.chunk.token_ids
        else:
            heard.of(each.complete.index).ends.append(each.complete.finish_reason)
    return heard


def _abort_vllm(request_id: str) -> bytes:
    return bytes(VLLM.message("AbortRequest")(request_ids=[request_id]).SerializeToString())


_V1, _KSERVE, _VLLM = (
    "/cupaged.v1.GenerationService",
    "/inference.GRPCInferenceService",
    "/vllm.grpc.engine.VllmEngine",
)
PROTOCOLS = {
    "v1 Generate": Protocol(
        f"{_V1}/Generate", _v1(request), _read_v1, pb.GenerateRequest.DESCRIPTOR
    ),
    "v1 GenerateStream": Protocol(
        f"{_V1}/GenerateStream", _v1(stream_request), _read_v1_stream,
        pb.GenerateStreamRequest.DESCRIPTOR, (f"{_V1}/Abort", _abort_v1),
    ),
    "KServe ModelInfer": Protocol(
        f"{_KSERVE}/ModelInfer", _kserve(False), _read_kserve,
        message("ModelInferRequest").DESCRIPTOR,
    ),
    "KServe ModelStreamInfer": Protocol(
        f"{_KSERVE}/ModelStreamInfer", _kserve(True), _read_kserve_stream,
        message("ModelInferRequest").DESCRIPTOR,
    ),
    "vLLM Generate": Protocol(
        f"{_VLLM}/Generate", _write_vllm, _read_vllm,
        VLLM.message("GenerateRequest").DESCRIPTOR, (f"{_VLLM}/Abort", _abort_vllm),
    ),
}  # fmt: skip
