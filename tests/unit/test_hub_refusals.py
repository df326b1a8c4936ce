"""Each way in which the hub says no, or says nothing, has an error of its own."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from cupaged.errors import (
    CupagedError,
    HubError,
    HubUnreachableError,
    ModelNotFoundError,
    NotSupportedError,
)
from cupaged.loading.hub import PullPlan, pull
from cupaged.loading.model_files import find_model
from tests import fake_hub
from tests.fake_hub import FakeHub, Repo
from tests.unit.small_hub import (
    MODEL,
    NAME,
    WEIGHTS,
    go_offline,
    held,
    leftovers,
    point_to,
    refusing_url,
    small_hub,
)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that has one model, and an empty cache."""
    with small_hub(tmp_path / "home", monkeypatch) as server:
        yield server


TOKEN = "hf_Secret123"


# ---- refusals ------------------------------------------------------------------------------------


def refusals(hub: FakeHub) -> dict[str, str]:
    """Names that the hub refuses, and a pattern of what is said; without a token."""
    hub.repos["org/gated"] = Repo(dict(MODEL), gated=True)
    hub.repos["org/private"] = Repo(dict(MODEL), private=True)
    where = re.escape(hub.url)
    return {
        "org/gated": rf"org/gated is gated: .* Ask for access at {where}/org/gated, and set HF_TOK",
        "org/private": rf"no org/private on {where}, or it is private .* set HF_TOKEN",
        "org/absent": rf"no org/absent on {where}, or it is private .*without an access token",
        f"{NAME}@v9": rf"{NAME} has no revision 'v9' on {where}",
        f"{NAME}:no.gguf": "no GGUF file matches 'no.gguf'; there are: none",
    }


def test_each_refusal_is_told_apart(hub: FakeHub) -> None:
    for name, pattern in refusals(hub).items():
        with pytest.raises((HubError, ModelNotFoundError), match=pattern) as caught:
            pull(name)
        assert isinstance(caught.value, HubError) == (name == "org/gated")
        assert not Path(constants.HF_HUB_CACHE).exists() or not leftovers("*.safetensors")


