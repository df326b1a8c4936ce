"""A client process that is made to be killed: `python -m tests.server.storm_client ADDRESS N`.

It opens N streams, prints a line when each has brought a token, and reads on until it dies.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc

from cupaged.v1 import generation_pb2_grpc
from tests.server.asking import stream_request, tokens


async def main(address: str, number: int) -> None:
    """Never returns by itself."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        have_begun = 0
        all_have = asyncio.Event()

        async def read() -> None:
            nonlocal have_begun
            call = stub.GenerateStream(stream_request(stopping=tokens(1000)))
            async for event in call:
                if event.WhichOneof("event") == "started":
                    have_begun += 1
                    if have_begun == number:
                        all_have.set()

        reading = [asyncio.create_task(read()) for _ in range(number)]
        await all_have.wait()
        print("all streams have begun", flush=True)
        await asyncio.gather(*reading)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
