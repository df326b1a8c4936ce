"""`cupaged client chat`: the conversation of `cupaged chat`, answered by a server."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from cupaged.cli.chat import COMMANDS, Chat
from cupaged.cli.client import explained, reported
from cupaged.cli.client_generate import options_of, params_for
from cupaged.cli.console import Console
from cupaged.cli.conversation import Message
from cupaged.cli.options import sampling_params
from cupaged.errors import ChatTemplateError, CupagedError
from cupaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cupaged.client import Client, GenerationStream, ModelInfo


def run(args: argparse.Namespace) -> int:
    """Answer until the input ends."""
    sampling_params(args)  # a wrong one is refused before anything is sent
    console = Console(args.quick, [f"/{name}" for name in COMMANDS])
    return reported(args, lambda args, client: _chat(args, client, console))


def _chat(args: argparse.Namespace, client: Client, console: Console) -> int:
    model = client.model_info(args.model)
    if not model.has_chat_template:
        raise ChatTemplateError(
            f"{model.name} has no chat template; `cupaged client generate` needs none"
        )
    console.note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends")
    answers = RemoteAnswers(client, model, args.address, console)
    return Chat(answers, params_for(args, model), args.system, console).run()


class RemoteAnswers:
    """Asks a server and shows what it says.

    Args:
        model: that answers.
        address: of the server, for messages.
        console: where the text goes.
    """

    def __init__(self, client: Client, model: ModelInfo, address: str, console: Console) -> None:
        self._client = client
        self._model = model
        self._address = address
        self._console = console

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together: the context, or the pool if that is less."""
        pool = self._model.num_kv_blocks * self._model.block_size
        return min(self._model.max_model_len, pool or self._model.max_model_len)

    def render(self, messages: list[Message]) -> dict[str, Any]:
        """The prompt that the model's chat template makes.

        Raises:
            CupagedError: the server cannot make it.
        """
        from cupaged.client import ClientError

        try:
            chat = self._client.apply_chat_template(messages, model=self._model.name)
        except ClientError as error:
            raise CupagedError(explained(error, self._address)) from None
        return {"prompt": chat.text, "prompt_token_ids": chat.token_ids}

    def give(self, prompt: Any, params: SamplingParams) -> str:
        """Print an answer as it comes, with figures behind it; returns its text.

        At a terminal Ctrl-C stops it, and the request on the server.

        Raises:
            CupagedError: the call failed.
        """
        from cupaged.client import ClientError

        pieces: list[str] = []
        started = time.monotonic()
        stream = self._client.stream(prompt, model=self._model.name, **options_of(params))
        try:
            with stream:
                for piece in stream.texts():
                    pieces.append(piece)
                    self._console.write(piece)
        except KeyboardInterrupt:
            if not self._console.interactive:
                raise
        except ClientError as error:
            if pieces:
                self._console.write("\n")
            raise CupagedError(explained(error, self._address)) from None
        self._console.write("\n")
        self._console.figures(self._figures(stream, time.monotonic() - started))
        return "".join(pieces)

    def _figures(self, stream: GenerationStream, seconds: float) -> str:
        """`42 tokens, 18.3 tokens/s, first 0.21 s, context 120/2048`."""
        usage, end = stream.usage, stream.finished.get(0)
        if usage is None or end is None:
            return f"stopped after {seconds:.2f} s"
        number = end.num_tokens
        parts = [f"{number} token{'s' if number != 1 else ''}"]
        if number > 1 and usage.decode_time_s:
            parts.append(f"{(number - 1) / usage.decode_time_s:.1f} tokens/s")
        if usage.time_to_first_token_s is not None:
            parts.append(f"first {usage.time_to_first_token_s:.2f} s")
        used = usage.prompt_tokens + number
        parts.append(f"context {used}/{self.max_model_len}")
        if end.finish_reason in ("abort", "error"):
            parts.append("ended by the server")
        elif end.finish_reason == "length":
            parts.append("context full" if used >= self.max_model_len else "cut at max_tokens")
        return ", ".join(parts)
