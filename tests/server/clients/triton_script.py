"""What unmodified tritonclient gets: `triton_script.py ADDRESS TASK`.

It runs in an environment of its own, imports nothing of cupaged, and prints JSON.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import tritonclient.grpc as triton  # type: ignore[import-not-found, unused-ignore]
import tritonclient.grpc.aio as triton_aio  # type: ignore[import-not-found, unused-ignore]
from tritonclient.utils import (  # type: ignore[import-not-found, unused-ignore]
    InferenceServerException,
)

WAIT_SECONDS = 60.0
DEADLINE_SECONDS = 5.0  # by then the engine has the request
PROMPT = "The memory of a process"
MODEL = "tiny"
SAMPLING = {"temperature": "0", "max_tokens": "6", "ignore_eos": "true"}


def tensor(name: str, value: Any, shape: tuple[int, ...] = (1,)) -> Any:
    """An input; texts are BYTES, truth values are BOOL."""
    kind, dtype = ("BOOL", np.bool_) if isinstance(value, bool) else ("BYTES", np.object_)
    made = triton.InferInput(name, list(shape), kind)
    element = value if isinstance(value, bool) else value.encode()
    made.set_data_from_numpy(np.full(shape, element, dtype=dtype))
    return made


def inputs(
    text: str = PROMPT, shape: tuple[int, ...] = (1,), stream: bool = False, **sampling: Any
) -> list[Any]:
    """A request as those of Triton's vLLM backend are made."""
    made = [tensor("text_input", text, shape), tensor("stream", stream, shape)]
    made.append(tensor("sampling_parameters", json.dumps({**SAMPLING, **sampling}), shape))
    for name in ("finish_reason", "num_input_tokens", "num_output_tokens", "cumulative_logprob"):
        made.append(tensor(f"return_{name}", True, shape))
    return made


def values(result: Any) -> dict[str, Any]:
    """Every output as numpy gives it, and the id and the end marker of the answer."""
    response = result.get_response()
    told: dict[str, Any] = {"id": response.id, "version": response.model_version}
    marker = response.parameters.get("triton_final_response")
    told["final"] = None if marker is None else marker.bool_param
    for output in response.outputs:
        array = result.as_numpy(output.name)
        assert str(array.dtype) in ("object", "uint32", "float32")
        told[output.name] = [v.decode() if isinstance(v, bytes) else v for v in array.tolist()]
    return told


def failed(error: Any) -> dict[str, Any]:
    """An error as the client has it."""
    return {"status": error.status(), "message": error.message()}


# ---- blocking ----------------------------------------------------------------------------------


class Stream:
    """A bidirectional stream; what comes back goes into a queue."""

    def __init__(self, client: Any, **options: Any) -> None:
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self.client = client
        client.start_stream(self._take, **options)

    def _take(self, result: Any, error: Any) -> None:
        self.answers.put(values(result) if error is None else failed(error))

    def ask(self, request_id: str, made: list[Any], **options: Any) -> None:
        self.client.async_stream_infer(MODEL, made, request_id=request_id, **options)

    def next(self) -> dict[str, Any]:
        return self.answers.get(timeout=WAIT_SECONDS)

    def until(self, num_finals: int, num_errors: int) -> list[dict[str, Any]]:
        """Answers up to that many ends and errors."""
        found: list[dict[str, Any]] = []
        while num_finals or num_errors:
            found.append(self.next())
            num_finals -= found[-1].get("final") is True
            num_errors -= "status" in found[-1]
        return found


def describe(client: Any) -> dict[str, Any]:
    metadata = client.get_model_metadata(MODEL, as_json=True)
    config = client.get_model_config(MODEL, as_json=True)["config"]
    client.infer(MODEL, inputs())
    statistics = client.get_inference_statistics(MODEL, as_json=True)["model_stats"][0]
    try:
        client.get_model_metadata("other")
        raise SystemExit("an unknown model is known")
    except InferenceServerException as error:
        unknown = failed(error)
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "models": [client.is_model_ready(n) for n in (MODEL, "other")],
        "server": client.get_server_metadata(as_json=True)["name"],
        "index": client.get_model_repository_index(as_json=True)["models"],
        "inputs": {t["name"]: t["datatype"] for t in metadata["inputs"]},
        "decoupled": config["model_transaction_policy"]["decoupled"],
        "successes": statistics["inference_stats"]["success"]["count"],
        "unknown": unknown,
    }


