"""A client that costs as little as one in Python can, in a process of its own.

Raw `grpc.aio`: requests come serialised, answers are kept as bytes with the time of their arrival
and looked at when the clock has stopped. Each line of standard input is a job in JSON: `address`,
`method`, `requests` (base64), `concurrency` and `connections`; each answer is a line:
`wall_s`, `cpu_s`, and of each request `start`, `times` and `tokens` of its messages, and `code`.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cupaged.v1 import generation_pb2 as pb


async def run(job: dict[str, Any]) -> dict[str, Any]:
    """One job."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    channels = [
        grpc.aio.insecure_channel(job["address"], options) for _ in range(job["connections"])
    ]
    await asyncio.gather(*(channel.channel_ready() for channel in channels))
    stubs: list[Any] = [channel.unary_stream(job["method"]) for channel in channels]
    waiting = [base64.b64decode(request) for request in job["requests"]]
    turn = iter(enumerate(waiting))
    done: dict[int, tuple[float, list[float], list[bytes], str]] = {}

    async def work() -> None:
        for index, request in turn:
            times: list[float] = []
            messages: list[bytes] = []
            start = time.perf_counter()
            call = stubs[index % len(stubs)](request)
            while (data := await call.read()) is not grpc.aio.EOF:
                times.append(time.perf_counter())
                messages.append(data)
            done[index] = start, times, messages, (await call.code()).name

    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work() for _ in range(job["concurrency"])))
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    for channel in channels:
        await channel.close()
    return {
        "wall_s": wall,
        "cpu_s": cpu,
        "requests": [
            {
                "start": start,
                "times": times,
                "tokens": list(map(num_tokens, messages)),
                "bytes": list(map(len, messages)),
                "code": code,
            }
            for start, times, messages, code in (done[i] for i in sorted(done))
        ],
    }


def num_tokens(data: bytes) -> int:
    """That a message brings."""
    return len(pb.GenerateStreamResponse.FromString(data).delta.token_ids)


def main() -> None:
    """A job a line."""
    runner = asyncio.run
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        runner = uvloop.run
    for line in sys.stdin:
        print(json.dumps(runner(run(json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
