"""What the engine gives as messages of the KServe protocol: whole answers, parts, errors."""

from __future__ import annotations

import json
from typing import Any

from cupaged.engine.completion import Completion
from cupaged.engine.text_shell import TextRequest
from cupaged.engine.token_alternatives import alternatives
from cupaged.loading.tokenizer import Tokenizer
from cupaged.outputs import TokenLogprobs
from cupaged.server.compat.interface import Interface
from cupaged.server.compat.kserve_model import OUTPUTS, VERSION
from cupaged.server.compat.kserve_request import InferRequest
from cupaged.server.compat.tensors import write_tensor

FINAL = "triton_final_response"
_MOST_NEGATIVE = -3.4e38  # of 32 bits


class InferAnswers:
    """Makes the messages that answer one request.

    Args:
        interface: makes messages.
        model_name: as answers carry it.
        request: the message, whose id is carried back, and `wanted` what it asks for.
        text: its samples.
        tokenizer: for the texts of single tokens.
    """

    def __init__(
        self,
        interface: Interface,
        model_name: str,
        request: Any,
        wanted: InferRequest,
        text: TextRequest,
        tokenizer: Tokenizer,
    ) -> None:
        self._response = interface.message("ModelInferResponse")
        self._stream_response = interface.message("ModelStreamInferResponse")
        self._head = {"model_name": model_name, "model_version": VERSION, "id": request.id}
        self._wanted = wanted
        self._text = text
        self._tokenizer = tokenizer

    def whole(self) -> Any:
        """A ModelInferResponse of all samples."""
        return self._message([c.take() for c in self._text.completions])

    def part(self, moved: list[Completion]) -> Any | None:
        """A ModelStreamInferResponse of what is new in all samples; None if that is nothing.

        The last one says so: no empty message has to follow.
        """
        is_last = self._text.finished
        if not is_last and not self._wanted.stream:
            return None
        counts = "num_output_tokens" in self._wanted.outputs
        news = {c.index: c.take() for c in moved}
        if not (is_last or any(text or told or counts for text, _, told in news.values())):
            return None
        nothing: tuple[str, list[int], list[TokenLogprobs]] = ("", [], [])
        message = self._message([news.get(c.index, nothing) for c in self._text.completions])
        message.parameters[FINAL].bool_param = is_last
        return self._stream_response(infer_response=message)

    def _message(self, news: list[tuple[str, list[int], list[TokenLogprobs]]]) -> Any:
        response = self._response(**self._head)
        for name in self._wanted.outputs:
            values = self._values(name, news)
            write_tensor(response, name, OUTPUTS[name].datatype, values, self._wanted.is_raw)
        return response

    def _values(
        self, name: str, news: list[tuple[str, list[int], list[TokenLogprobs]]]
    ) -> list[Any]:
        """The elements of an output: one for each sample, but for the prompt's length."""
        completions = self._text.completions
        if name == "text_output":
            prompt = (self._text.prompt or "") if self._wanted.echo else ""
            return [(prompt + text).encode() for text, _, _ in news]
        if name == "finish_reason":  # "None" is what the backend of vLLM says of a sample that runs
            return [str(c.finish_reason).encode() for c in completions]
        if name == "cumulative_logprob":
            return [max(_MOST_NEGATIVE, c.cumulative_logprob or 0.0) for c in completions]
        if name == "logprobs":
            return [self._logprobs(told) for _, _, told in news]
        if name == "num_input_tokens":
            return [len(self._text.prompt_token_ids)]
        assert name == "num_output_tokens"
        return [len(token_ids) for _, token_ids, _ in news]

    def _logprobs(self, told: list[TokenLogprobs]) -> bytes:
        """A list of an object a token: by token id, log probability, rank and text."""
        positions = [
            {
                str(token): {
                    "logprob": max(_MOST_NEGATIVE, each.logprob),  # JSON knows no infinity
                    "rank": each.rank,
                    "decoded_token": each.decoded_token,
                }
                for token, each in alternatives(self._tokenizer, position).items()
            }
            for position in told
        ]
        return json.dumps(positions).encode()


def error_answer(interface: Interface, model_name: str, request_id: str, message: str) -> Any:
    """A ModelStreamInferResponse that ends one request of a stream, and not the stream."""
    response = interface.message("ModelInferResponse")(
        model_name=model_name, model_version=VERSION, id=request_id
    )
    response.parameters[FINAL].bool_param = True
    kind = interface.message("ModelStreamInferResponse")
    return kind(error_message=message, infer_response=response)
