"""Requests that make no sense: whatever a client sends is its mistake, and is told as that."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from cupaged.errors import CupagedError, NotSupportedError
from cupaged.sampling_params import SamplingParams
from cupaged.server.compat import kserve_request
from cupaged.server.compat.kserve_model import INPUTS
from cupaged.server.compat.kserve_request import field_path, read_request
from cupaged.server.compat.tensors import _TYPES
from cupaged.server.conversions import sampling_params
from cupaged.server.error_status import status_of
from cupaged.server.request_parsing import parse
from tests.server.kserve_messages import INTERFACE, KServe, message
from tests.server.local_server import LocalServer

REQUEST = INTERFACE.message("ModelInferRequest")
TENSORS = [*INPUTS, *kserve_request._NEUTRAL, "end_id", "pad_id", "foo", ""]
PARAMETERS = [*SamplingParams.__dataclass_fields__, *kserve_request._NEUTRAL, "priority", "timeout",
              "sequence_id", "sequence_start", "sampling_parameters", "foo", ""]  # fmt: skip
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, float("inf"),
    float("nan"), "", "x", "0", "1e999", "-1", "true", "None", "null", "[1]", "{}",
    "\ud800", "9" * 4000, "9" * 5000, [], [1], ["a", None], [[]], {},
    {"1": 1.0}, {"x": "y"}, {"a": {"b": []}},
]  # fmt: skip
ODD_SHAPES = [[2], [0], [], [-1], [2**62] * 8, [1] * 9, [4096]]
WIDTHS = {"BOOL": 1, "FP64": 8, "UINT64": 8, "INT64": 8}


def odd_json(rng: random.Random) -> bytes:
    values = {rng.choice(PARAMETERS): rng.choice(ODD) for _ in range(rng.randrange(3))}
    try:
        text = json.dumps(values)
    except ValueError:
        text = "{" + "9" * 5000 + "}"
    if rng.random() < 0.05:
        text = rng.choice(["[" * 50_000, text[:-1], "1", '"' + text, "NaN", "\x00"])
    return text.encode("utf-8", "surrogatepass")


def odd_request(rng: random.Random) -> Any:
    """A message; many of its fields are plausible."""
    request = message("ModelInferRequest", id=rng.choice(["", "a"]))
    for _ in range(rng.choice([0, 0, 1, 2])):
        parameter = request.parameters[rng.choice(PARAMETERS)]
        value = rng.choice([v for v in ODD if isinstance(v, bool | int | float | str)])
        kind = rng.choice(["bool_param", "int64_param", "string_param", "double_param"])
        try:
            setattr(parameter, kind, value)
        except (TypeError, ValueError, OverflowError):
            parameter.string_param = "3"
    is_raw = rng.random() < 0.7
    names = ["text_input", *rng.choices(TENSORS, k=rng.randrange(4))]
    for name in names[rng.random() < 0.1 :]:
        known = INPUTS[name].datatype if name in INPUTS else "INT32"
        datatype = known if rng.random() < 0.9 else rng.choice([*_TYPES, "FP16", ""])
        tensor = request.inputs.add(name=name, datatype=datatype)
        is_odd = rng.random() < 0.1
        tensor.shape.extend(rng.choice(ODD_SHAPES if is_odd else [[1], [1, 1]]))
        if is_raw:
            request.raw_input_contents.append(odd_bytes(rng, name, datatype))
        elif datatype == "BYTES":
            tensor.contents.bytes_contents.append(odd_json(rng))
        elif datatype in ("INT32", "BOOL", "UINT64"):
            field = {"INT32": "int", "BOOL": "bool", "UINT64": "uint64"}[datatype]
            getattr(tensor.contents, f"{field}_contents").append(rng.choice([0, 1]))
    if is_raw and rng.random() < 0.05:
        request.raw_input_contents.append(b"")
    for _ in range(rng.randrange(3) if rng.random() < 0.2 else 0):
        request.outputs.add(name=rng.choice(["text_output", "logprobs", "foo", ""]))
    return request


def odd_bytes(rng: random.Random, name: str, datatype: str) -> bytes:
    if datatype == "BYTES":
        text = (
            odd_json(rng)
            if name == "sampling_parameters"
            else rng.choice([b"x", b"1", b"", b"\xff"])
        )
        length = len(text) if rng.random() < 0.9 else rng.choice([0, len(text) + 1, 2**32 - 1])
        return length.to_bytes(4, "little") + text
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(10))
    return rng.choice([0, 1, 1, 7]).to_bytes(WIDTHS.get(datatype, 4), "little")


def check(data: bytes) -> str:
    """What becomes of a request: the name of a gRPC code; anything unexpected is raised."""
    try:
        asked = read_request(parse(REQUEST, data)).asked
        sampling_params(asked.parameters, {}, asked.max_tokens)
    except CupagedError as error:
        status = status_of(error, field_path=field_path)
        assert status.details and len(status.details.encode()) <= 1000
        assert isinstance(error, NotSupportedError) or status.code.name == "INVALID_ARGUMENT"
        return str(status.code.name)
    return "OK"


def run(seed: int, number: int) -> dict[str, int]:
    rng = random.Random(seed)
    found: dict[str, int] = {}
    for _ in range(number):
        data = bytearray(odd_request(rng).SerializeToString())
        if rng.random() < 0.2:
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data) or 1) : rng.randrange(len(data) or 1)] = rng.randbytes(
                    2
                )
        outcome = check(bytes(data))
        found[outcome] = found.get(outcome, 0) + 1
    return found


def test_odd_requests_are_refused_by_name() -> None:
    found = run(0, 3000)
    assert set(found) == {"OK", "INVALID_ARGUMENT", "UNIMPLEMENTED"}
    assert min(found.values()) > 50  # it reaches all of them


def test_each_is_answered_once_by_a_server(server: LocalServer) -> None:
    rng = random.Random(2)
    requests = [odd_request(rng) for _ in range(400)]
    for i, request in enumerate(requests):
        request.id = str(i)
    ends = dict.fromkeys((r.id for r in requests), 0)
    errors = set()
    for answer in KServe(server.channel).ModelStreamInfer(iter(requests)):
        response = answer.infer_response
        ends[response.id] += response.parameters["triton_final_response"].bool_param
        errors.add(answer.error_message)
    assert set(ends.values()) == {1}
    assert len(errors) > 50 and not [e for e in errors if "internal error" in e]
    server.wait_idle()


@pytest.mark.slow
def test_many_odd_requests() -> None:
    assert sum(run(1, 100_000).values()) == 100_000
