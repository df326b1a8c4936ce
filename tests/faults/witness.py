"""Watches whether `/readyz` tells the truth: that requests are served while it says so.

It asks `/readyz`, has a request served as any client would, and asks `/readyz` again, all the time.
What it says is wrong if both answers are the same and the request proves the opposite. It is a lie
if that lasts for longer than GRACE_S and for GRACE_LOOKS on end: a supervisor needs a moment to
hear of a death, and a single request may wait for long. On a slow machine looks take longer, too;
in so many of them the supervisor has answered twice as often.
"""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

GRACE_S, GRACE_LOOKS = 1.5, 5
_PAUSE_S = 0.1
_PROBE_S = 2.0
Word = Literal["ready", "not ready", "silence"]


@dataclass(frozen=True, slots=True)
class Look:
    """One look: what was said before and after a request, and whether that was served.

    began, ended: seconds, monotonic.
    """

    began: float
    ended: float
    before: Word
    after: Word
    served: bool

    @property
    def is_wrong(self) -> bool:
        """Said without a doubt, and not so. Who says nothing says nothing wrong."""
        if self.before != self.after or self.before == "silence":
            return False
        return (self.before == "ready") != self.served


class Witness:
    """A context in which a thread looks.

    Args:
        readyz: its URL.
        serve: has a request served; whether that succeeded, after long waiting perhaps.

    resting: who holds it may count requests: none of the witness is under way.
    """

    def __init__(self, readyz: str, serve: Callable[[], bool]) -> None:
        self.looks: list[Look] = []
        self.resting = threading.Lock()
        self._readyz = readyz
        self._serve = serve
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.set()
        self._thread.join()

    def wait_served(self, seconds: float) -> None:
        """Return when a request was served, and `/readyz` said so, from now on."""
        now = time.monotonic()
        while not any(
            look.began > now and look.served and look.before == look.after == "ready"
            for look in self.looks[-2:]
        ):
            assert time.monotonic() < now + seconds, f"not served again: {self.looks[-3:]}"
            time.sleep(0.02)

    def _watch(self) -> None:
        while not self._ending.wait(_PAUSE_S):
            with self.resting:
                began, before = time.monotonic(), probe(self._readyz)
                served = self._serve()
                after = probe(self._readyz)
                self.looks.append(Look(began, time.monotonic(), before, after, served))


@dataclass(frozen=True, slots=True)
class Untruth:
    """Looks on end that were wrong in the same way.

    seconds: from the begin of the first to the end of the last.
    """

    looks: int
    said: Word
    seconds: float

    @property
    def is_lie(self) -> bool:
        """Whether it lasted for longer than it takes to hear of anything."""
        return self.looks >= GRACE_LOOKS and self.seconds > GRACE_S


def untruths(looks: list[Look]) -> list[Untruth]:
    """All of them."""
    runs = (
        [*run] for key, run in groupby(looks, lambda look: (look.is_wrong, look.before)) if key[0]
    )
    return [Untruth(len(run), run[0].before, run[-1].ended - run[0].began) for run in runs]


def probe(url: str) -> Word:
    """What an orchestrator would conclude."""
    try:
        with urllib.request.urlopen(url, timeout=_PROBE_S):
            return "ready"
    except urllib.error.HTTPError as error:
        assert error.code == 503, error
        return "not ready"
    except OSError:
        return "silence"
