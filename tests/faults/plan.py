"""Which requests and which strikes: all of it follows from a seed, each round on its own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.faults.expected import Answer
from tests.faults.manners import KILLED_CLIENT, MANNERS, Errand, errand
from tests.faults.strikes import STRIKES, Strike
from tests.faults.task import Task

CLIENTS = 2  # that live for the whole campaign; a further one in each round is killed
_DOOMED = 5  # requests of that one
_SPREAD_S = 0.05  # of the begins in a round, for each of its requests


@dataclass(frozen=True)
class Round:
    """What is asked at once, and what happens meanwhile.

    Args:
        errands: by the id of their tasks.
        tasks: of each client; the last one is killed when all of its requests have begun.
    """

    number: int
    strike: Strike
    errands: dict[int, Errand]
    tasks: list[list[Task]]


def plan_round(seed: int, number: int, size: int, answers: Sequence[Answer]) -> Round:
    """One round of a campaign.

    Args:
        size: its requests.
    """
    deck = [*STRIKES]
    random.Random(f"{seed} deck {number // len(deck)}").shuffle(deck)
    draw = random.Random(f"{seed} round {number}")
    weights = [manner.weight for manner in MANNERS]
    manners = [KILLED_CLIENT] * _DOOMED + draw.choices(MANNERS, weights, k=size - _DOOMED)
    errands = {
        id_: errand(id_, manner, answers, draw)
        for id_, manner in enumerate(manners, start=number * size)
    }
    tasks: list[list[Task]] = [[] for _ in range(CLIENTS + 1)]
    for each in errands.values():
        client = CLIENTS if each.manner is KILLED_CLIENT else each.id % CLIENTS
        tasks[client].append(each.task(draw.uniform(0, _SPREAD_S * size)))
    return Round(number, deck[number % len(deck)], errands, tasks)
