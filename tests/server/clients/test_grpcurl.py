"""Unmodified grpcurl: what it sees by reflection and by our descriptor set, and what it gets."""

from __future__ import annotations

import base64
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cupaged.llm import LLM
from cupaged.server.auth import Tokens
from cupaged.server.descriptor_set import descriptor_set
from cupaged.server.front_end import FrontEndOptions
from tests.server.asking import PROMPT, offline
from tests.server.local_server import LocalServer

pytestmark = pytest.mark.slow
GRPCURL = Path(sys.executable).with_name("grpcurl")  # of the extra dev
SECONDS = 60
GENERATION = "cupaged.v1.GenerationService"
KSERVE = "inference.GRPCInferenceService"
GREEDY = {"temperature": 0}
LONG = {"text": PROMPT, "stopping": {"max_new_tokens": 900, "ignore_eos": True}}
REFUSED = 64  # its exit code is that and the code of the status


@dataclass(frozen=True)
class Done:
    """A call that has ended; `messages` are those of its standard output."""

    code: int
    messages: list[Any]
    err: str


def command(server: LocalServer, method: str, *options: str | Path) -> list[str | Path]:
    return [GRPCURL, "-plaintext", *options, server.address, *method.split()]


def grpcurl(server: LocalServer, method: str, *options: str | Path, data: Any = None) -> Done:
    """Call a method.

    Args:
        data: a message, or a list of them, which go through standard input.
    """
    given = () if data is None else ("-d", "@")
    parts = data if isinstance(data, list) else [data]
    done = subprocess.run(
        command(server, method, *options, *given), input="\n".join(map(json.dumps, parts)),
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    return Done(done.returncode, [*messages(done.stdout)], done.stderr)


def messages(text: str) -> Iterator[Any]:
    """JSON values that stand one after the other.

    Fields are called as in the .proto files: by the descriptor set they come as `tokenIds`, by
    reflection, where descriptors of Python name none for JSON, as `token_ids`.
    """
    decoder = json.JSONDecoder(object_hook=proto_names)
    while text := text.lstrip():
        value, end = decoder.raw_decode(text)
        yield value
        text = text[end:]


def proto_names(fields: dict[str, Any]) -> dict[str, Any]:
    """An object with the names of the .proto files."""
    return {re.sub("[A-Z]", lambda c: f"_{c[0].lower()}", k): v for k, v in fields.items()}


def asked(**changes: Any) -> dict[str, Any]:
    """A request of six tokens, as JSON."""
    stopping = {"max_new_tokens": 6, "ignore_eos": True}
    return {"text": PROMPT, "sampling": GREEDY, "stopping": stopping, **changes}


def tensor(name: str, value: str | bool) -> dict[str, Any]:
    """An input of KServe's protocol with its value in place."""
    made: dict[str, Any] = {"name": name, "shape": [1]}
    if isinstance(value, bool):
        return {**made, "datatype": "BOOL", "contents": {"bool_contents": [value]}}
    text = base64.b64encode(value.encode()).decode()
    return {**made, "datatype": "BYTES", "contents": {"bytes_contents": [text]}}


def infer(request_id: str, text: str, *, stream: bool = False) -> dict[str, Any]:
    """A ModelInferRequest of six tokens."""
    sampling = json.dumps({**GREEDY, "max_tokens": 6, "ignore_eos": True})
    inputs = [tensor("text_input", text), tensor("sampling_parameters", sampling)]
    inputs += [tensor("stream", stream), tensor("exclude_input_in_output", True)]
    return {"model_name": "tiny", "id": request_id, "inputs": inputs}


def text_output(response: Any) -> str:
    """The text in a ModelInferResponse."""
    (output,) = response["outputs"]
    (value,) = output["contents"]["bytes_contents"]
    return base64.b64decode(value).decode()


@pytest.fixture(scope="module")
def protoset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The descriptor set in a file."""
    path = tmp_path_factory.mktemp("set") / "cupaged.binpb"
    path.write_bytes(descriptor_set().SerializeToString())
    return path


@pytest.fixture(params=["reflection", "protoset"])
def knowing(request: pytest.FixtureRequest, protoset: Path) -> tuple[str | Path, ...]:
    """Options by which it knows what the services are."""
    return ("-protoset", protoset) if request.param == "protoset" else ()


def test_answers_whole_and_streamed(
    server: LocalServer, llm: LLM, knowing: tuple[str | Path, ...]
) -> None:
    expected = offline(llm, PROMPT).outputs[0]
    done = grpcurl(server, f"{GENERATION}/Generate", *knowing, data=asked())
    assert (done.code, done.err) == (0, "")
    (sample,) = done.messages[0]["samples"]
    assert (sample["text"], sample["token_ids"]) == (expected.text, [*expected.token_ids])
    assert sample["finish_reason"] == "FINISH_REASON_LENGTH"
    done = grpcurl(server, f"{GENERATION}/GenerateStream", *knowing, data=asked())
    first, *deltas, last = done.messages
    assert done.code == 0 and first["started"]["model"] == "tiny"
    assert "".join(d["delta"].get("text", "") for d in deltas) == expected.text
    assert last["usage"]["completion_tokens"] == 6


def test_a_bad_request_says_what_is_wrong(
    server: LocalServer, knowing: tuple[str | Path, ...]
) -> None:
    bad = asked(sampling={"temperature": -1})
    for method in ("Generate", "GenerateStream"):
        done = grpcurl(server, f"{GENERATION}/{method}", *knowing, "-format-error", data=bad)
        assert (done.code, done.messages) == (REFUSED + 3, [])
        told = json.loads(done.err)
        description = "must be a finite number >= 0, got -1.0"
        assert (told["code"], told["message"]) == (3, f"sampling.temperature {description}")
        info, request = told["details"]
        assert (info["domain"], info["reason"]) == ("cupaged", "INVALID_PARAMETER")
        violation = {"field": "sampling.temperature", "description": description}
        assert request["field_violations"] == [violation]
    unknown = grpcurl(server, f"{GENERATION}/Generate", *knowing, data=asked(model="other"))
    assert unknown.code == REFUSED + 5 and "Code: NotFound" in unknown.err
    assert '"resource_name":"other"' in unknown.err


def test_one_inference(server: LocalServer, llm: LLM, knowing: tuple[str | Path, ...]) -> None:
    done = grpcurl(server, f"{KSERVE}/ModelInfer", *knowing, data=infer("7", PROMPT))
    (answer,) = done.messages
    assert (done.code, answer["id"], answer["model_name"]) == (0, "7", "tiny")
    assert text_output(answer) == offline(llm, PROMPT).outputs[0].text


def test_two_inferences_and_an_error_on_one_stream(server: LocalServer, llm: LLM) -> None:
    texts = {"a": PROMPT, "b": PROMPT + " x"}
    requests = [infer(key, text, stream=True) for key, text in texts.items()]
    requests.insert(1, infer("bad", ""))
    done = grpcurl(server, f"{KSERVE}/ModelStreamInfer", data=requests)
    assert (done.code, done.err) == (0, "")
    (error,) = [m["error_message"] for m in done.messages if "error_message" in m]
    assert error == "text_input must be a text of at least one token, got ''"
    for key, text in texts.items():
        parts = [m["infer_response"] for m in done.messages if m["infer_response"]["id"] == key]
        assert "".join(map(text_output, parts)) == offline(llm, text).outputs[0].text
        finals = [p["parameters"]["triton_final_response"]["bool_param"] for p in parts]
        assert finals == [False] * (len(parts) - 1) + [True]


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_a_deadline_ends_the_request_in_the_engine(
    endless: LocalServer, protoset: Path, method: str
) -> None:
    before = endless.num_aborted()
    options = ("-protoset", protoset, "-max-time", "5")  # by then the engine has the request
    done = grpcurl(endless, f"{GENERATION}/{method}", *options, data=LONG)
    assert done.code == REFUSED + 4 and "Code: DeadlineExceeded" in done.err
    endless.wait_idle()
    assert endless.num_aborted() == before + 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["SIGINT", "SIGKILL"])
def test_leaving_ends_the_request_in_the_engine(endless: LocalServer, number: int) -> None:
    before = endless.num_aborted()
    words = command(endless, f"{GENERATION}/GenerateStream", "-d", json.dumps(LONG))
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while '"delta"' not in (line := process.stdout.readline()):
            assert line, "it ended by itself"
        process.send_signal(number)
    endless.wait_idle()
    assert endless.num_aborted() == before + 1


def test_tokens_and_health(tiny_model: str, protoset: Path) -> None:
    options = FrontEndOptions(tokens=Tokens(secret="word"))
    with LocalServer(tiny_model, options) as server:
        listed = grpcurl(server, "list")  # reflection wants the token, too
        assert listed.code == 1 and "code = Unauthenticated" in listed.err
        header = ("-H", "authorization: Bearer word")
        done = grpcurl(server, f"{GENERATION}/Generate", *header, data=asked())
        assert done.messages[0]["usage"]["completion_tokens"] == 6
        known = ("-protoset", protoset)
        done = grpcurl(server, f"{GENERATION}/Generate", *known, data=asked())
        assert done.code == REFUSED + 16 and '"reason":"TOKEN_MISSING"' in done.err
        healthy = grpcurl(server, "grpc.health.v1.Health/Check", *known, data={})
        assert healthy.messages == [{"status": "SERVING"}]  # without a token
