"""What came of each request, and whether that was allowed: exactly one status, the right answer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from google.rpc import error_details_pb2, status_pb2

from tests.faults.manners import COMPLETE, HTTP, IN_STREAM, KILLED, Errand
from tests.faults.plan import Round
from tests.faults.protocols import PROTOCOLS, Heard
from tests.faults.task import Ended


@dataclass(frozen=True, slots=True)
class Span:
    """When a strike and its consequences lasted, seconds, monotonic."""

    began: float
    over: float

    def meets(self, ended: Ended) -> bool:
        """Whether a request was under way at any moment of it."""
        return ended.started <= self.over and ended.ended >= self.began


@dataclass
class Ledger:
    """All requests of a campaign.

    by_manner, by_strike: outcomes of all requests; of those that met a strike. protocols: requests
    of each.
    """

    by_manner: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    by_strike: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    protocols: Counter[str] = field(default_factory=Counter)

    def enter(self, round_: Round, ended: Iterable[Ended], span: Span) -> list[str]:
        """Enter a round; returns what was not right, each with its request."""
        found: dict[int, list[Ended]] = defaultdict(list)
        for each in ended:
            found[each.id].append(each)
        wrong = [f"request {id_} was never sent" for id_ in found if id_ not in round_.errands]
        for id_, errand in round_.errands.items():
            try:
                self._enter(errand, found[id_], round_, span)
            except AssertionError as error:
                wrong.append(f"request {id_}, {errand.protocol}, {errand.manner.name}: {error}")
        return wrong

    def _enter(self, errand: Errand, ends: list[Ended], round_: Round, span: Span) -> None:
        self.protocols[errand.protocol] += 1
        outcomes = self.by_manner[errand.manner.name]
        if not ends:
            outcomes[KILLED] += 1
            assert KILLED in errand.manner.allowed, "it has no end"
            return
        assert len(ends) == 1, f"it has {len(ends)} ends"
        ended = ends[0]
        has_met = span.meets(ended)
        heard = Heard()
        if errand.protocol != HTTP:
            heard = PROTOCOLS[errand.protocol].read(ended.messages)
        outcome = outcome_of(ended, heard)
        outcomes[outcome] += 1
        if has_met:
            self.by_strike[round_.strike.name][outcome] += 1
        assert len(ended.statuses) == 1, f"statuses {ended.statuses}"
        allowed = [*errand.manner.allowed, *(round_.strike.also if has_met else ())]
        assert any(fnmatchcase(outcome, each) for each in allowed), (
            f"{outcome} (allowed: {', '.join(allowed)}): {ended.details} {heard.errors}"
        )
        if outcome == "CANCELLED" and errand.manner.name != "cancelled":
            assert not ended.messages, "it was cancelled when the server had taken it"
        if errand.manner.name != "wrong message":
            check_answer(errand, outcome, heard)


def outcome_of(ended: Ended, heard: Heard) -> str:
    """The status, with the reason that the server gave."""
    status = " and ".join(ended.statuses)
    if heard.errors:
        return IN_STREAM if status == "OK" else status
    info = error_details_pb2.ErrorInfo()
    reasons = [
        info.reason
        for detail in status_pb2.Status.FromString(ended.rich).details
        if detail.Unpack(info)
    ]
    return " ".join([status, *reasons])


def check_answer(errand: Errand, outcome: str, heard: Heard) -> None:
    """No token of anybody else, no second end, and all of it where the status is OK."""
    answer, sought = errand.wish.answer, errand.wish.num_tokens
    assert not heard.late, f"{heard.late} messages after the end of a sample"
    for sample in heard.samples.values():
        assert len(sample.ends) <= 1, f"ends {sample.ends}"
        told = f"{sample.token_ids} {sample.text!r}"
        # What is streamed to a stalled reader is longer than the longest answer that is known.
        known = sample.token_ids[: len(answer.token_ids)]
        text = sample.text if len(known) == len(sample.token_ids) else ""
        assert answer.begins_with(known, text), f"not the answer to this prompt: {told}"
    if outcome != "OK" or errand.protocol == HTTP:
        return
    assert heard.samples, "OK without an answer"
    for sample in heard.samples.values():
        assert len(sample.ends) == 1, "OK without an end"
    if errand.manner is COMPLETE:
        [sample] = heard.samples.values()
        if errand.protocol.startswith("KServe"):
            assert sample.text, "OK without a text"
        else:
            got = len(sample.token_ids)
            assert got == sought, f"{got} tokens instead of {sought}"
