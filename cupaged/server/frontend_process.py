"""A front end's process: `python -m cupaged.server.frontend_process FD`.

FD is the control channel. The process listens at once, and answers LOADING until the engine is
ready and the tokenizer is read; where others serve meanwhile, it gets ready first, so that they get
the connections. It ends when it has drained, when it is told to stop, or when the
supervisor is gone; what it dies of it says on the channel first, but for a want of memory.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from cupaged.errors import CupagedError
from cupaged.server import log_setup, metrics, tracing
from cupaged.server.auth import Tokens
from cupaged.server.child_signals import end_with_parent, stay
from cupaged.server.child_start import ORPHANED, ChildStart, run_child
from cupaged.server.control import ControlChannel, ControlClosed
from cupaged.server.engine_client import EngineClient
from cupaged.server.front_end import FrontEnd, FrontEndOptions
from cupaged.server.grpc_server import GrpcOptions
from cupaged.server.model_text import ModelText, load_text, local_model
from cupaged.server.observation import Observers
from cupaged.server.out_of_memory import EndWhenOutOfMemory
from cupaged.server.request_log import RequestLog
from cupaged.server.served_model import ServedModel
from cupaged.server.settings import API_KEY_VARIABLE, ServeSettings
from cupaged.server.tls import TlsFiles
from cupaged.server.wire import Message, error_to_wire

FAILURE = 1
_PATIENCE_S = 10.0  # with an engine that is not ready, before LOADING is the better answer
_logger = logging.getLogger(__name__)


def main(fd: int) -> int:
    """Run the process; the exit code. Without a supervisor it would keep the port from others."""
    end_with_parent()
    return run_child(fd, _run)


def _run(start: ChildStart, control: ControlChannel) -> int:
    if start.metrics_folder is not None:
        metrics.store_in(start.metrics_folder, start.name)
    return _runner()(FrontEndProcess(start, control).run())


class FrontEndProcess:
    """One front end and what the supervisor tells it."""

    def __init__(self, start: ChildStart, control: ControlChannel) -> None:
        self._start = start
        self._control = control
        self._ending = asyncio.Event()
        self._code = 0
        self._drain: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Serve until the end; the exit code."""
        settings = self._start.settings
        loop = asyncio.get_running_loop()
        EndWhenOutOfMemory().install(loop)
        try:
            tracer = tracing.build(settings.otlp_endpoint, model_name=settings.model_names[0])
            self._client = EngineClient(
                self._start.engine_socket,
                name=self._start.name,
                max_pending_tokens=settings.stream_buffer_tokens,
                restarts=settings.restart_engine,
            )
            self._front_end = front_end(self._start, self._client, tracer, self._tell)
        except CupagedError as error:
            self._die(error)
            return self._code
        serving: asyncio.Task[None] | None = None
        loop.add_reader(self._control.fileno(), self._hear)
        try:
            is_ready = self._start.others_serve and await self._get_ready_first()
            if not self._ending.is_set():
                address = await self._front_end.start()
                if is_ready:
                    self._tell("listening", address)
                else:
                    serving = loop.create_task(self._begin_serving(address))
            await self._ending.wait()
        except CupagedError as error:
            self._die(error)
        finally:
            loop.remove_reader(self._control.fileno())
            if serving is not None:
                serving.cancel()
            await self._front_end.stop()
            await asyncio.to_thread(tracer.close)
        return self._code

    async def _begin_serving(self, address: str) -> None:
        """Tell where this front end listens when it can serve."""
        if await self._get_ready():
            self._tell("listening", address)

    async def _get_ready_first(self) -> bool:
        """The same before it listens; false if that takes too long, or the end comes first."""
        await self._client.connect(wait=False)
        getting = asyncio.create_task(self._get_ready())
        ending = asyncio.create_task(self._ending.wait())
        either = asyncio.FIRST_COMPLETED
        done, _ = await asyncio.wait({getting, ending}, timeout=_PATIENCE_S, return_when=either)
        for task in (getting, ending):
            task.cancel()
        return getting in done and getting.result()

    async def _get_ready(self) -> bool:
        """Read the tokenizer, and wait for the engine; false if it dies of that."""
        settings = self._start.settings
        try:
            path = await asyncio.to_thread(local_model, settings.model)
            if path is None:  # the engine fetches it
                await self._client.wait_ready()
                assert self._client.info is not None
                path = Path(self._client.info.model_path)
            self._front_end.set_text(await asyncio.to_thread(_text, settings, path))
        except CupagedError as error:
            self._die(error)
            return False
        except Exception as error:
            _logger.exception("the tokenizer cannot be read")
            self._die(error)
            return False
        gc.collect()
        gc.freeze()  # what is loaded stays: no collection needs to look at it again
        await self._client.wait_ready()
        return True

    def _hear(self) -> None:
        """What the supervisor says; the end of the channel is the end of this process."""
        try:
            messages = self._control.receive()
        except ControlClosed:
            os._exit(ORPHANED)  # nobody waits for it
        for message in messages:
            self._obey(message)

    def _obey(self, message: Message) -> None:
        kind, *values = message
        if kind == "state":
            phase, reason, restarting = values
            self._client.set_state(phase, reason, restarting)
        elif kind == "drain" and self._drain is None:
            stay()
            self._drain = asyncio.create_task(self._end_slowly(float(values[0])))
        elif kind == "stop":
            self._ending.set()
        elif kind == "log_level":
            log_setup.set_level(values[0])

    async def _end_slowly(self, timeout_s: float) -> None:
        await self._front_end.drain(self._start.settings.drain_delay, timeout_s)
        self._ending.set()

    def _tell(self, *message: Any) -> None:
        try:
            self._control.send(*message)
        except ControlClosed:
            os._exit(ORPHANED)

    def _die(self, error: Exception) -> None:
        form = error_to_wire(error)
        self._tell("dying", form["message"], form)
        self._code = FAILURE
        self._ending.set()


