"""The process to compare a front end with: a `grpc.aio` server that only writes prebuilt messages.

Arguments: bytes of a message, messages a stream, steps a second (0: as fast as the stream takes
them). At a pace, all streams write one message a step, as those of an engine do. The first line on
standard output is the port; the process ends with its standard input.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from typing import Any

import grpc
import grpc.aio

METHOD = "/bench.Bare/Stream"


async def serve(num_bytes: int, num_messages: int, steps_per_s: float) -> None:
    """Until the end of standard input."""
    loop = asyncio.get_running_loop()
    message = bytes(num_bytes)
    step: asyncio.Future[None] = loop.create_future()

    async def stream(request: bytes, context: Any) -> None:
        for _ in range(num_messages):
            if steps_per_s:
                await step
            await context.write(message)

    async def pace() -> None:
        nonlocal step
        due = loop.time()
        while True:
            due += 1 / steps_per_s
            await asyncio.sleep(due - loop.time())
            done, step = step, loop.create_future()
            done.set_result(None)

    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    handler: Any = grpc.unary_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("bench.Bare", {"Stream": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pacer = loop.create_task(pace()) if steps_per_s else None
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    if pacer is not None:
        pacer.cancel()
    await server.stop(None)


def main() -> None:
    """In uvloop where it is installed, as a front end."""
    num_bytes, num_messages = int(sys.argv[1]), int(sys.argv[2])
    running = serve(num_bytes, num_messages, float(sys.argv[3]))
    if importlib.util.find_spec("uvloop") is None:
        asyncio.run(running)
    else:
        import uvloop

        uvloop.run(running)


if __name__ == "__main__":
    main()
