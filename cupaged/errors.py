"""The error tree. Every failure a user can cause is a subclass of `CupagedError`.

CupagedError
├── BadValueError              a named thing has a value outside what is allowed
│   ├── ConfigError            an engine option, a command-line option, a model configuration
│   ├── InvalidParameterError  a field of SamplingParams or of a request
│   │   └── DuplicateRequestError  the id of a request that is unfinished
│   ├── PromptError            a prompt: empty, too long, ids outside the vocabulary
│   │   └── ContextLengthError     longer than the context
│   └── CapacityError          more memory than the KV pool or the machine has
├── QueueFullError             too much waits already; the same request may be served later
├── QueueTimeoutError          a request waited longer than it was willing to
├── UnavailableError           the service takes no requests now
│   ├── LoadingError           the model is still being loaded
│   └── DrainingError          the service is about to end
├── SlowConsumerError          the output of a request was not read
├── NotSupportedError          a known name or format that this version does not build
├── ModelError                 a model that cannot be loaded
│   ├── ModelNotFoundError     no such file, folder, installed model or name on the hub
│   ├── HubError               the model hub refuses, answers wrongly, or its cache is unusable
│   │   └── HubUnreachableError  no network, the hub is down, or offline mode is on
│   ├── CheckpointError        a file that is missing, cut, damaged, or holds the wrong tensors
│   ├── TokenizerError         a tokenizer that is missing or damaged
│   └── ChatTemplateError      a chat template that is missing, unsafe or fails
├── TraceError                 a file of step events that is none, is damaged, or of another version
└── EngineError                the engine itself failed; its running requests are lost
    ├── KVSanitizerError       a step misused the KV pool; only with the KV sanitizer
    └── EngineDeadError        its process has ended

A `BadValueError` keeps `name`, `value` and `allowed` apart, so that a server can report them.
"""

from __future__ import annotations

_SHOWN_CHARS = 120


class CupagedError(Exception):
    """Root of every error that cupaged raises on purpose."""


class ShownValue(str):
    """A value of which only the printed form is known: it was met in another process."""


def shown(value: object) -> str:
    """A value as an error prints it: cut where it is long."""
    if isinstance(value, ShownValue):
        return str(value)
    try:
        text = repr(value)
    except ValueError:  # Python does not print integers of more than 4,300 digits
        text = f"<{type(value).__name__}>"
    if len(text) > _SHOWN_CHARS:
        text = f"{text[:_SHOWN_CHARS]}... ({len(text)} characters)"
    return text


class BadValueError(CupagedError, ValueError):
    """`name` has `value`, which is not among what is `allowed`."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(name, value, allowed)
        self.name = name
        self.value = value
        self.allowed = allowed

    def __str__(self) -> str:
        return f"{self.name} must be {self.allowed}, got {shown(self.value)}"


class ConfigError(BadValueError):
    """An engine option, a command-line option or a model configuration is out of range."""


class InvalidParameterError(BadValueError):
    """A field of `SamplingParams` or of a request is out of range or of the wrong type."""


class DuplicateRequestError(InvalidParameterError):
    """The id of a request is that of another one which is unfinished."""


class PromptError(BadValueError):
    """A prompt is empty, too long, or holds token ids outside the vocabulary."""


class ContextLengthError(PromptError):
    """A prompt leaves no room for output in the context."""


class CapacityError(BadValueError):
    """More memory is asked for than the KV pool or the machine can ever give."""


class QueueFullError(CupagedError):
    """Too many requests or tokens wait already; the same request may be served later.

    `retry_after_s` is an estimate of when that may be, None where nobody can tell.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueTimeoutError(CupagedError):
    """A request waited longer than it was willing to; it was never started.

    `retry_after_s` as in `QueueFullError`.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(CupagedError):
    """The service takes no requests now; another one, or this one later, may."""


class LoadingError(UnavailableError):
    """The model is still being loaded."""


class DrainingError(UnavailableError):
    """The service finishes what it has and then ends."""


class SlowConsumerError(CupagedError):
    """More output of a request waited to be read than may; the request was aborted."""


class NotSupportedError(CupagedError):
    """A name or format the field knows, but which this version does not build."""


class ModelError(CupagedError):
    """A model that cannot be loaded."""


class ModelNotFoundError(ModelError):
    """No such file, folder, installed model or name on the hub."""


class HubError(ModelError):
    """The model hub refuses, answers wrongly, or its cache cannot be used."""


class HubUnreachableError(HubError):
    """No network, the hub is down, or offline mode is on."""


class CheckpointError(ModelError):
    """A weight file is missing, cut, damaged, or holds the wrong tensors."""


class TokenizerError(ModelError):
    """The tokenizer is missing or damaged."""


class ChatTemplateError(ModelError):
    """The chat template is missing, tries to leave its sandbox, or fails."""


class TraceError(CupagedError):
    """A file of step events cannot be read, is none, is damaged, or is of another version."""


class EngineError(CupagedError):
    """The engine failed in a way that is not one request's fault."""


class KVSanitizerError(EngineError):
    """A step was about to misuse the KV pool, or has: the engine cannot be trusted any more.

    request_id: whose step; None for a copy of a block. layer: None where it holds for all.
    block, slot: of the pool, and of the block. history: the block's last events, oldest first.
    """

    def __init__(
        self,
        message: str,
        *,
        request_id: str | None = None,
        layer: int | None = None,
        block: int = -1,
        slot: int = -1,
        history: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.layer = layer
        self.block = block
        self.slot = slot
        self.history = history


class EngineDeadError(EngineError):
    """The engine's process has ended, and its requests with it.

    reason: what it ended of. restarting: whether another one is being started.
    """

    def __init__(self, reason: str, *, restarting: bool = False) -> None:
        super().__init__(reason, restarting)
        self.reason = reason
        self.restarting = restarting

    def __str__(self) -> str:
        after = "it is being restarted" if self.restarting else "it is not restarted"
        return f"the engine has ended: {self.reason}; {after}"
