"""Load on a server: many equal streams at once, by the cheapest client that there is.

That is h2load, a client in C (of nghttp2); where it is not installed, the Python client of
`serving_client.py`, which has a processor of its own or becomes the bottleneck. What the clients
used is part of every result.
"""

from __future__ import annotations

import base64
import json
import re
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.serving_processes import HelperProcess
from cupaged.v1 import generation_pb2 as pb

GENERATE = "/cupaged.v1.GenerationService/GenerateStream"
H2LOAD = shutil.which("h2load")
CLIENT = "h2load" if H2LOAD else "grpc.aio"
_STREAMS_A_CONNECTION = 8


@dataclass(frozen=True, slots=True)
class Load:
    """What a load took. `num_bytes`: of all answers, with gRPC's five bytes a message."""

    wall_s: float
    client_cpu_s: float
    num_bytes: int


def request(
    prompt: Sequence[int], max_tokens: int, *, interval_tokens: int = 0
) -> pb.GenerateStreamRequest:
    """Greedy, to exactly that many tokens."""
    return pb.GenerateStreamRequest(
        token_ids=pb.TokenIds(ids=prompt),
        sampling=pb.SamplingOptions(temperature=0.0),
        stopping=pb.StoppingOptions(max_new_tokens=max_tokens, ignore_eos=True),
        stream=pb.StreamOptions(interval_tokens=interval_tokens),
    )


def run_load(address: str, method: str, message: bytes, streams: int) -> Load:
    """So many streams of the same request at once; returns when all have ended.

    Raises:
        RuntimeError: not every stream was answered.
    """
    connections = max(1, streams // _STREAMS_A_CONNECTION)
    if H2LOAD is None:
        with HelperProcess("serving_client.py") as client:
            done = run_client(client, address, method, [message] * streams, streams, connections)
        num_bytes = sum(sum(r["bytes"]) + 5 * len(r["bytes"]) for r in done["requests"])
        return Load(done["wall_s"], done["cpu_s"], num_bytes)
    with tempfile.NamedTemporaryFile() as body:
        body.write(b"\0" + len(message).to_bytes(4, "big") + message)
        body.flush()
        command = [
            H2LOAD, f"-n{streams}", f"-c{connections}", f"-m{-(-streams // connections)}",
            f"-d{body.name}", "-Hcontent-type: application/grpc", "-Hte: trailers",
            f"http://{address}{method}",
        ]  # fmt: skip
        before, began = _children_cpu_s(), time.perf_counter()
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        wall = time.perf_counter() - began
    succeeded = re.search(r"(\d+) succeeded, 0 failed, 0 errored", said)
    traffic = re.search(r"\((\d+)\) data$", said, re.M)
    if succeeded is None or int(succeeded[1]) != streams or traffic is None:
        raise RuntimeError(f"h2load: not all of {streams} streams were answered:\n{said}")
    return Load(wall, _children_cpu_s() - before, int(traffic[1]))


def run_client(
    client: HelperProcess,
    address: str,
    method: str,
    messages: Sequence[bytes],
    concurrency: int,
    connections: int = 1,
) -> dict[str, Any]:
    """The same by the Python client, with the times of all messages.

    Raises:
        RuntimeError: not every stream ended with OK.
    """
    job = {
        "address": address,
        "method": method,
        "requests": [base64.b64encode(message).decode() for message in messages],
        "concurrency": concurrency,
        "connections": connections,
    }
    done: dict[str, Any] = json.loads(client.ask(json.dumps(job)))
    codes = {r["code"] for r in done["requests"]}
    if codes != {"OK"}:
        raise RuntimeError(f"not all streams ended with OK: {sorted(codes)}")
    return done


def _children_cpu_s() -> float:
    """Processor time of children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
