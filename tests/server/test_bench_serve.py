"""`cupaged bench serve` from its command line to a server, and what it prints and saves."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
import pytest

from cupaged.benchmarks.backend import BackendOptions, Received, RequestFailed
from cupaged.benchmarks.cupaged_backend import CupagedBackend
from cupaged.benchmarks.datasets import Sample
from cupaged.benchmarks.load import generate_load
from cupaged.cli.main import main
from cupaged.v1 import generation_pb2 as pb
from tests.server.bench_server import EOS, MAX_MODEL_LEN, VOCAB_SIZE, BenchServer
from tests.server.loop_thread import SECONDS

# What a reader of results may rely on: vLLM's keys, and ours beside them.
VLLM_KEYS = {
    "backend", "burstiness", "completed", "date", "duration", "endpoint_type", "errors", "failed",
    "itls", "label", "max_concurrency", "max_concurrent_requests", "max_output_tokens_per_s",
    "model_id", "num_prompts", "output_throughput", "request_goodput", "request_rate",
    "request_throughput", "tokenizer_id", "total_input_tokens", "total_output_tokens",
    "total_token_throughput", "ttfts",
    *(f"{of}_{name}_ms" for of in ("mean", "median", "std", "p99")
      for name in ("ttft", "tpot", "itl", "e2el")),
}  # fmt: skip
OWN_KEYS = {
    "client_cpu_seconds", "client_cpu_share", "dataset_name", "failed_by_code", "max_lateness_ms",
    "mean_lateness_ms", "p99_lateness_ms", "request_rate_sent", "seed", "server", "versions",
    "tokens_counted_by", "ended_early",
}  # fmt: skip
DETAILED_KEYS = {
    "due_times", "input_lens", "latencies", "message_tokens", "output_lens", "queue_times",
    "start_times",
}  # fmt: skip
SHORT = ("--random-input-len", "6", "--random-output-len", "9")
Captured = pytest.CaptureFixture[str]


def bench(server: BenchServer | str, *arguments: str) -> int:
    address = server if isinstance(server, str) else server.address
    return main(["bench", "serve", "--address", address, *arguments])


def saved(server: BenchServer, folder: Path, *arguments: str) -> dict[str, Any]:
    """The saved result of a run that succeeds."""
    name = ("--save-result", "--result-dir", str(folder), "--result-filename", "r.json")
    assert bench(server, *name, *arguments) == 0
    result: dict[str, Any] = json.loads((folder / "r.json").read_text())
    return result


def test_a_run_is_printed_and_saved(tmp_path: Path, capsys: Captured) -> None:
    with BenchServer() as server:
        result = saved(server, tmp_path, "--num-prompts", "5", *SHORT, "--metadata", "gpu=none")
    assert set(result) == VLLM_KEYS | OWN_KEYS | {"gpu"}
    assert (result["completed"], result["failed"], result["num_prompts"]) == (5, 0, 5)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 45)
    assert (result["backend"], result["model_id"], result["gpu"]) == (
        "cupaged",
        "team/fake",
        "none",
    )
    assert (result["request_rate"], result["request_goodput"]) == ("inf", None)
    assert (result["tokens_counted_by"], result["ended_early"]) == ("server", 0)
    assert re.fullmatch(r"\d{8}-\d{6}", result["date"])
    assert result["versions"]["grpcio"] == grpc.__version__
    assert (result["server"]["version"], result["server"]["device"]) == ("9.9", "cpu")
    assert [len(gaps) for gaps in result["itls"]] == [8] * 5 and result["errors"] == [""] * 5
    assert min(result["ttfts"]) > 0 and max(result["ttfts"]) <= result["duration"]
    assert result["mean_ttft_ms"] == pytest.approx(1000 * sum(result["ttfts"]) / 5)
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == " Serving Benchmark Result ".center(50, "=")
    assert f"{'Successful requests:':40} 5" in lines and lines[-1] == "=" * 50
    assert "5 requests to team/fake" in captured.err and "r.json" in captured.err


def test_requests_are_as_the_options_say(capsys: Captured) -> None:
    with BenchServer() as server:
        bench(
            server, "--num-prompts", "4", *SHORT, "--model", "some", "--temperature", "0.5",
            "--top-k", "3", "--timeout", "60", "--request-id-prefix", "mine-",
        )  # fmt: skip
        assert server.remaining_s is not None and 30 < server.remaining_s < 90
    assert sorted(request.request_id for request in server.requests) == [
        "mine-0", "mine-1", "mine-2", "mine-3",
    ]  # fmt: skip
    for request in server.requests:
        ids = list(request.token_ids.ids)
        assert len(ids) == 6 and max(ids) < VOCAB_SIZE and EOS not in ids
        assert (request.stopping.max_new_tokens, request.stopping.ignore_eos) == (9, True)
        assert (request.sampling.temperature, request.sampling.top_k) == (0.5, 3)
        assert request.model == "some"


def test_tokens_are_counted_and_messages_are_not(tmp_path: Path, capsys: Captured) -> None:
    with BenchServer(tokens_a_message=5) as server:
        result = saved(
            server, tmp_path, "--num-prompts", "3", "--random-input-len", "2",
            "--random-output-len", "12", "--save-detailed",
        )  # fmt: skip
    assert set(result) == VLLM_KEYS | OWN_KEYS | DETAILED_KEYS
    assert result["message_tokens"] == [[1, 5, 5, 1]] * 3
    assert [len(gaps) for gaps in result["itls"]] == [3] * 3
    assert result["output_lens"] == [12] * 3 and result["total_output_tokens"] == 36
    tpots = [
        (latency - ttft) / 11
        for latency, ttft in zip(result["latencies"], result["ttfts"], strict=True)
    ]
    assert result["mean_tpot_ms"] == pytest.approx(1000 * sum(tpots) / 3)


def fails_by_length(request: pb.GenerateStreamRequest) -> Any:
    """What happens to a request is chosen by the number of its tokens."""
    return {
        11: (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
        12: pb.FINISH_REASON_ABORT,
        13: (grpc.StatusCode.INTERNAL, "NUMERICAL"),
    }.get(request.stopping.max_new_tokens)


def trace(folder: Path, *lengths: int) -> str:
    """A trace with answers of these lengths, a second apart."""
    path = folder / "trace.csv"
    rows = "".join(f"{i},3,{length}\n" for i, length in enumerate(lengths))
    path.write_text(f"time_s,input_tokens,output_tokens\n{rows}")
    return str(path)


def test_failures_are_counted_by_their_codes(tmp_path: Path, capsys: Captured) -> None:
    path = trace(tmp_path, 4, 11, 12, 11, 13, 6)
    with BenchServer(fails=fails_by_length) as server:
        result = saved(
            server, tmp_path, "--dataset-name", "trace", "--dataset-path", path,
            "--request-rate", "inf",
        )  # fmt: skip
    assert (result["completed"], result["failed"]) == (2, 4)
    assert result["failed_by_code"] == {
        "RESOURCE_EXHAUSTED QUEUE_FULL": 2, "OK abort": 1, "INTERNAL NUMERICAL": 1,
    }  # fmt: skip
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (6, 10)
    assert [bool(error) for error in result["errors"]] == [False, True, True, True, True, False]
    captured = capsys.readouterr()
    assert f"{'  RESOURCE_EXHAUSTED QUEUE_FULL:':40} 2" in captured.out.splitlines()
    assert "failed: INTERNAL NUMERICAL: as planned" in captured.err
    assert "has only 6 requests that fit the model" in captured.err


def test_a_run_in_which_all_failed_has_exit_code_1(capsys: Captured) -> None:
    with BenchServer(fails=lambda request: pb.FINISH_REASON_ERROR) as server:
        assert bench(server, "--num-prompts", "2", *SHORT) == 1
    assert f"{'  OK error:':40} 2" in capsys.readouterr().out.splitlines()


def test_a_trace_keeps_its_times(tmp_path: Path, capsys: Captured) -> None:
    with BenchServer() as server:
        result = saved(
            server, tmp_path, "--dataset-name", "trace", "--dataset-path",
            trace(tmp_path, 3, 4, 5, 6), "--trace-speed", "40", "--save-detailed",
        )  # fmt: skip
    assert result["request_rate"] == "trace"
    assert result["due_times"] == pytest.approx([0.0, 0.025, 0.05, 0.075])
    late = [s - d for s, d in zip(result["start_times"], result["due_times"], strict=True)]
    assert min(late) >= 0
    assert 0 < result["mean_lateness_ms"] <= result["max_lateness_ms"] <= 1000 * max(late)
    assert sorted(r.stopping.max_new_tokens for r in server.requests) == [3, 4, 5, 6]
    assert "times of the trace, 40 times as fast" in capsys.readouterr().err


def test_a_limit_and_connections_are_kept(tmp_path: Path, capsys: Captured) -> None:
    with BenchServer() as server:
        result = saved(
            server, tmp_path, "--num-prompts", "12", *SHORT, "--max-concurrency", "2",
            "--connections", "3", "--num-warmups", "4", "--save-detailed",
            "--percentile-metrics", "client_queue_time",
        )  # fmt: skip
    assert server.most_running <= 2 and len(server.peers) == 3
    assert len(server.requests) == 16 and len(result["ttfts"]) == 12
    assert result["max_concurrent_requests"] == 2
    assert max(result["queue_times"]) > 0 and result["p99_client_queue_time_ms"] > 0
    assert "Client-side Queueing" in capsys.readouterr().out


def test_texts_are_sent_as_texts_and_chats(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a b c", "output_tokens": 2}\n')
    talk = [{"conversations": [{"value": "how are you now"}, {"value": "fine, and how are you"}]}]
    (tmp_path / "t.json").write_text(json.dumps(talk))
    custom = ("--dataset-name", "custom", "--dataset-path", str(tmp_path / "p.jsonl"))
    with BenchServer() as server:
        bench(server, *custom)
        bench(server, *custom, "--skip-chat-template", "--ignore-eos")
        bench(server, "--dataset-name", "sharegpt", "--dataset-path", str(tmp_path / "t.json"))
    chat, plain, shared = server.requests
    assert [(m.role, m.content) for m in chat.chat.messages] == [("user", "a b c")]
    assert (chat.stopping.max_new_tokens, chat.stopping.ignore_eos) == (2, False)
    assert (plain.text, plain.stopping.ignore_eos) == ("a b c", True)
    assert (shared.text, shared.stopping.max_new_tokens) == ("how are you now", 5)


def test_a_token_goes_with_every_request(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "token").write_text("secret\n")
    with BenchServer() as server:
        bench(server, "--num-prompts", "1", *SHORT, "--token-file", str(tmp_path / "token"))
    assert server.metadata["authorization"] == "Bearer secret"


def test_results_are_appended_and_drawn(tmp_path: Path, capsys: Captured) -> None:
    with BenchServer() as server:
        for _ in range(2):
            saved_to = ("--append-result", "--result-filename", str(tmp_path / "all.jsonl"))
            picture = ("--plot", str(tmp_path / "run.svg"))
            assert bench(server, "--num-prompts", "2", *SHORT, *saved_to, *picture) == 0
    assert len((tmp_path / "all.jsonl").read_text().splitlines()) == 2
    assert "team/fake" in (tmp_path / "run.svg").read_text()


def test_what_is_infinite_is_a_word_in_json(tmp_path: Path, capsys: Captured) -> None:
    with BenchServer() as server:
        beat = ("--request-rate", "200", "--burstiness", "inf")
        result = saved(server, tmp_path, "--num-prompts", "3", *SHORT, *beat, "--save-detailed")
    assert (result["request_rate"], result["burstiness"]) == (200.0, "inf")
    assert result["due_times"] == pytest.approx([0.005, 0.01, 0.015])


def test_a_file_that_cannot_be_written_is_refused_before_the_run(
    tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "file").write_text("")
    for flags, why in (
        (("--save-result", "--result-filename", str(tmp_path)), "it is a folder"),
        (("--save-result", "--result-dir", str(tmp_path / "file")), "File exists"),
        (("--plot", str(tmp_path / "file" / "x.svg")), "File exists"),
    ):
        with BenchServer() as server:
            assert bench(server, "--num-prompts", "1", *SHORT, *flags) == 1
        assert not server.requests
        assert why in capsys.readouterr().err


def test_a_server_that_loads_is_waited_for(capsys: Captured) -> None:
    with BenchServer(loading=1) as server:
        assert bench(server, "--num-prompts", "1", *SHORT) == 1
        assert "LOADING" in capsys.readouterr().err
    with BenchServer(loading=2) as server:
        wait = ("--ready-check-timeout-sec", "20")
        assert bench(server, "--num-prompts", "1", *SHORT, *wait) == 0


def test_a_server_that_is_not_there(capsys: Captured) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
        assert main(["bench", "serve", "--port", port, "--num-prompts", "1"]) == 1
    captured = capsys.readouterr()
    assert f"127.0.0.1:{port}: cannot be reached" in captured.err and not captured.out
    assert captured.err.count("\n") == 1


def test_a_warm_up_that_fails_ends_the_benchmark(capsys: Captured) -> None:
    with BenchServer(fails=fails_by_length) as server:
        lengths = ("--random-input-len", "3", "--random-output-len", "11")
        assert bench(server, "--num-prompts", "9", *lengths, "--num-warmups", "1") == 1
        assert len(server.requests) == 1
    assert "the warm-up failed: RESOURCE_EXHAUSTED QUEUE_FULL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--backend", "other"),
            "--backend must be one of cupaged, openai, openai-chat, triton, got ",
        ),
        (("--request-rate", "0"), "--request-rate must be > 0, or inf, got 0.0"),
        (("--request-rate", "fast"), "argument --request-rate: invalid float value: 'fast'"),
        (("--max-concurrency", "0"), "--max-concurrency must be >= 1, got 0"),
        (("--connections", "0"), "--connections must be in [1, 256], got 0"),
        (("--timeout", "0"), "--timeout must be > 0 seconds, got 0.0"),
        (("--num-warmups", "-1"), "--num-warmups must be >= 0, got -1"),
        (("--goodput", "ttft"), "must be a latency and milliseconds such as ttft:500"),
        (("--goodput", "itl:5"), "--goodput must be a limit of ttft, tpot, e2el, got 'itl'"),
        (("--metric-percentiles", "50,x"), "must be numbers such as 50,99, got '50,x'"),
        (("--percentile-metrics", "ttft,x"), "--percentile-metrics must be of ttft, tpot"),
        (("--metadata", "novalue"), "must be KEY=VALUE, got 'novalue'"),
        (("--plot", "run.png"), "--plot must be a name that ends in .svg, got 'run.png'"),
        (("--result-dir", "x"), "--result-dir must be given with --save-result, got 'x'"),
        (("--dataset-name", "trace"), "--dataset-path must be a file for trace, got None"),
        (("--host", "other"), "--address must be left out where --host or --port is given"),
        (("--ready-check-timeout-sec", "-1"), "--ready-check-timeout-sec must be >= 0, got -1.0"),
        (("--num-promts", "5"), "unknown option --num-promts; perhaps --num-prompts"),
    ],
)
def test_wrong_options_are_wrong_usage(
    arguments: tuple[str, ...], message: str, capsys: Captured
) -> None:
    assert bench("127.0.0.1:1", *arguments) == 2
    assert message in capsys.readouterr().err


def test_lengths_that_the_server_does_not_take(capsys: Captured) -> None:
    with BenchServer() as server:
        assert bench(server, "--num-prompts", "1") == 2
    assert f"at most {MAX_MODEL_LEN} tokens together" in capsys.readouterr().err


def test_cancelling_a_run_cancels_its_requests() -> None:
    async def cancelled(server: BenchServer) -> None:
        backend = CupagedBackend(BackendOptions(server.address))
        requests = [backend.prepare(Sample((1, 2), 50), str(i)) for i in range(3)]
        await backend.open()
        run = asyncio.create_task(generate_load(backend, requests, [0.0, 0.0, 0.0]))
        async with asyncio.timeout(SECONDS):
            while server.running < 3:
                await asyncio.sleep(0.01)
        server.idle.clear()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert await asyncio.to_thread(server.idle.wait, SECONDS)
        await backend.close()

    with BenchServer(stalls=True) as server:
        asyncio.run(cancelled(server))
        assert server.running == 0


class ScriptedBackend:
    """Gives each request the messages that its name asks for, without a clock of its own."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def prepare(self, sample: Sample, request_id: str) -> bytes:
        return request_id.encode()

    async def request(self, prepared: bytes) -> AsyncGenerator[Received, None]:
        self.sent.append(prepared)
        if prepared == b"breaks":
            raise ZeroDivisionError
        yield Received(float("inf"), 1)
        raise RequestFailed("CODE", "halfway")


def test_a_failure_halfway_counts_no_tokens_and_a_bug_ends_the_run() -> None:
    backend: Any = ScriptedBackend()
    run = asyncio.run(generate_load(backend, [b"x"], [0.0]))
    (record,) = run.records
    assert (record.error_code, record.output_tokens) == ("CODE", 0)
    assert 0 <= record.sent_s <= record.end_s <= run.duration_s
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(generate_load(backend, [b"breaks"], [0.0]))
    assert isinstance(raised.value.exceptions[0], ZeroDivisionError)
