"""The campaign's judges find what they are there for: wrong answers, lost requests, lies, leaks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from google.rpc import error_details_pb2, status_pb2

from cupaged.v1 import generation_pb2 as pb
from tests.faults.expected import Answer
from tests.faults.ledger import Ledger, Span
from tests.faults.levels import Level, LevelHistory
from tests.faults.manners import COMPLETE, KILLED_CLIENT, MANNERS, Errand, Manner
from tests.faults.plan import Round, plan_round
from tests.faults.protocols import Wish
from tests.faults.strikes import STRIKES
from tests.faults.task import Ended
from tests.faults.verdict import faults_of
from tests.faults.witness import Look, Untruth, Word, untruths

NOW = Span(10.0, 20.0)
BY_NAME = {manner.name: manner for manner in MANNERS}


def rich(reason: str) -> bytes:
    status = status_pb2.Status()
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason))
    return bytes(status.SerializeToString())


def events(answer: Answer, tokens: int, *ends: int) -> list[bytes]:
    """A stream of so many tokens, and its ends."""
    made = [pb.GenerateStreamResponse(delta=pb.Delta(token_ids=answer.token_ids[:tokens]))]
    reason = pb.FINISH_REASON_LENGTH
    made += [pb.GenerateStreamResponse(finished=pb.Finished(index=i, reason=reason)) for i in ends]
    return [event.SerializeToString() for event in made]


@pytest.fixture
def judge(answers: list[Answer]) -> Callable[..., list[str]]:
    """What the ledger says of one stream of 20 tokens."""

    def judge(
        *statuses: str, manner: Manner = COMPLETE, strike: str = "nothing", times: int = 1,
        started: float = 12.0, **fields: Any,
    ) -> list[str]:  # fmt: skip
        wish = Wish(answers[0], 20, "request-1")
        errand = Errand(1, "v1 GenerateStream", manner, wish, random.Random(0))
        struck = next(each for each in STRIKES if each.name == strike)
        ended = Ended(
            id=1, started=started, ended=started + 1, statuses=[*statuses],
            **{"messages": events(answers[0], 20, 0), **fields},
        )  # fmt: skip
        return Ledger().enter(Round(0, struck, {1: errand}, []), [ended] * times, NOW)

    return judge


def test_a_right_answer(judge: Callable[..., list[str]]) -> None:
    assert judge("OK") == []


def test_statuses(judge: Callable[..., list[str]]) -> None:
    assert "statuses ['OK', 'CLOSED']" in judge("OK", "CLOSED")[0]
    assert "it has no end" in judge("OK", times=0)[0]
    assert "it has 2 ends" in judge("OK", times=2)[0]
    assert "NEVER (allowed: OK)" in judge("NEVER")[0]
    assert judge("OK", times=0, manner=KILLED_CLIENT) == []


def test_answers(judge: Callable[..., list[str]], answers: list[Answer]) -> None:
    mine, other = answers
    for messages, why in (
        (events(other, 20, 0), "not the answer to this prompt"),
        (events(mine, 19, 0), "19 tokens instead of 20"),
        (events(mine, 21, 0), "21 tokens instead of 20"),
        (events(mine, 20), "OK without an end"),
        (events(mine, 20, 0, 0), "1 messages after the end of a sample"),
        (events(mine, 20, 0) + events(mine, 1), "1 messages after the end of a sample"),
        ([], "OK without an answer"),
    ):
        [wrong] = judge("OK", messages=messages)
        assert why in wrong
    cancelled = BY_NAME["cancelled"]
    assert judge("CANCELLED", manner=cancelled, messages=events(mine, 3)) == []
    assert judge("CANCELLED", manner=cancelled, messages=events(other, 3))


def test_what_a_strike_excuses(judge: Callable[..., list[str]]) -> None:
    lost = {"rich": rich("ENGINE_DEAD"), "messages": []}
    assert judge("UNAVAILABLE", strike="engine killed", **lost) == []
    assert judge("UNAVAILABLE", strike="engine killed", started=20.5, **lost)  # it was over
    assert judge("UNAVAILABLE", strike="engine killed", started=8.5, **lost)  # not yet
    assert judge("UNAVAILABLE", strike="engine stopped", **lost)
    assert judge("INTERNAL", strike="engine killed", **lost)
    assert judge("UNAVAILABLE", strike="engine killed", rich=rich("DRAINING"), messages=[])
    assert judge("UNAVAILABLE", strike="full disk", messages=[])
    assert judge("CANCELLED", strike="server ended", messages=[]) == []
    assert judge("CANCELLED", strike="server killed", messages=[])


def test_what_a_draining_server_has_taken_it_may_not_cancel(
    judge: Callable[..., list[str]], answers: list[Answer]
) -> None:
    [wrong] = judge("CANCELLED", strike="server ended", messages=events(answers[0], 3))
    assert wrong.endswith("it was cancelled when the server had taken it")


# ---- the plan ----------------------------------------------------------------------------------


def test_a_round_follows_from_its_seed(answers: list[Answer]) -> None:
    rounds = [plan_round(seed, 3, 60, answers) for seed in (1, 1, 2)]
    assert rounds[0].tasks == rounds[1].tasks != rounds[2].tasks
    assert rounds[0].strike == rounds[1].strike
    assert [*rounds[0].errands] == [*range(180, 240)]
    assert sum(map(len, rounds[0].tasks)) == 60


def test_every_strike_and_manner_has_its_turn(answers: list[Answer]) -> None:
    deck = [plan_round(5, number, 60, answers) for number in range(len(STRIKES))]
    assert {round_.strike.name for round_ in deck} == {strike.name for strike in STRIKES}
    drawn = {errand.manner.name for round_ in deck for errand in round_.errands.values()}
    assert drawn == {manner.name for manner in (*MANNERS, KILLED_CLIENT)}


# ---- readiness ---------------------------------------------------------------------------------


def looks(*found: tuple[Word, Word, bool]) -> list[Look]:
    """A second each."""
    return [Look(i, i + 1, *each) for i, each in enumerate(found)]


READY_LIE: tuple[Word, Word, bool] = ("ready", "ready", False)
TRUE: tuple[Word, Word, bool] = ("ready", "ready", True)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([TRUE] * 3, []),
        ([("not ready", "not ready", False)] * 3, []),
        ([("silence", "silence", True), ("silence", "silence", False)], []),
        ([("ready", "not ready", False), ("not ready", "ready", True)], []),
        ([TRUE, READY_LIE, TRUE], [Untruth(1, "ready", 1)]),
        ([READY_LIE] * 5, [Untruth(5, "ready", 5)]),
        ([("not ready", "not ready", True)] * 2, [Untruth(2, "not ready", 2)]),
        ([READY_LIE, ("ready", "not ready", False), READY_LIE], [Untruth(1, "ready", 1)] * 2),
    ],
)
def test_untruths(found: list[tuple[Word, Word, bool]], expected: list[Untruth]) -> None:
    assert untruths(looks(*found)) == expected


def test_lies() -> None:
    assert Untruth(5, "ready", 1.6).is_lie
    assert Untruth(50, "not ready", 60.0).is_lie
    assert not Untruth(4, "ready", 60.0).is_lie  # so slow is everything then
    assert not Untruth(50, "ready", 1.5).is_lie  # nobody hears of a death at once


# ---- levels ------------------------------------------------------------------------------------


def test_leaks() -> None:
    history = LevelHistory()
    for round_ in range(8):
        engine = Level(1, 60.0 + 10 * round_, 14)
        front_end = Level(100 + round_ // 2, 70.0 + 30 * (round_ == 3), 28)
        found = {"engine": [engine], "frontend": [front_end]}
        assert history.too_many_descriptors(found) == []
        history.add(found)
    assert history.growth_mb("engine") == 50.0  # from the second to the last but one
    assert history.growth_mb("frontend") == 0.0  # each lived too short to tell
    [wrong] = history.too_many_descriptors({"engine": [Level(9, 60.0, 21)], "supervisor": []})
    assert wrong == "engine 9 has 21 descriptors, earlier 14"


# ---- the whole campaign ------------------------------------------------------------------------


def outcomes(*found: str) -> dict[str, Any]:
    return {"count": len(found), "outcomes": dict.fromkeys(found, 1)}


@pytest.fixture
def report() -> dict[str, Any]:
    """Of a campaign of 15 rounds in which everything was right."""
    struck = {strike.name: outcomes("OK") for strike in STRIKES}
    for name in ("engine killed", "engine ended", "engine without memory"):
        struck[name] = outcomes("OK", "UNAVAILABLE ENGINE_DEAD")
    for name in ("front end killed", "front end without memory", "server killed"):
        struck[name] = outcomes("OK", "UNAVAILABLE")
    struck["server ended"] = outcomes("UNAVAILABLE DRAINING")
    asked = {manner.name: outcomes("OK") for manner in (*MANNERS, KILLED_CLIENT)}
    asked["client killed"] = outcomes("KILLED")
    asked["cancelled"] = outcomes("CANCELLED")
    asked["past its deadline"] = outcomes("OK", "DEADLINE_EXCEEDED")
    asked["stalled reader"] = outcomes("ABORTED SLOW_CONSUMER")
    return {
        "wrong": [],
        "rounds": 15,
        "readyz": {"canaries_served": 15},
        "faults_of_the_server": struck,
        "faults_of_clients": asked,
        "levels": {"engine": {"growth_mb": 23.9, "peak_mb": 399.0}},
    }


def test_a_right_campaign(report: dict[str, Any]) -> None:
    assert faults_of(report) == []


@pytest.mark.parametrize(
    ("where", "value", "fault"),
    [
        (("wrong",), ["round 3 (nothing): it was so"], "round 3 (nothing): it was so"),
        (("rounds",), 16, "only 15 canaries were served in 16 rounds"),
        (("faults_of_the_server",), {}, "strike 'clock set back' came to nobody"),
        (("faults_of_the_server", "a flood"), outcomes("OK"), "strike 'a flood' is not known"),
        (
            ("faults_of_the_server", "engine killed"),
            outcomes("OK", "UNAVAILABLE"),
            "strike 'engine killed' never ended in UNAVAILABLE ENGINE_DEAD: "
            "{'OK': 1, 'UNAVAILABLE': 1}",
        ),
        (
            ("faults_of_the_server", "server ended"),
            outcomes("OK"),
            "strike 'server ended' never ended in UNAVAILABLE or UNAVAILABLE DRAINING: {'OK': 1}",
        ),
        (
            ("faults_of_clients", "stalled reader"),
            outcomes("OK", "UNAVAILABLE"),
            "manner 'stalled reader' never ended in ABORTED SLOW_CONSUMER: "
            "{'OK': 1, 'UNAVAILABLE': 1}",
        ),
        (
            ("levels", "engine"),
            {"growth_mb": 24.0, "peak_mb": 99.0},
            "engine grows by 24.0 MB: {'growth_mb': 24.0, 'peak_mb': 99.0}",
        ),
        (
            ("levels", "engine"),
            {"growth_mb": 0.0, "peak_mb": 400.0},
            "engine had 400.0 MB: {'growth_mb': 0.0, 'peak_mb': 400.0}",
        ),
    ],
)
def test_faults_of_a_campaign(
    report: dict[str, Any], where: tuple[str, ...], value: Any, fault: str
) -> None:
    *path, last = where
    inner = report
    for name in path:
        inner = inner[name]
    inner[last] = value
    assert fault in faults_of(report)
