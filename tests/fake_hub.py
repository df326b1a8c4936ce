"""A model hub on 127.0.0.1, as far as `huggingface_hub` talks to it.

It lists repositories with sizes and digests, redirects large files to another host as the hub does,
serves ranges, and refuses in the hub's own words (`X-Error-Code`). It notes every request, and can
be told to break a connection, to pause in the middle of a file, or to be out of order.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote, urlsplit

LARGE_BYTES = 100_000
"""Files from this size on are stored apart (git LFS) and named by their SHA-256."""


@dataclass
class Repo:
    """A repository of one commit. gated, private: what a visitor must bring, if anything."""

    files: dict[str, bytes]
    revisions: tuple[str, ...] = ("main",)
    gated: bool = False
    private: bool = False

    @property
    def commit(self) -> str:
        """A function of the content, as in git."""
        parts = [f"{name} {digest(self.files[name])}" for name in sorted(self.files)]
        return hashlib.sha1("\n".join(parts).encode()).hexdigest()


@dataclass(frozen=True)
class Request:
    """One request that was received. range: the header, or ""."""

    method: str
    path: str
    host: str
    range: str
    token: str


@dataclass
class FakeHub:
    """The server, in a thread; use it in a `with` statement.

    good_token: the one that opens private and gated repositories.
    break_after: bytes of a body after which the connection is cut, once, by file name.
    pause_after: bytes of a body after which the server waits for `resume`, by file name.
    status, message: if not 0, the answer to every request.
    sizes, lies: what the list says of a file, and what is sent instead of it.
    """

    repos: dict[str, Repo] = field(default_factory=dict)
    good_token: str = "hf_good"
    break_after: dict[str, int] = field(default_factory=dict)
    pause_after: dict[str, int] = field(default_factory=dict)
    resume: threading.Event = field(default_factory=threading.Event)
    paused: threading.Event = field(default_factory=threading.Event)
    status: int = 0
    message: str = "No"
    ignores_ranges: bool = False
    lies: Mapping[str, bytes] = field(default_factory=dict)
    sizes: dict[str, int | None] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)

    def __enter__(self) -> Self:
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.resume.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """What HF_ENDPOINT is set to."""
        return f"http://127.0.0.1:{self.port}"

    def bodies(self, part: str = "") -> list[Request]:
        """The requests for the content of files, with `part` in their path."""
        gets = [request for request in self.requests if request.method == "GET"]
        return [r for r in gets if "/resolve/" in r.path and part in r.path]


def digest(content: bytes) -> str:
    """How the hub names a content: SHA-256 if it is large, else as git does."""
    if len(content) >= LARGE_BYTES:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        try:
            self._route(unquote(urlsplit(self.path).path))
        except (BrokenPipeError, ConnectionResetError):  # the client was stopped
            self.close_connection = True

    def _route(self, path: str) -> None:
        if path == "/api/agent-harnesses":  # the library asks once a day, whatever it is used for
            self._send(404, {})
            return
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        host = self.headers.get("host", "").partition(":")[0]
        asked_range = self.headers.get("range", "")
        self.hub.requests.append(Request(self.command, path, host, asked_range, token))
        if self.hub.status:
            self._send(self.hub.status, {"X-Error-Message": self.hub.message})
        elif listing := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._list(listing[1], listing[2] or "main", token)
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(found[1], found[2], found[3], token)
        elif large := re.fullmatch(r"/large/([^/]+/[^/]+)/(.+)", path):
            self._send_body(large[2], self.hub.repos[large[1]].files[large[2]], {})
        else:
            self._send(404, {})

    def _repo(self, name: str, revision: str, token: str) -> Repo | None:
        """The repository, unless it must be refused; then that is done."""
        repo = self.hub.repos.get(name)
        if token not in ("", self.hub.good_token):
            message = "Invalid credentials in Authorization header"
            self._send(401, {"X-Error-Message": message})
        elif repo is None or (repo.private and not token):
            if token:
                self._refuse(404, "RepoNotFound", "Repository not found")
            else:
                self._send(401, {"X-Error-Message": "Invalid username or password."})
        elif revision not in (*repo.revisions, repo.commit):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return repo
        return None

    def _list(self, name: str, revision: str, token: str) -> None:
        repo = self._repo(name, revision, token)
        if repo is None:
            return
        siblings = []
        for file, content in repo.files.items():
            size = self.hub.sizes.get(file, len(content))
            entry: dict[str, Any] = {"rfilename": file, "size": size, "blobId": "0" * 40}
            if len(content) >= LARGE_BYTES:
                entry["lfs"] = {"sha256": digest(content), "size": len(content), "pointerSize": 9}
            else:
                entry["blobId"] = digest(content)
            siblings.append(entry)
        answer = {"id": name, "sha": repo.commit, "siblings": siblings}
        self._send(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def _resolve(self, name: str, revision: str, file: str, token: str) -> None:
        repo = self._repo(name, revision, token)
        if repo is None:
            return
        if repo.gated and token != self.hub.good_token:
            self._refuse(401, "GatedRepo", f"Access to model {name} is restricted.")
            return
        content = repo.files.get(file)
        headers = {"X-Repo-Commit": repo.commit}
        if content is None:
            self._refuse(404, "EntryNotFound", "Entry not found", headers)
        elif len(content) >= LARGE_BYTES:
            headers["X-Linked-Etag"] = f'"{digest(content)}"'
            headers["X-Linked-Size"] = str(len(content))
            headers["Location"] = f"http://localhost:{self.hub.port}/large/{name}/{file}"
            self._send(302, headers)
        else:
            self._send_body(file, content, {**headers, "ETag": f'"{digest(content)}"'})

    def _send_body(self, file: str, content: bytes, headers: Mapping[str, str]) -> None:
        content = self.hub.lies.get(file, content)
        start = 0
        status, more = 200, {}
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", ""))
        if asked and not self.hub.ignores_ranges:
            start = int(asked[1])
            if start >= len(content):
                self._send(416, {"Content-Range": f"bytes */{len(content)}"})
                return
            more = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
            status = 206
        self._send_head(status, {**headers, **more}, len(content) - start)
        if self.command == "HEAD":
            return
        stop = self.hub.break_after.pop(file, len(content))
        pause = self.hub.pause_after.get(file, stop)
        if start < pause < stop:
            self.wfile.write(content[start:pause])
            self.wfile.flush()
            self.hub.paused.set()
            self.hub.resume.wait()
            start = pause
        self.wfile.write(content[start:stop])

    def _refuse(
        self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        refusal = {"X-Error-Code": code, "X-Error-Message": message}
        self._send(status, {**(headers or {}), **refusal})

    def _send(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        self._send_head(status, headers, len(body))
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_head(self, status: int, headers: Mapping[str, str], size: int) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(size))
        self.end_headers()
