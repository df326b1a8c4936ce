"""When a front end's process says that it listens."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable
from typing import Any, cast

from cupaged.server.child_start import ChildStart
from cupaged.server.control import ControlChannel
from cupaged.server.engine_client import EngineClient
from cupaged.server.front_end import FrontEnd
from cupaged.server.frontend_process import FrontEndProcess
from cupaged.server.settings import ServeSettings


class Engine:
    """As far as starting needs it: ready when the test says so."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.asked = asyncio.Event()

    async def connect(self, *, wait: bool) -> None:
        assert not wait

    async def wait_ready(self) -> None:
        self.asked.set()
        await self.ready.wait()


class Texts:
    """A front end that only takes the tokenizer."""

    text: Any = None

    def set_text(self, text: Any) -> None:
        self.text = text


def test_it_listens_when_a_request_could_be_answered(tiny_model: str) -> None:
    """Not when the tokenizer has been read and the engine is still out of reach."""

    async def begin() -> None:
        ours, theirs = (ControlChannel(end) for end in socket.socketpair())
        settings = ServeSettings(model=tiny_model)
        start = ChildStart(settings=settings, name="frontend-1", engine_socket="nowhere")
        process = FrontEndProcess(start, theirs)
        engine, front_end = Engine(), Texts()
        process._client = cast(EngineClient, engine)
        process._front_end = cast(FrontEnd, front_end)
        beginning = asyncio.create_task(process._begin_serving("here"))
        asked = asyncio.create_task(engine.asked.wait())
        await asyncio.wait({beginning, asked}, return_when=asyncio.FIRST_COMPLETED)
        assert asked.done() and front_end.text is not None
        assert ours.receive() == []
        engine.ready.set()
        await beginning
        assert ours.receive() == [["listening", "here"]]
        ours.close()
        theirs.close()

    try:
        asyncio.run(begin())
    finally:
        gc.unfreeze()


def test_where_others_serve_it_waits_before_it_listens(tiny_model: str) -> None:
    """For a while, or until the end comes."""

    async def get_ready(act: Callable[[Engine, FrontEndProcess], None]) -> bool:
        ours, theirs = (ControlChannel(end) for end in socket.socketpair())
        settings = ServeSettings(model=tiny_model)
        start = ChildStart(
            settings=settings, name="frontend-1", engine_socket="nowhere", others_serve=True
        )
        process = FrontEndProcess(start, theirs)
        engine = Engine()
        process._client = cast(EngineClient, engine)
        process._front_end = cast(FrontEnd, Texts())
        getting = asyncio.create_task(process._get_ready_first())
        await engine.asked.wait()
        assert not getting.done()
        act(engine, process)
        is_ready = await getting
        assert ours.receive() == []  # it is not there yet
        ours.close()
        theirs.close()
        return is_ready

    try:
        assert asyncio.run(get_ready(lambda engine, process: engine.ready.set())) is True
        assert asyncio.run(get_ready(lambda engine, process: process._ending.set())) is False
    finally:
        gc.unfreeze()
