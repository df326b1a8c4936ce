"""The error tree. Every failure a user can cause is a subclass of `CupagedError`.

CupagedError
├── BadValueError              a named thing has a value outside what is allowed
│   ├── ConfigError            an engine option, a command-line option, a model configuration
│   ├── InvalidParameterError  a field of SamplingParams or of a request
│   ├── PromptError            a prompt: empty, too long, ids outside the vocabulary
│   └── CapacityError          more memory than the KV pool or the machine has
├── QueueFullError             too much waits already; the same request may be served later
├── NotSupportedError          a known name or format that this version does not build
├── ModelError                 a model that cannot be loaded
│   ├── ModelNotFoundError     no such file, folder, installed model or name on the hub
│   ├── HubError               the model hub refuses, answers wrongly, or its cache is unusable
│   │   └── HubUnreachableError  no network, the hub is down, or offline mode is on
│   ├── CheckpointError        a file that is missing, cut, damaged, or holds the wrong tensors
│   ├── TokenizerError         a tokenizer that is missing or damaged
│   └── ChatTemplateError      a chat template that is missing, unsafe or fails
└── EngineError                the engine itself failed; its running requests are lost

A `BadValueError` keeps `name`, `value` and `allowed` apart, so that a server can report them.
"""

from __future__ import annotations

_SHOWN_CHARS = 120


class CupagedError(Exception):
    """Root of every error that cupaged raises on purpose."""


class BadValueError(CupagedError, ValueError):
    """`name` has `value`, which is not among what is `allowed`."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(name, value, allowed)
        self.name = name
        self.value = value
        self.allowed = allowed

    def __str__(self) -> str:
        try:
            shown = repr(self.value)
        except ValueError:  # Python does not print integers of more than 4,300 digits
            shown = f"<{type(self.value).__name__}>"
        if len(shown) > _SHOWN_CHARS:
            shown = f"{shown[:_SHOWN_CHARS]}... ({len(shown)} characters)"
        return f"{self.name} must be {self.allowed}, got {shown}"


class ConfigError(BadValueError):
    """An engine option, a command-line option or a model configuration is out of range."""


class InvalidParameterError(BadValueError):
    """A field of `SamplingParams` or of a request is out of range or of the wrong type."""


class PromptError(BadValueError):
    """A prompt is empty, too long, or holds token ids outside the vocabulary."""


class CapacityError(BadValueError):
    """More memory is asked for than the KV pool or the machine can ever give."""


class QueueFullError(CupagedError):
    """Too many requests or tokens wait already; the same request may be served later."""


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


class EngineError(CupagedError):
    """The engine failed in a way that is not one request's fault."""
