"""The model as a front end serves it: its names, its tokenizer, and requests made ready for the
engine. It knows no calls; what is slow here may run in a thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cupaged.engine.text_shell import TextRequest, TextShell
from cupaged.errors import (
    ChatTemplateError,
    ContextLengthError,
    InvalidParameterError,
    LoadingError,
    PromptError,
)
from cupaged.loading.tokenizer import Tokenizer
from cupaged.request import CoreRequest
from cupaged.sampling_params import SamplingParams
from cupaged.server.conversions import (
    Asked,
    OutputForm,
    adds_generation_prompt,
    check_sizes,
    checked_priority,
    checked_salt,
    messages_of,
    sampling_params,
)
from cupaged.server.model_text import ModelText
from cupaged.server.service_errors import UnknownModelError
from cupaged.server.wire_forms import EngineInfo
from cupaged.v1 import generation_pb2 as pb

_USUAL_LOGPROBS = 20
_MAX_PROMPT_LOGPROBS = 2**20  # of a request


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request whose prompt is token ids, ready for the engine.

    text: of the prompt, if it came as one or was rendered.
    """

    core: CoreRequest
    text: str | None
    form: OutputForm
    queue_timeout_s: float | None

    def text_request(self, tokenizer: Tokenizer, arrival_time: float) -> TextRequest:
        """What collects the answer."""
        core = self.core
        ids = list(core.prompt_token_ids)
        return TextRequest(tokenizer, core.request_id, self.text, ids, core.params, arrival_time)


class ServedModel:
    """One model.

    Args:
        names: under which it is served; the first one is what answers carry.
        seed_offset: keeps the seeds that several front ends draw apart.
    """

    def __init__(self, names: Sequence[str], *, seed_offset: int = 0) -> None:
        assert names, "a model needs a name"
        self.names = tuple(dict.fromkeys(names))
        self._seed_offset = seed_offset
        self._text: ModelText | None = None
        self._info: EngineInfo | None = None
        self._shell: TextShell | None = None

    @property
    def name(self) -> str:
        """What answers carry."""
        return self.names[0]

    @property
    def vocab_size(self) -> int:
        """Token ids are below it: the model's, or the tokenizer's while the model is unknown."""
        return self.tokenizer.vocab_size if self._info is None else self._info.config.vocab_size

    @property
    def info(self) -> EngineInfo | None:
        """What the engine told of itself; None while it has never been ready."""
        return self._info

    @property
    def text(self) -> ModelText:
        """Tokenizer and chat template; raises LoadingError while they are being read."""
        if self._text is None:
            raise LoadingError("the model is still being loaded")
        return self._text

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the model; raises LoadingError while it is being read."""
        return self.text.tokenizer

    @property
    def is_ready(self) -> bool:
        """True when requests can be prepared."""
        return self._shell is not None

    def set_text(self, text: ModelText) -> None:
        """Tokenizer and chat template have been read."""
        self._text = text
        self._make_shell()

    def set_info(self, info: EngineInfo) -> None:
        """Take the facts of an engine, which may be another one than before."""
        if info is not self._info:
            self._info = info
            self._make_shell()

    def _make_shell(self) -> None:
        if self._text is not None and self._info is not None:
            self._shell = TextShell(
                self._text.tokenizer,
                max_model_len=self._info.config.max_model_len,
                eos_token_ids=self._info.eos_token_ids,
                seed=self._info.seed + (self._seed_offset << 64),
            )

    def check_name(self, name: str) -> None:
        """Raises UnknownModelError for a name that is not served; "" means the only model."""
        if name and name not in self.names:
            known = ", ".join(map(repr, self.names))
            raise UnknownModelError("model", name, f"one of {known}, or empty")

    def prepare(self, request_id: str, asked: Asked, facts: dict[str, object]) -> Prepared:
        """Check a request and make token ids of its prompt.

        Args:
            facts: sizes and limits are put in here as they become known, for errors.

        Raises:
            CupagedError: it cannot be served; nothing has changed.
        """
        info, shell = self._ready()
        config = info.config
        facts["max_model_len"] = config.max_model_len
        facts["kv_cache_tokens"] = config.num_blocks * config.block_size
        given = asked.parameters
        check_sizes(given, vocab_size=config.vocab_size, max_model_len=config.max_model_len)
        params = sampling_params(given, info.generation_defaults, asked.max_tokens)
        priority = checked_priority(asked.priority, has_priorities=info.has_priorities)
        salt = checked_salt(asked.cache_salt)
        prompt = asked.prompt
        text: str | None = None
        if isinstance(prompt, pb.Chat):
            text, token_ids = self.render(prompt)
        else:
            if not isinstance(prompt, str):
                facts["prompt_tokens"] = len(prompt)
                self._check_length(len(prompt))
            text, token_ids = shell.encode(prompt)
        facts["prompt_tokens"] = len(token_ids)
        self._check_length(len(token_ids))
        room = config.max_model_len - len(token_ids)
        if "max_tokens" in given and params.max_tokens is not None:
            facts["max_new_tokens"] = params.max_tokens
            if params.max_tokens > room:
                raise ContextLengthError(
                    "max_tokens",
                    params.max_tokens,
                    f"at most {room} for a prompt of {len(token_ids)} tokens "
                    f"(max_model_len={config.max_model_len})",
                )
        _check_prompt_logprobs(params, len(token_ids), config.vocab_size)
        core = shell.core_request(request_id, token_ids, params, priority, cache_salt=salt)
        return Prepared(core, text, asked.form, asked.queue_timeout_s)

    def render(self, chat: pb.Chat) -> tuple[str, list[int]]:
        """The prompt that a chat becomes, as text and as token ids.

        Raises:
            PromptError: no messages, or no tokens come of them.
            ChatTemplateError: there is no template, or it refuses the messages.
        """
        messages = messages_of(chat)
        template = self.text.template
        if template is None:
            raise ChatTemplateError("the model has no chat template; send a text or token ids")
        text = template.render(messages, add_generation_prompt=adds_generation_prompt(chat))
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        if not token_ids:
            raise PromptError("messages", text, "a chat of at least one token")
        return text, token_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; ContextLengthError if it is too long for any context."""
        if self._shell is not None:
            self._shell.check_text(text)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _ready(self) -> tuple[EngineInfo, TextShell]:
        if self._info is None or self._shell is None:
            raise LoadingError("the model is still being loaded")
        return self._info, self._shell

    def _check_length(self, num_tokens: int) -> None:
        info, _ = self._ready()
        most = info.config.max_model_len - 1
        if num_tokens > most:
            raise ContextLengthError(
                "prompt length in tokens",
                num_tokens,
                f"at most {most} (max_model_len={most + 1} less one token of output)",
            )


def _check_prompt_logprobs(params: SamplingParams, num_tokens: int, vocab_size: int) -> None:
    """Refuse what would keep the whole front end busy for seconds. The usual 20 are never that."""
    asked = params.prompt_logprobs
    number = vocab_size if asked == -1 else asked or 0
    most = max(_USUAL_LOGPROBS, _MAX_PROMPT_LOGPROBS // max(1, num_tokens) - 1)
    if number > most:
        allowed = f"at most {most} for a prompt of {num_tokens} tokens"
        raise InvalidParameterError("prompt_logprobs", asked, allowed)
