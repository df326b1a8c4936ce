"""An engine at the other end of a unix socket whose every message a test writes itself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from cupaged.config import EngineConfig
from cupaged.server.wire import FrameReader, Message, encode_frame
from cupaged.server.wire_forms import EngineInfo

INFO = EngineInfo(
    version="1.2.3",
    model="tiny",
    model_path="models/tiny",
    architecture="LlamaForCausalLM",
    num_parameters=12,
    config=EngineConfig(vocab_size=50, num_blocks=100, max_model_len=64),
    eos_token_ids=(2, 3),
    generation_defaults={"temperature": 0.5},
    device="cpu",
    device_description="a processor",
    dtype="float32",
)


class FakeEngine:
    """Accepts one connection at a time. `received` gets every message but hellos and pings."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.hello: Message = []
        self.received: asyncio.Queue[Message] = asyncio.Queue()
        self.connected = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def stop(self) -> None:
        """Die: the connection and the socket go away."""
        assert self._server is not None
        self._server.close()
        if self._writer is not None:
            self._writer.transport.abort()
        self.path.unlink(missing_ok=True)
        self.connected.clear()

    def send(self, *message: Any) -> None:
        """One message to the front end."""
        self.send_bytes(encode_frame([*message]))

    def send_bytes(self, data: bytes) -> None:
        """Whatever it is."""
        assert self._writer is not None
        self._writer.write(data)

    async def expect(self, kind: str) -> Message:
        """The next message, which is of this kind."""
        message = await asyncio.wait_for(self.received.get(), 10)
        assert message[0] == kind, message
        return message

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameReader()
        self._writer = writer
        try:
            while data := await reader.read(65536):
                for message in frames.feed(data):
                    if message[0] == "hello":
                        self.hello = message
                        self.send("ready", INFO.to_wire())
                        self.connected.set()
                    elif message[0] == "call" and message[2] == "ping":
                        self.send("reply", message[1], True, None)
                    else:
                        self.received.put_nowait(message)
        except ConnectionError:
            pass
        finally:
            writer.close()