def front_end(
    start: ChildStart, client: EngineClient, tracer: tracing.Tracer, tell: Callable[..., None]
) -> FrontEnd:
    """The front end that the settings describe.

    Raises:
        ConfigError: certificates or tokens cannot be used.
    """
    settings = start.settings
    secret = os.environ.get(API_KEY_VARIABLE) if settings.has_api_key else None
    has_tokens = settings.api_key_file is not None or secret is not None
    tls = None
    if settings.ssl_certfile is not None and settings.ssl_keyfile is not None:
        tls = TlsFiles(settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)
    options = FrontEndOptions(
        host=settings.host,
        port=start.port or 0,
        uds=settings.uds,
        admin_port=start.admin_port,
        grpc=GrpcOptions(
            max_message_bytes=settings.max_message_bytes,
            keepalive_time_s=settings.keepalive_time,
            keepalive_timeout_s=settings.keepalive_timeout,
            min_ping_interval_s=settings.min_ping_interval,
            max_connection_age_s=settings.max_connection_age,
            debug_errors=settings.debug_errors,
        ),
        tokens=Tokens(settings.api_key_file, secret=secret) if has_tokens else None,
        tls=tls,
        drain_timeout_s=settings.drain_timeout,
        log_level=settings.log_level,
        services=settings.services,
        statistics_file=Path(start.statistics_file) if start.statistics_file else None,
    )
    observers = Observers(
        metrics.FrontEndMetrics(settings.model_names[0]),
        RequestLog(
            logging.getLogger("cupaged.server.generation_service"),
            log_prompts=settings.log_prompts,
        ),
        tracer,
    )
    model = ServedModel(settings.model_names, seed_offset=start.index)
    return FrontEnd(options, model, client, observers, tell)


def _text(settings: ServeSettings, path: Path) -> ModelText:
    tokenizer = settings.engine.get("tokenizer")
    return load_text(path, tokenizer=tokenizer, chat_template=settings.chat_template)


def _runner() -> Callable[[Coroutine[Any, Any, int]], int]:
    """uvloop's where it is installed, else asyncio's."""
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.run
    import uvloop

    run: Callable[[Coroutine[Any, Any, int]], int] = uvloop.run
    return run


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
