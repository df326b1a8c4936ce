"""A fake hub for tests in this process, and the model that it has."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http

from tests.fake_hub import LARGE_BYTES, FakeHub, Repo

NAME = "org/model"
CONFIG, TOKENIZER = b'{"model_type": "llama"}', b'{"version": "1.0"}'
SMALL = {"config.json": CONFIG, "tokenizer.json": TOKENIZER}
WEIGHTS = bytes(range(256)) * 800  # 204,800 bytes: stored apart
assert len(WEIGHTS) > LARGE_BYTES
MODEL = {**SMALL, "model.safetensors": WEIGHTS}
UNWANTED = {"pytorch_model.bin": b"p", "onnx/model.onnx": b"o", "original/model.safetensors": b"x"}


@contextmanager
def small_hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that has one model, and an empty cache in `home`.

    The library has read its environment long before, so its constants are set instead.
    """
    with FakeHub({NAME: Repo({**MODEL, **UNWANTED})}) as server:
        point_to(server.url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        _http.close_session()
        yield server
        _http.close_session()


def point_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hub be at another address."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_HUB_OFFLINE=1 does."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def refusing_url() -> str:
    """An address at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def held(folder: Path) -> dict[str, bytes]:
    """Content of a snapshot by name."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def leftovers(kind: str = "*.incomplete") -> list[Path]:
    """Files of the cache that have such a name."""
    return sorted(Path(constants.HF_HUB_CACHE).rglob(kind))
