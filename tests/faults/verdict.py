"""What a whole campaign has to have found; everything that is not so, in a line each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.faults.levels import MARGIN_MB
from tests.faults.manners import KILLED, KILLED_CLIENT, MANNERS
from tests.faults.strikes import STRIKES

MAX_MB = 400.0  # whatever readers stall and however long texts are; without work it is 80
_ENGINE_DIED = ("UNAVAILABLE ENGINE_DEAD",)
_NOBODY_THERE = ("UNAVAILABLE",)
# Faults that show: without one of these outcomes they would have missed.
_STRIKES_SHOW = {
    "engine killed": _ENGINE_DIED,
    "engine ended": _ENGINE_DIED,
    "engine without memory": _ENGINE_DIED,
    "front end killed": _NOBODY_THERE,
    "front end without memory": _NOBODY_THERE,
    "server killed": _NOBODY_THERE,
    "server ended": ("UNAVAILABLE", "UNAVAILABLE DRAINING"),
}
_MANNERS_SHOW = {
    "client killed": (KILLED,),
    "cancelled": ("CANCELLED",),
    "past its deadline": ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED DEADLINE_EXCEEDED"),
    "stalled reader": ("ABORTED SLOW_CONSUMER",),
}


def faults_of(found: dict[str, Any]) -> list[str]:
    """Of the report of a campaign in which every strike had its turn: what is wrong or missing."""
    wrong = [*found["wrong"]]
    served, rounds = found["readyz"]["canaries_served"], found["rounds"]
    if served < rounds:
        wrong.append(f"only {served} canaries were served in {rounds} rounds")
    struck, asked = found["faults_of_the_server"], found["faults_of_clients"]
    wrong += _unmet("strike", struck, {strike.name for strike in STRIKES}, _STRIKES_SHOW)
    manners = {manner.name for manner in (*MANNERS, KILLED_CLIENT)}
    wrong += _unmet("manner", asked, manners, _MANNERS_SHOW)
    for role, levels in found["levels"].items():
        if levels["growth_mb"] >= MARGIN_MB:
            wrong.append(f"{role} grows by {levels['growth_mb']} MB: {levels}")
        if levels["peak_mb"] >= MAX_MB:
            wrong.append(f"{role} had {levels['peak_mb']} MB: {levels}")
    return wrong


def _unmet(
    kind: str, seen: dict[str, Any], names: set[str], shows: Mapping[str, tuple[str, ...]]
) -> list[str]:
    """Those that no request met, those that are not known, and those that did not show."""
    wrong = [f"{kind} {name!r} came to nobody" for name in sorted(names - seen.keys())]
    wrong += [f"{kind} {name!r} is not known" for name in sorted(seen.keys() - names)]
    for name, outcomes in shows.items():
        had = seen.get(name, {"outcomes": {}})["outcomes"]
        if name in seen and not any(outcome in had for outcome in outcomes):
            wrong.append(f"{kind} {name!r} never ended in {' or '.join(outcomes)}: {had}")
    return wrong
