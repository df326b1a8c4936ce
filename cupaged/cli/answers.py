"""One answer after another, for the verbs that talk: streamed, stoppable, and measured.

It steps the engine itself, so that a stop is heeded between two steps, also in a long prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

from cupaged.cli.console import Console, Stop
from cupaged.cli.conversation import Message

if TYPE_CHECKING:
    from cupaged.llm import LLM
    from cupaged.outputs import RequestOutput
    from cupaged.sampling_params import SamplingParams


class Answers:
    """Asks a model and shows what it says.

    Args:
        llm: a model that nobody else uses at the same time.
        console: where the text goes.
    """

    def __init__(self, llm: LLM, console: Console) -> None:
        self._llm = llm
        self._console = console
        self._numbers = count()

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together: the context, or the pool if that is less."""
        config = self._llm.engine.core.config
        return min(config.max_model_len, config.num_blocks * config.block_size)

    def render(self, messages: list[Message]) -> dict[str, Any]:
        """The prompt that the chat template makes, with its `prompt_token_ids`.

        Raises:
            CupagedError: there is no template, or it fails.
        """
        return self._llm.render_chat(messages)

    def give(self, prompt: Any, params: SamplingParams) -> str:
        """Print an answer as it comes, with figures behind it; returns its text.

        Raises:
            CupagedError: the prompt cannot be served.
        """
        last: RequestOutput | None = None
        with self._console.stop() as stop:
            for last in self._outputs(prompt, params, stop):
                self._console.write(last.outputs[0].delta)
        self._console.write("\n")
        if last is None:  # stopped before the first token
            self._console.note("stopped")
            return ""
        self._console.figures(_figures(last, self.max_model_len))
        return last.outputs[0].text

    def _outputs(self, prompt: Any, params: SamplingParams, stop: Stop) -> Iterator[RequestOutput]:
        engine, request_id = self._llm.engine, f"answer-{next(self._numbers)}"
        engine.add_request(request_id, prompt, params)
        try:
            while engine.core.holds(request_id) and not stop.requested:
                yield from (o for o in engine.step() if o.request_id == request_id)
        finally:
            cut = engine.abort(request_id)
        if cut is not None and cut.outputs[0].token_ids:
            yield cut


def _figures(output: RequestOutput, max_model_len: int) -> str:
    """`42 tokens, 18.3 tokens/s, first 0.21 s, context 120/2048`."""
    answer, times = output.outputs[0], output.metrics
    num_tokens = len(answer.token_ids)
    parts = [f"{num_tokens} token{'s' if num_tokens != 1 else ''}"]
    if times is not None:
        if num_tokens > 1 and times.decode_time:
            parts.append(f"{(num_tokens - 1) / times.decode_time:.1f} tokens/s")
        if times.time_to_first_token is not None:
            parts.append(f"first {times.time_to_first_token:.2f} s")
    used = len(output.prompt_token_ids) + num_tokens
    parts.append(f"context {used}/{max_model_len}")
    if answer.finish_reason == "abort":
        parts.append("stopped")
    elif answer.finish_reason == "length":
        parts.append("context full" if used >= max_model_len else "cut at max_tokens")
    return ", ".join(parts)
