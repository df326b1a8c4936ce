"""A client process tells one end of every task, whatever the server is, and can be killed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import Any

import grpc
import pytest

from tests.faults.client import Client
from tests.faults.task import CLOSED, GONE, Begun, Ended, Order, Task

METHOD = "/cupaged.v1.GenerationService/GenerateStream"


@pytest.fixture
def client() -> Iterator[Client]:
    with Client() as running:
        yield running


def ends_of(client: Client, address: str, *tasks: Task) -> dict[int, list[str]]:
    client.begin(Order(address, address, [*tasks]))
    ended = [word for word in client.words() if isinstance(word, Ended)]
    assert all(each.started <= each.ended for each in ended)
    assert len(ended) == len(tasks)
    return {each.id: each.statuses for each in ended}


def test_where_nobody_listens(client: Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    tasks = (
        Task(id=1, start_s=0, method=METHOD, message=b"x"),
        Task(id=2, start_s=0, method=METHOD, message=b"x", certificate=None),
        Task(id=3, start_s=0, method=METHOD, end="connection reset"),
        Task(id=4, start_s=0, raw=b"GET /readyz HTTP/1.1\r\n\r\n", to_http=True),
    )
    expected = {1: ["UNAVAILABLE"], 2: ["UNAVAILABLE"], 3: [CLOSED], 4: [CLOSED]}
    assert ends_of(client, address, *tasks) == expected
    assert ends_of(client, address, *tasks) == expected  # it lives on for a further round


def test_what_http_and_others_answer(client: Client) -> None:
    answers = {b"one": b"HTTP/1.1 503 Service Unavailable\r\n\r\nnot ready", b"two": b"\0\0\0\4"}

    def answer() -> None:
        for _ in answers:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(answers[connection.recv(100)])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        tasks = [Task(id=i, start_s=0, raw=raw, to_http=True) for i, raw in enumerate(answers)]
        assert ends_of(client, address, *tasks) == {0: ["503"], 1: [GONE]}
        thread.join()


@pytest.mark.parametrize("last", ["idle", "gone"])
def test_a_reader_stalls_until_the_engine_has_nothing_to_do(client: Client, last: str) -> None:
    """Or has gone. What the page of metrics says meanwhile decides, not how long that takes."""
    pages = [(3.0, 1.0), (0.0, 1.0), (2.0, 0.0), (0.0, 0.0) if last == "idle" else None]
    looks = iter(pages)
    asked = []

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            page = next(looks)
            self.send_response(503 if page is None else 200)
            self.end_headers()
            if page is not None:
                running, waiting = page
                self.wfile.write(
                    f'cupaged_num_requests_running{{model_name="m"}} {running}\n'
                    f'cupaged_num_requests_waiting{{model_name="m"}} {waiting}\n'
                    'cupaged_num_requests_swapped{model_name="m"} 7.0\n'.encode()
                )

        def log_message(self, *args: object) -> None:
            pass

    def answer(request: bytes, context: object) -> Iterator[bytes]:
        yield from (b"first", b"second")

    handler: Any = grpc.unary_stream_rpc_method_handler(answer)
    service, _, method = METHOD.removeprefix("/").partition("/")
    handlers = grpc.method_handlers_generic_handler(service, {method: handler})
    rpc = grpc.server(ThreadPoolExecutor(1), handlers=[handlers])
    port = rpc.add_insecure_port("127.0.0.1:0")
    rpc.start()
    task = Task(
        id=1, start_s=0, method=METHOD, end="stall", num_messages=1, until_idle=True,
        certificate=None,
    )  # fmt: skip
    with TCPServer(("127.0.0.1", 0), Metrics) as metrics:
        thread = threading.Thread(target=metrics.serve_forever)
        thread.start()
        http = f"127.0.0.1:{metrics.server_address[1]}"
        client.begin(Order(f"127.0.0.1:{port}", http, [task]))
        [ended] = [word for word in client.words() if isinstance(word, Ended)]
        metrics.shutdown()
        thread.join()
    rpc.stop(None).wait()
    assert asked == ["/metrics"] * len(pages)
    assert (ended.statuses, ended.messages) == (["OK"], [b"first", b"second"])


def test_one_that_is_killed_tells_no_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, Client() as client:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        client.begin(Order(address, address, [Task(id=7, start_s=0, raw=b"x", to_http=True)]))
        words = client.words()
        assert next(words) == Begun(7)
        client.kill()
        assert [*words] == []