def unary(client: Any) -> list[Any]:
    answers: queue.Queue[Any] = queue.Queue()
    told = [values(client.infer(MODEL, inputs(), request_id="7"))]
    told.append(values(client.infer(MODEL, inputs(shape=(1, 1)), compression_algorithm="gzip")))
    wanted = [triton.InferRequestedOutput("text_output")]
    told.append(values(client.infer(MODEL, inputs(n=2), outputs=wanted)))
    client.async_infer(MODEL, inputs(), callback=lambda result, error: answers.put(result))
    told.append(values(answers.get(timeout=WAIT_SECONDS)))
    plain = [tensor("text_input", PROMPT)]
    parameters = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
    told.append(values(client.infer(MODEL, plain, parameters=parameters, timeout=60_000_000)))
    return told


def stream(client: Any) -> list[Any]:
    """Two requests and one that is wrong on one stream; then the stream goes on."""
    flow = Stream(client)
    flow.ask("a", inputs(stream=True))
    flow.ask("b", inputs(PROMPT + " x", stream=True), enable_empty_final_response=True)
    flow.ask("c", inputs(""))
    told = flow.until(2, 1)
    flow.ask("d", inputs())
    told += flow.until(1, 0)
    client.stop_stream()
    assert flow.answers.empty()
    return told


def refused(client: Any) -> dict[str, Any]:
    try:
        client.infer(MODEL, inputs(temperature=-1))
    except InferenceServerException as error:
        return failed(error)
    raise SystemExit("it was not refused")


def cancel(client: Any) -> dict[str, Any]:
    """Leaves while two long requests run."""
    flow = Stream(client)
    flow.ask("a", inputs(stream=True, max_tokens=900))
    flow.ask("b", inputs(stream=True, max_tokens=900))
    told = {flow.next()["id"]}
    while len(told) < 2:
        told.add(flow.next()["id"])
    client.stop_stream(cancel_requests=True)
    return {"ids": sorted(told)}


def timeout(client: Any) -> list[Any]:
    told = []
    try:
        client.infer(MODEL, inputs(max_tokens=900), client_timeout=DEADLINE_SECONDS)
    except InferenceServerException as error:
        told.append(failed(error))
    flow = Stream(client, stream_timeout=DEADLINE_SECONDS)
    flow.ask("a", inputs(stream=True, max_tokens=900))
    while "status" not in (answer := flow.next()):
        pass
    client.stop_stream()
    return [*told, answer]


def token(client: Any) -> list[Any]:
    try:
        client.is_server_live()
        raise SystemExit("it was let in without a token")
    except InferenceServerException as error:
        told = failed(error)
    return [told, client.is_server_live(headers={"authorization": "Bearer word"})]


# ---- asyncio -----------------------------------------------------------------------------------


async def aio_unary(client: Any) -> list[Any]:
    assert await client.is_server_ready() and await client.is_model_ready(MODEL)
    asked = [client.infer(MODEL, inputs(), request_id=str(i)) for i in range(3)]
    return [values(result) for result in await asyncio.gather(*asked)]


async def aio_stream(client: Any) -> list[Any]:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        asked = (("a", PROMPT), ("b", PROMPT + " x"), ("c", ""))
        for request_id, text in asked:
            made = inputs(text, stream=bool(text))
            yield {"model_name": MODEL, "inputs": made, "request_id": request_id}

    told = []
    async for result, error in client.stream_infer(requests()):
        told.append(values(result) if error is None else failed(error))
    return told


async def aio_cancel(client: Any) -> dict[str, Any]:
    is_open = asyncio.Event()

    async def requests() -> AsyncIterator[dict[str, Any]]:
        made = inputs(stream=True, max_tokens=900)
        yield {"model_name": MODEL, "inputs": made, "request_id": "a"}
        await is_open.wait()

    answers = client.stream_infer(requests())
    result, error = await anext(answers)
    assert error is None
    answers.cancel()
    return {"ids": [values(result)["id"]]}


async def aio_timeout(client: Any) -> list[Any]:
    try:
        await client.infer(MODEL, inputs(max_tokens=900), client_timeout=DEADLINE_SECONDS)
    except InferenceServerException as error:
        return [failed(error)]
    raise SystemExit("it was answered in time")


async def run_aio(address: str, task: str) -> Any:
    async with triton_aio.InferenceServerClient(address) as client:
        return await globals()[task](client)


def main(address: str, task: str) -> None:
    if task.startswith("aio_"):
        told = asyncio.run(run_aio(address, task))
    else:
        client = triton.InferenceServerClient(address)
        told = globals()[task](client)
        if task not in ("cancel", "timeout"):
            client.close()
    print(json.dumps(told), flush=True)
    sys.stdin.read()  # the test looks at the server while this process lives


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
