"""An engine loop in a thread of the test, over a core of a few blocks, and clients of it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from cupaged.config import EngineConfig
from cupaged.engine.batch import StepPlan
from cupaged.engine.core import EngineCore
from cupaged.engine.hash_runner import HashRunner
from cupaged.engine.runner import StepOutput
from cupaged.outputs import CoreOutput, EngineStats
from cupaged.server.control import ControlChannel, ControlClosed
from cupaged.server.engine_client import EngineClient
from cupaged.server.engine_loop import EngineLoop
from cupaged.server.output_stream import OutputStream
from cupaged.server.wire import Message, encode_frame
from cupaged.server.wire_forms import EngineInfo, stats_from_wire
from tests.unit.small_core import runner_of

SECONDS = 30.0  # nothing here takes as long


class GatedRunner(HashRunner):
    """Each step ends only when the test opens the gate for it; `fail_next` steps fail."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            vocab_size=config.vocab_size,
        )
        self.gate = threading.Semaphore(0)
        self.fail_next = 0

    def submit(self, plan: StepPlan) -> int:
        """Fail, if that was asked for."""
        if self.fail_next:
            self.fail_next -= 1
            self.gate.acquire(timeout=SECONDS)
            raise RuntimeError("a planted failure")
        return super().submit(plan)

    def collect(self, handle: int) -> StepOutput:
        """Wait for the gate."""
        assert self.gate.acquire(timeout=SECONDS), "the gate stayed shut"
        return super().collect(handle)


def gated(core: EngineCore) -> GatedRunner:
    """The gated runner of a core."""
    runner = runner_of(core)
    assert isinstance(runner, GatedRunner)
    return runner


class ServingLoop:
    """Runs the loop until the block of the context is left."""

    def __init__(self, core: EngineCore, folder: Path, **options: Any) -> None:
        self.core = core
        self.path = folder / "engine.sock"
        self.error: BaseException | None = None
        self.clients: list[EngineClient] = []
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        listener.listen()
        self.supervisor, child = socket.socketpair()
        self.info = EngineInfo(
            version="0", model="m", model_path="m", architecture="A", num_parameters=0,
            config=core.config, generation_defaults={}, device="none", device_description="",
            dtype="none",
        )  # fmt: skip
        self.control = ControlChannel(child)
        self.loop = EngineLoop(
            core, self.info, listener, control=self.control, on_control=_stops, **options
        )
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> ServingLoop:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread.is_alive():
            self.supervisor.sendall(encode_frame(["stop"]))
        self.join()
        self.supervisor.close()
        self.control.close()

    def join(self) -> None:
        """Wait for the end of the loop."""
        runner = runner_of(self.core)
        if isinstance(runner, GatedRunner):
            runner.gate.release(10_000)
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), "the loop does not end"

    def _run(self) -> None:
        try:
            self.loop.run()
        except (Exception, ControlClosed) as error:
            self.error = error


def _stops(message: Message) -> bool:
    return bool(message[0] == "stop")


def serve(
    core: EngineCore,
    folder: Path,
    body: Callable[[ServingLoop, EngineClient], Coroutine[Any, Any, None]],
    **options: Any,
) -> ServingLoop:
    """Run a coroutine with a loop and a client that is connected to it; gives the ended loop."""

    async def connected(loop: ServingLoop) -> None:
        try:
            await body(loop, await connected_client(loop))
        finally:
            for client in loop.clients:
                await client.close()

    with ServingLoop(core, folder, **options) as loop:
        asyncio.run(asyncio.wait_for(connected(loop), SECONDS))
    return loop


async def connected_client(loop: ServingLoop) -> EngineClient:
    """One more front end; it is closed with the others."""
    client = EngineClient(str(loop.path), name=f"test {len(loop.clients)}")
    loop.clients.append(client)
    await client.connect()
    return client


async def read_all(stream: OutputStream) -> list[CoreOutput]:
    """Every output, to the end."""
    outputs: list[CoreOutput] = []
    while got := await stream.next():
        outputs += got
    return outputs


async def stats_of(client: EngineClient) -> EngineStats:
    """The engine's numbers of this moment."""
    return stats_from_wire(await client.call("stats"))