def test_a_token_opens_the_door_and_stays_with_the_hub(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals(hub)
    monkeypatch.setenv("HF_TOKEN", hub.good_token)
    assert held(pull("org/gated", progress=False)) == MODEL
    assert held(pull("org/private", progress=False)) == MODEL
    seen = {(request.host, request.token) for request in hub.requests}
    assert seen == {("127.0.0.1", hub.good_token), ("localhost", "")}


def test_a_token_that_is_not_enough(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals(hub)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(HubError, match="does not accept the access token: renew HF_TOKEN"):
        pull(NAME)
    hub.good_token = TOKEN
    with pytest.raises(ModelNotFoundError, match=r"cannot be seen with this access token"):
        pull("org/absent")


@pytest.mark.parametrize("token", ["hf_Secret123\x01", "hf_Secret123ü", "hf_Secret123 x"])
def test_a_token_that_no_request_can_carry(
    token: str, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(HubError, match="HF_TOKEN") as caught:
        pull(NAME)
    assert "Secret" not in str(caught.value) and hub.requests == []


def test_a_token_is_never_shown(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    texts = []
    for token in (TOKEN, hub.good_token):
        monkeypatch.setenv("HF_TOKEN", token)
        for name in refusals(hub):
            try:
                pull(name, progress=False)
            except CupagedError as error:
                texts.append(str(error))
                assert error.__cause__ is None
                assert error.__context__ is None or error.__suppress_context__
    point_to(f"http://user:{TOKEN}@127.0.0.1:9", monkeypatch)
    with pytest.raises(HubUnreachableError) as caught:
        pull(NAME)
    texts.append(str(caught.value))
    assert len(texts) > 6
    everything = "\n".join([*texts, caplog.text])
    assert TOKEN not in "\n".join(texts) and hub.good_token not in everything


def test_a_token_that_the_hub_repeats(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.status, hub.message = 403, f"the token {TOKEN} may not"
    with pytest.raises(HubError, match=r"\(status 403\): the token \*\*\* may not$"):
        pull(NAME)


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (400, HubError, "refuses org/model"),
        (403, HubError, r"refuses org/model \(status 403\)"),
        (429, HubError, "too many requests: try again later"),
        (500, HubUnreachableError, r"is out of order \(status 500\); .* not whole in the cache"),
        (503, HubUnreachableError, r"is out of order \(status 503\)"),
    ],
)
def test_status_codes(status: int, error: type[HubError], message: str, hub: FakeHub) -> None:
    hub.status = status
    with pytest.raises(error, match=message):
        pull(NAME)


def test_a_file_that_vanished_since_it_was_listed(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeHub, "bodies", None)
    listed = dict(hub.repos[NAME].files)

    def forget(plan: PullPlan) -> None:
        hub.repos[NAME].files = {k: v for k, v in listed.items() if k != "tokenizer.json"}
        hub.repos[NAME].revisions += (plan.commit,)

    with pytest.raises(ModelNotFoundError, match=r"there is no file 'tokenizer\.json'"):
        pull(NAME, progress=False, on_plan=forget)


@pytest.mark.parametrize("answer", [b"<html>log in</html>", b"[]", b'"x"', b'{"id": "a"}', b"\xff"])
def test_something_that_is_no_hub(
    answer: bytes, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say(handler: Any, *args: object) -> None:
        handler._send(200, {"Content-Type": "application/json"}, answer)

    monkeypatch.setattr(fake_hub._Handler, "_list", say)
    with pytest.raises(HubError, match=r"does not answer as a model hub does.*HF_ENDPOINT"):
        pull(NAME)


def test_sizes_that_are_not_known_or_too_large(hub: FakeHub) -> None:
    hub.sizes["model.safetensors"] = None
    with pytest.raises(HubError, match="does not answer as a model hub does"):
        pull(NAME)
    hub.sizes["model.safetensors"] = 50_000_000_001
    with pytest.raises(NotSupportedError, match=r"model\.safetensors has 50000000001 bytes"):
        pull(NAME)


# ---- without a network ---------------------------------------------------------------------------


def test_no_network_and_nothing_in_the_cache(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    url = refusing_url()
    point_to(url, monkeypatch)
    message = rf"cannot reach the hub at {url} \(.*refused\).*org/model is not whole in the"
    with pytest.raises(HubUnreachableError, match=message):
        pull(NAME)


def test_no_network_and_a_copy_in_the_cache(
    hub: FakeHub,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = pull(NAME, progress=False)
    point_to(refusing_url(), monkeypatch)
    assert find_model(NAME) == folder
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(folder) in caplog.text


def test_offline(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = pull(NAME, progress=False)
    hub.requests.clear()
    go_offline(monkeypatch)
    assert find_model(NAME) == folder
    with pytest.raises(HubUnreachableError, match=r"HF_HUB_OFFLINE.*org/other is not whole in the"):
        pull("org/other")
    with pytest.raises(HubUnreachableError, match=r"org/model@v2 is not whole in the cache"):
        pull(f"{NAME}@v2")
    assert hub.requests == [] and caplog.records == []


def test_offline_by_tag_and_by_commit(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos[NAME] = Repo({"x-Q4_K_M.gguf": b"four", "x-Q8_0.gguf": b"eight"})
    names = (f"{NAME}:q4_k_m", f"{NAME}@{hub.repos[NAME].commit}:Q4_K_M")
    found = {pull(name, progress=False) for name in names}
    go_offline(monkeypatch)
    assert {find_model(name) for name in names} == found
    with pytest.raises(HubUnreachableError, match="Q8_0 is not whole in the cache"):
        find_model(f"{NAME}:Q8_0")


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors"])
def test_half_a_copy_is_not_used(lost: str, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    (pull(NAME, progress=False) / lost).unlink()
    go_offline(monkeypatch)
    with pytest.raises(HubUnreachableError, match="is not whole in the cache"):
        pull(NAME)


def test_the_old_commit_serves_until_the_new_one_is_whole(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = pull(NAME, progress=False)
    hub.repos[NAME].files |= {"config.json": b"new", "model.safetensors": WEIGHTS[::-1]}

    def lose_network(plan: PullPlan) -> None:
        assert plan.commit != old.name and len(plan.missing) == 2
        point_to(refusing_url(), monkeypatch)

    assert pull(NAME, progress=False, on_plan=lose_network) == old
    assert held(old) == MODEL
