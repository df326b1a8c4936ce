"""The number of BLAS threads: what was asked for, what the environment says, or what is fastest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from cupaged.ops import blas

MANY = 4


@pytest.fixture(autouse=True)
def threads_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in blas._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with threadpool_limits(limits=2, user_api="blas"):
        yield


def in_force() -> int:
    return max(int(p["num_threads"]) for p in threadpool_info() if p["user_api"] == "blas")


@pytest.mark.parametrize("asked", [1, 3])
def test_what_was_asked_for(asked: int) -> None:
    assert blas.use_threads(asked, 2) == asked == in_force()


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(blas, "_products_per_second", lambda: pytest.fail("no trial is needed"))
    assert blas.use_threads(None, MANY) == 2 == in_force()
    assert blas.use_threads(1, MANY) == 1  # but what was asked for counts more


@pytest.mark.parametrize(
    ("rates", "fastest"),
    [({4: 9.0, 2: 5.0, 1: 3.0}, 4), ({4: 0.4, 2: 5.0, 1: 3.0}, 2), ({4: 0.4, 2: 0.5, 1: 3.0}, 1)],
)
def test_a_trial_finds_the_fastest(
    rates: dict[int, float], fastest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blas, "_products_per_second", lambda: rates[in_force()])
    assert blas.use_threads(None, MANY) == fastest == in_force()


def test_one_core_is_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_products_per_second", lambda: {1: 1.0}[in_force()])
    assert blas.use_threads(None, 1) == 1


def test_the_trial_measures() -> None:
    assert blas._products_per_second() > 1
