"""The client of a cupaged server: `Client` blocks, `AsyncClient` is for asyncio.

    from cupaged.client import Client, Delta

    with Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", max_tokens=40).text)
        with client.stream_chat([{"role": "user", "content": "Hello!"}]) as stream:
            for event in stream:
                if isinstance(event, Delta):
                    print(event.text, end="", flush=True)

Sampling parameters have the names of `SamplingParams`; what is left out is for the server to
choose, which takes what the model's authors recommend. A call that fails raises a class of
`cupaged.client.errors`; `cupaged.client.retry` says which calls are made again before that.
Neither NumPy nor a tokenizer is imported.
"""

from __future__ import annotations

from cupaged.client.answers import (
    Delta,
    Event,
    Finished,
    Generation,
    PromptLogprobs,
    RenderedChat,
    Started,
    Usage,
)
from cupaged.client.async_client import AsyncClient
from cupaged.client.async_streams import AsyncGenerationStream, AsyncWatch
from cupaged.client.errors import ClientError
from cupaged.client.facts import HealthStatus, Load, ModelInfo, ServerInfo
from cupaged.client.requests import GenerateOptions, StreamOptions
from cupaged.client.sync_client import Client
from cupaged.client.sync_streams import GenerationStream, Watch

__all__ = [
    "AsyncClient",
    "AsyncGenerationStream",
    "AsyncWatch",
    "Client",
    "ClientError",
    "Delta",
    "Event",
    "Finished",
    "GenerateOptions",
    "Generation",
    "GenerationStream",
    "HealthStatus",
    "Load",
    "ModelInfo",
    "PromptLogprobs",
    "RenderedChat",
    "ServerInfo",
    "Started",
    "StreamOptions",
    "Usage",
    "Watch",
]
