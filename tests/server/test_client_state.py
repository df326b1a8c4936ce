"""`cupaged client health` and `load`; what an import of the client costs; the examples."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import IO

import pytest
from grpc_health.v1 import health_pb2

from cupaged.v1 import model_pb2
from tests.e2e.cli import Done, Inline, Terminal, command, environment
from tests.server.fake_service import WAIT_S, FakeServer, load

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# A test run in the background ignores SIGINT, and so would what it starts.
INTERRUPTIBLE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
"""
TABLE = """\
state      ready
running    1 of 64 sequences
waiting    2 sequences, 0 of them preempted; 0 tokens
queue      at most 256 requests
KV blocks  25 of 100 (25.0%), 0 shared
prompts    0.0 tokens/s, 0 in all
answers    123.4 tokens/s, 0 in all
finished   3 stop
engine     0 steps, 0 preemptions, 0 restarts
"""


@pytest.fixture
def cupaged(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Inline:
    """The command, in this process."""
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
    return Inline(monkeypatch, capfdbinary)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def test_health_is_an_exit_code(cupaged: Inline, server: FakeServer) -> None:
    arguments = ("client", "health", "-a", server.address)
    assert cupaged(*arguments) == Done(0, "SERVING\n", "")
    server.set_health(NOT_SERVING)
    assert cupaged(*arguments) == Done(1, "NOT_SERVING\n", "")
    server.set_health(SERVING, "cupaged.v1.GenerationService")
    service = ("--service", "cupaged.v1.GenerationService")
    assert cupaged(*arguments, *service) == Done(0, "SERVING\n", "")
    server.stop()
    done = cupaged(*arguments)
    assert (done.code, done.out) == (1, "") and "cannot be reached" in done.err


def running(*arguments: str) -> subprocess.Popen[str]:
    """The command in a process, with its lines to be read as they come."""
    return subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, *command("client", *arguments)], env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def output(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def interrupt(process: subprocess.Popen[str]) -> str:
    """End it as Ctrl-C does; what it wrote on standard error."""
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    return err


def test_health_watch_prints_changes_and_waits_for_a_server_that_went(
    server: FakeServer,
) -> None:
    watching = running("health", "--watch", "-a", server.address)
    lines = output(watching)
    assert lines.readline().split()[1] == "SERVING"
    server.set_health(NOT_SERVING)
    assert lines.readline().split()[1] == "NOT_SERVING"
    server.stop()
    assert lines.readline().split()[1] == "UNREACHABLE"
    with FakeServer(address=server.address):
        assert lines.readline().split()[1] == "SERVING"
        assert interrupt(watching) == "\ninterrupted\n"


def test_load_is_a_table(cupaged: Inline, server: FakeServer) -> None:
    assert cupaged("client", "load", "-a", server.address) == Done(0, TABLE, "")


def test_load_of_a_server_that_is_loading(cupaged: Inline, server: FakeServer) -> None:
    state = model_pb2.Load(
        state=model_pb2.ENGINE_STATE_LOADING, state_reason="reads the model",
        max_num_queued_reqs=7, max_num_queued_tokens=1000000,
    )  # fmt: skip
    server.script.append(lambda r, c: model_pb2.GetLoadResponse(load=state))
    lines = cupaged("client", "load", "-a", server.address).out.splitlines()
    assert lines[0] == "state      loading (reads the model)"
    assert lines[3] == "queue      at most 7 requests and 1,000,000 tokens"
    assert lines[7] == "finished   none"
    server.script.append(lambda r, c: model_pb2.GetLoadResponse())
    lines = cupaged("client", "load", "-a", server.address).out.splitlines()
    assert (lines[0], lines[3]) == ("state      unknown", "queue      without a limit")


def test_load_as_json(cupaged: Inline, server: FakeServer) -> None:
    stamped = load(1)
    stamped.snapshot_time.FromJsonString("2026-01-02T03:04:05Z")
    server.script.append(lambda r, c: model_pb2.GetLoadResponse(load=stamped))
    record = json.loads(cupaged("client", "load", "--json", "-a", server.address).out)
    assert record["state"] == "ready" and record["finished_total"] == {"stop": 3}
    assert record["snapshot_time"] == "2026-01-02T03:04:05+00:00"
    assert (record["num_running"], record["max_num_queued_tokens"]) == (1, None)


def test_load_watch_through_a_pipe(server: FakeServer) -> None:
    watching = running("load", "--watch", "--json", "--interval", "0.1", "-a", server.address)
    records = [json.loads(output(watching).readline()) for _ in range(3)]
    assert [record["num_running"] for record in records] == [1, 2, 3]
    assert interrupt(watching) == "\ninterrupted\n"
    (seen,) = server.seen
    assert seen.request.interval.nanos == 100_000_000 and seen.ended.wait(WAIT_S)


def test_load_watch_at_a_terminal_stays_in_place(server: FakeServer) -> None:
    terminal = Terminal(
        *command("client", "load", "--watch", "--interval", "0.1", "-a", server.address)
    )
    terminal.wait_for("running    1 of 64")
    terminal.wait_for("running    2 of 64")
    terminal.type("\x03")
    terminal.wait_for("interrupted")
    assert terminal.end() == 130
    num_lines = len(TABLE.splitlines())
    assert f"\x1b[{num_lines}F\x1b[J" in terminal.written


def test_the_client_imports_no_arrays_and_no_tokenizer() -> None:
    code = "import sys, cupaged.client; print(*sorted(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    loaded = set(run.stdout.split())
    assert "cupaged.client.sync_client" in loaded and "grpc" in loaded
    heavy = {"numpy", "tokenizers", "cupy", "jinja2", "safetensors", "ml_dtypes", "msgpack"}
    assert not loaded & heavy
    assert not any(name.startswith(("cupaged.server", "cupaged.engine")) for name in loaded)


def example(name: str, address: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"cupaged.examples.{name}", address],
        env=environment(GRPC_VERBOSITY="NONE"), capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_the_examples(server: FakeServer) -> None:
    done = example("grpc_stream", server.address)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "Tell me about the sea. \n(5 tokens, stop)\n"
    done = example("grpc_async_many", server.address)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("100 answers, 400 tokens, ")  # four words each
    prompts = {seen.request.text for seen in server.seen if seen.method == "Generate"}
    assert prompts == {f"The number {n} is" for n in range(100)}


@pytest.mark.parametrize("name", ["grpc_stream", "grpc_async_many"])
def test_an_example_without_a_server(name: str, server: FakeServer) -> None:
    server.stop()
    done = example(name, server.address)
    assert done.returncode == 1
    assert "Connection refused" in done.stderr and "Traceback" not in done.stderr
