"""A server inside the test's process: the engine's loop in one thread, a front end in another.

The sockets, the engine core, the tokenizer and gRPC are the real ones; only the supervisor is
missing. `supervised.py` has that, too, and takes a second to start.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import grpc
from prometheus_client import CollectorRegistry

from cupaged.server.control import ControlChannel, ControlClosed
from cupaged.server.engine_client import EngineClient
from cupaged.server.engine_loop import EngineLoop
from cupaged.server.engine_process import build
from cupaged.server.front_end import FrontEnd, FrontEndOptions
from cupaged.server.metrics import FrontEndMetrics
from cupaged.server.model_text import load_text
from cupaged.server.observation import Observers
from cupaged.server.request_log import RequestLog
from cupaged.server.served_model import ServedModel
from cupaged.server.settings import ServeSettings
from cupaged.server.tracing import Tracer
from cupaged.server.wire import encode_frame
from cupaged.v1 import admin_pb2_grpc, generation_pb2_grpc, model_pb2_grpc

SECONDS = 60.0  # nothing here takes as long
T = TypeVar("T")


class LocalEngine:
    """The engine's loop over a core as `cupaged serve` would build it."""

    def __init__(self, settings: ServeSettings, path: Path) -> None:
        built, self.info = build(settings)
        self.core = built.core
        listener = socket.socket(socket.AF_UNIX)
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen()
        self._supervisor, child = socket.socketpair()
        self._control = ControlChannel(child)
        self.loop = EngineLoop(
            self.core,
            self.info,
            listener,
            control=self._control,
            on_control=lambda message: bool(message[0] == "stop"),
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        """End it, as a dead process would: its connections are closed."""
        with suppress(OSError):
            self._supervisor.sendall(encode_frame(["stop"]))
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), "the engine's loop does not end"
        self._supervisor.close()
        self._control.close()

    def _run(self) -> None:
        with suppress(ControlClosed):
            self.loop.run()


class LocalServer:
    """A context in which the server answers.

    Args:
        model: folder or file.
        options: of the front end.
        starts_engine: False to leave the engine loading; `start_engine` ends that.
        stream_buffer_tokens, settings: of ServeSettings.
    """

    def __init__(
        self,
        model: str,
        options: FrontEndOptions | None = None,
        *,
        starts_engine: bool = True,
        **settings: Any,
    ) -> None:
        engine = {"device": "cpu", **settings.pop("engine", {})}
        self.settings = ServeSettings(model=model, engine=engine, port=0, **settings)
        self.options = options or FrontEndOptions()
        self.told: list[tuple[Any, ...]] = []  # what the supervisor would hear
        self.registry = CollectorRegistry()
        self._starts_engine = starts_engine
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name) / "engine.sock"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self.engine: LocalEngine | None = None

    def __enter__(self) -> LocalServer:
        self._thread.start()
        if self._starts_engine:
            self.engine = LocalEngine(self.settings, self._path)
        self.address = self.run(self._start())
        self.channel = grpc.insecure_channel(self.address)
        self.generation = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.models = model_pb2_grpc.ModelServiceStub(self.channel)
        if self._starts_engine:
            self.run(self.client.wait_ready())
        return self

    def __exit__(self, *error: object) -> None:
        self.channel.close()
        self.run(self.front_end.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SECONDS)
        self._loop.close()
        if self.engine is not None:
            self.engine.stop()
        self._folder.cleanup()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine in the front end's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(SECONDS)

    def call(self, function: Callable[[], Any]) -> None:
        """Call a function in the front end's loop; does not wait."""
        self._loop.call_soon_threadsafe(function)

    def start_engine(self) -> None:
        """What `starts_engine=False` left out."""
        self.engine = LocalEngine(self.settings, self._path)
        self.run(self.client.wait_ready())

    def stop_engine(self) -> None:
        """The engine dies."""
        assert self.engine is not None
        self.engine.stop()
        self.engine = None

    def admin(self) -> admin_pb2_grpc.AdminServiceStub:
        """A stub for the port of AdminService."""
        return admin_pb2_grpc.AdminServiceStub(self.admin_channel())

    def admin_channel(self) -> grpc.Channel:
        """A connection to that port."""
        return grpc.insecure_channel(f"127.0.0.1:{self.front_end.admin_port}")

    def stats(self) -> dict[str, Any]:
        """Of the engine, now."""
        value: dict[str, Any] = self.run(self.client.call("stats"))
        return value

    def num_aborted(self) -> int:
        """Requests that did not come to their end."""
        finished: dict[str, int] = self.stats()["finished_total"]
        return finished.get("abort", 0)

    def wait_idle(self) -> None:
        """Return when nothing runs or waits; all blocks are back, and the invariants hold."""
        wait_until(lambda: is_idle(self.stats()))
        assert self.stats()["num_used_blocks"] == 0
        self.run(self.client.call("audit"))

    async def _start(self) -> str:
        settings = self.settings
        assert settings.model is not None
        self.client = EngineClient(
            str(self._path), max_pending_tokens=settings.stream_buffer_tokens
        )
        self.log = logging.getLogger("tests.server.requests")
        observers = Observers(
            FrontEndMetrics(settings.model_names[0], registry=self.registry),
            RequestLog(self.log),
            Tracer(),
        )
        self.front_end = FrontEnd(
            self.options,
            ServedModel(settings.model_names),
            self.client,
            observers,
            lambda *message: self.told.append(message),
        )
        address = await self.front_end.start()
        text = load_text(Path(settings.model), chat_template=settings.chat_template)
        self.front_end.set_text(text)
        return address


def is_idle(stats: dict[str, Any]) -> bool:
    """True when the engine has no request."""
    return not any(stats[f"num_{kind}"] for kind in ("running", "waiting", "preempted"))


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when the condition holds; looks again and again, and gives up after a long time."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.002)
