"""Chat templates: messages to the one text that the model continues.

Owns the Jinja environment that templates run in, set up as transformers does. A template comes
with the model, so it is untrusted: it runs in the immutable sandbox, reaches nothing but what
`render` hands it, and its output, its time and the memory on its way are bounded. It never makes
token ids. Jinja is imported when the first template is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from cupaged.errors import ChatTemplateError, PromptError
from cupaged.loading.render_limits import limited

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from jinja2.nodes import Scope
    from jinja2.parser import Parser
    from jinja2.runtime import Undefined

__all__ = ["ChatTemplate"]

_MAX_CHARS = 1 << 20
_MAX_SECONDS = 5.0
_MAX_BYTES = 512 << 20
_MAX_POWER_BITS = 1 << 16
_MESSAGE_KEYS = {"role", "content"}
_MESSAGES = 'a non-empty list of {"role": text, "content": text}'


class ChatTemplate:
    """A chat template, compiled once.

    Args:
        source: the Jinja text.
        bos_token, eos_token, special_tokens: what the template sees under these names; those of
            `Tokenizer.special_tokens` fit. None leaves a name undefined, which prints as nothing.
        max_chars: the longest text a template may make.
        max_seconds: the longest time it may take.
        now: the clock behind `strftime_now`.

    Raises:
        ChatTemplateError: the template does not compile.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        max_chars: int = _MAX_CHARS,
        max_seconds: float = _MAX_SECONDS,
        now: Callable[[], datetime] = datetime.now,
        **special_tokens: str | None,
    ) -> None:
        named = {"bos_token": bos_token, "eos_token": eos_token, **special_tokens}
        self._special_tokens = {name: token for name, token in named.items() if token is not None}
        self._max_chars = max_chars
        self._max_seconds = max_seconds
        self._template = _compile(_environment(max_chars, now), source)

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        **extra: object,
    ) -> str:
        """The text of `messages`.

        It holds the special tokens already: encode it with `add_special_tokens=False`.

        Args:
            messages: `{"role": ..., "content": ...}` each, at least one.
            add_generation_prompt: end with the head of the answer.
            extra: further names the template sees, such as `tools`.

        Raises:
            PromptError: `messages` has another form.
            ChatTemplateError: the template refuses the messages, fails, tries to leave its
                sandbox, makes more than `max_chars` characters, or takes too long or too much.
        """
        variables: dict[str, object] = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **extra,
            "messages": _checked(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        num_chars = 0
        try:
            with limited(seconds=self._max_seconds, memory_bytes=_MAX_BYTES, fail=_beyond):
                for piece in self._template.generate(variables):
                    num_chars += len(piece)
                    if num_chars > self._max_chars:
                        raise _beyond(f"makes more than {self._max_chars} characters")
                    pieces.append(piece)
        except ChatTemplateError:
            raise
        except Exception as error:  # a template can raise whatever an expression in it raises
            raise _failure(error) from error
        return "".join(pieces)


def _beyond(reason: str) -> ChatTemplateError:
    return ChatTemplateError(f"the chat template {reason}")


def _checked(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """A copy of `messages` that is safe to give away."""
    if not isinstance(messages, list | tuple) or not messages:
        raise PromptError("messages", messages, _MESSAGES)
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != _MESSAGE_KEYS:
            raise PromptError(f"messages[{index}]", message, '{"role": text, "content": text}')
        for key in ("role", "content"):
            if not isinstance(message[key], str):
                raise PromptError(f"messages[{index}].{key}", message[key], "text")
    return [dict(message) for message in messages]


def _compile(environment: Environment, source: str) -> Template:
    try:
        return environment.from_string(source)
    except Exception as error:  # besides Jinja's own: nesting that is too deep for Python
        line = getattr(error, "lineno", None)
        place = "" if line is None else f" at line {line}"
        raise ChatTemplateError(
            f"the chat template does not compile{place}: {error or type(error).__name__}"
        ) from error


def _failure(error: Exception) -> ChatTemplateError:
    from jinja2.exceptions import SecurityError

    if isinstance(error, _Refusal):
        return ChatTemplateError(f"the chat template refuses the messages: {error}")
    if isinstance(error, SecurityError):
        return ChatTemplateError(f"the chat template tries to leave its sandbox: {error}")
    return ChatTemplateError(f"the chat template fails: {type(error).__name__}: {error}")


class _Refusal(Exception):
    """The template itself called `raise_exception`."""


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter would write `<`, `>`, `&` and `'` as escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment(max_chars: int, now: Callable[[], datetime]) -> Environment:
    """The sandbox, stricter than Jinja's: an unsafe name fails at once, also where it is unused."""
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Scope
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class GenerationTag(Extension):
        """`{% generation %}` marks the answers for training; here its body is just shown."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's declaration

        def parse(self, parser: Parser) -> Scope:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return Scope(body, lineno=line)

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
            raise SecurityError(f"{attribute!r} of {type(obj).__name__!r} is not safe to use")

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            """Refuse products that are huge before any of them is written."""
            if operator == "*":
                for value, times in ((left, right), (right, left)):
                    is_sequence = isinstance(value, str | list | tuple)
                    if is_sequence and isinstance(times, int) and len(value) * times > max_chars:
                        raise SecurityError(f"a product of more than {max_chars} elements")
            elif (
                isinstance(left, int)
                and isinstance(right, int)
                and left.bit_length() * right > _MAX_POWER_BITS
            ):
                raise SecurityError(f"a power of more than {_MAX_POWER_BITS} bits")
            return super().call_binop(context, operator, left, right)

    class PlainNamespace(Namespace):
        """Without names that Python itself might call."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()
            for name, value in dict(*args, **kwargs).items():
                self[name] = value

        def __setitem__(self, name: str, value: object) -> None:
            if name.startswith("_"):
                raise SecurityError(f"the name {name!r} in a namespace")
            super().__setitem__(name, value)

    class DictMaker:
        """`dict(...)`, without the methods by which a template could change one."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: now().strftime(format)
    environment.globals["namespace"] = PlainNamespace
    environment.globals["dict"] = DictMaker()
    return environment
