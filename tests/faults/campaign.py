"""A fault campaign: rounds of requests in every manner, with a strike at the server in each.

    python -m tests.faults.campaign SEED [--rounds N] [--size N] [--only ROUND]

runs one and prints what came of it as JSON; `--only` runs one round of it again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from cupaged.v1 import generation_pb2_grpc
from tests.faults.client import Client
from tests.faults.clock import ShiftedClock
from tests.faults.expected import expected_answers
from tests.faults.ledger import Ledger, Span
from tests.faults.levels import LevelHistory, levels
from tests.faults.manners import MAX_TOKENS
from tests.faults.plan import CLIENTS, Round, plan_round
from tests.faults.server import TOKEN, FaultyServer
from tests.faults.task import Begun, Ended, Order
from tests.faults.witness import GRACE_S, Witness, untruths
from tests.server.asking import request, tokens
from tests.server.watched_server import total
from tests.tiny_models import TINIER, write_hf_folder

_PROMPTS = 16
_STRUCK_AT = 0.25  # of the requests of a round have begun, when the strike comes
_ROUND_S = 240.0  # a round that takes longer hangs
_BACK_S = 120.0  # until requests are served again
_CANARY_S = 60.0
_SHOWN_CHARS = 3000
_SETTLED_S = 60.0  # until the last connection is closed
_COUNTED_S = 60.0  # until all ends are counted
_LOST_S = 3.0  # until all are counted that ever will be, when a front end has died
_CANARY_TOKENS = 2


class Campaign:
    """A context in which a server runs, and is started again when a strike has ended it.

    Args:
        folder: empty; its path is short, as a socket's address has to fit.
        seed, size: see `plan_round`.
        say: gets a line a round.
    """

    def __init__(
        self, folder: Path, seed: int, size: int, say: Callable[[str], None] = print
    ) -> None:
        self._folder = folder
        self._seed = seed
        self._size = size
        self._say = say
        self._model = str(write_hf_folder(folder / "tiny", TINIER))
        self._answers = expected_answers(
            self._model, number=_PROMPTS, num_tokens=MAX_TOKENS, seed=seed
        )
        self.ledger = Ledger()
        self.history = LevelHistory()
        self.wrong: list[str] = []
        self.lives = 0
        self.num_looks = 0
        self.num_served = 0
        self.longest_untruth_s = 0.0
        self.lost = 0  # requests that died with their front end, before it could count them
        self._lost = 0  # those of the present server
        self._ended_log = ""  # of the server that ended last

    def __enter__(self) -> Campaign:
        with ExitStack() as stack:
            self._clock = ShiftedClock(self._folder)
            stack.callback(self._clock.close)
            self._clients = [stack.enter_context(Client()) for _ in range(CLIENTS)]
            self._life = stack.enter_context(ExitStack())
            self._start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run_round(self, number: int) -> None:
        """Send its requests, strike, and look at everything when it is over."""
        round_ = plan_round(self._seed, number, self._size, self._answers)
        try:
            wrong = self._run(round_)
        except AssertionError as error:
            where = f"round {number} ({round_.strike.name})"
            log = self._server.read_log()[-_SHOWN_CHARS:]
            self._say(f"{where}: the server's log ends so:\n{log}")
            raise AssertionError(f"{where}: {error}") from error
        self.wrong += wrong
        if wrong:
            log = self._ended_log if round_.strike.ends_server else self._server.read_log()
            self._say("\n".join([*wrong, log[-_SHOWN_CHARS:]]))

    def _run(self, round_: Round) -> list[str]:
        began = time.monotonic()
        sending = _Sending(round_, self._clients, self._server)
        ended, span = sending.run()
        self.ledger.by_strike[round_.strike.name] += sending.own_outcomes
        if round_.strike.ends_server:
            self._end()
            self._start()
        self._witness.wait_served(_BACK_S)
        span = Span(span.began, time.monotonic())
        wrong = self.ledger.enter(round_, ended, span)
        self._server.wait_idle()
        wrong += self._check_counts(round_)
        wrong += self._check_levels()
        name, seconds = round_.strike.name, time.monotonic() - began
        self._say(f"round {round_.number:3} {seconds:5.1f} s  {name}: {len(wrong)} wrong")
        return [f"round {round_.number} ({name}): {each}" for each in wrong]

    def report(self) -> dict[str, Any]:
        """Everything, for a file; call it after the end."""
        return {
            "seed": self._seed,
            "requests": sum(self.ledger.protocols.values()),
            "protocols": dict(sorted(self.ledger.protocols.items())),
            "faults_of_clients": _counts(self.ledger.by_manner),
            "faults_of_the_server": _counts(self.ledger.by_strike),
            "servers_started": self.lives,
            "readyz": {
                "looks": self.num_looks,
                "canaries_served": self.num_served,
                "longest_untruth_s": round(self.longest_untruth_s, 2),
                "grace_s": GRACE_S,
            },
            "uncounted_requests_of_dead_front_ends": self.lost,
            "levels": self.history.summary(),
            "wrong": self.wrong,
        }

    # ---- the life of a server ------------------------------------------------------------------

    def _start(self) -> None:
        self.lives += 1
        self._lost = 0
        folder = self._folder / str(self.lives)
        folder.mkdir()
        self._server = self._life.enter_context(FaultyServer(folder, self._model, self._clock))
        readyz = self._server.metrics_url.replace("/metrics", "/readyz")
        self._witness = self._life.enter_context(Witness(readyz, self._serve_canary))
        self._witness.wait_served(_BACK_S)

    def _end(self) -> None:
        self._ended_log = self._server.read_log()
        self._life.close()
        looks = self._witness.looks
        self.num_looks += len(looks)
        self.num_served += sum(look.served for look in looks)
        for found in untruths(looks):
            self.longest_untruth_s = max(self.longest_untruth_s, found.seconds)
            if found.is_lie:
                self.wrong.append(f"server {self.lives}: /readyz was wrong: {found}")

    def finish(self) -> None:
        """End the server as an orchestrator would; nothing of it is left."""
        self._server.terminate()
        assert self._server.end() == 0, self._server.read_log()[-2000:]
        self._server.check_gone()
        self._end()

    def _serve_canary(self) -> bool:
        """Over a connection of its own."""
        answer = self._answers[0]
        message = request(answer.prompt, stopping=tokens(_CANARY_TOKENS))
        metadata = (("authorization", f"Bearer {TOKEN}"),)
        with self._server.open_channel() as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            try:
                got = stub.Generate(message, timeout=_CANARY_S, metadata=metadata)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    self.wrong.append(f"server {self.lives}: a canary hung for {_CANARY_S} s")
                return False
        return answer.token_ids[:_CANARY_TOKENS] == (*got.samples[0].token_ids,)

    def _check_counts(self, round_: Round) -> list[str]:
        """The server has counted one end for every request, but for those of dead front ends."""
        may_be_lost = self._size if round_.strike.ends_front_end else 0
        deadline = time.monotonic() + (_LOST_S if may_be_lost else _COUNTED_S)
        with self._witness.resting:
            while (missing := self._num_missing()) != self._lost and time.monotonic() < deadline:
                time.sleep(0.1)
        new = missing - self._lost
        self._lost = missing
        self.lost += new
        return [] if 0 <= new <= may_be_lost else [f"{new} requests have no end in the metrics"]

    def _check_levels(self) -> list[str]:
        """Descriptors are back at their level, perhaps after a moment."""
        deadline = time.monotonic() + _SETTLED_S
        while wrong := self.history.too_many_descriptors(found := levels(self._server)):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        self.history.add(found)
        return wrong

    def _num_missing(self) -> int:
        samples = self._server.metrics()
        received, succeeded, failed = (
            int(total(samples, f"request_{name}_total"))
            for name in ("received", "success", "failed")
        )
        return received - succeeded - failed


@dataclass
class _Sending:
    """The requests of a round on their way."""

    round: Round
    clients: list[Client]
    server: FaultyServer
    own_outcomes: Counter[str] = field(default_factory=Counter)  # of requests of the strike
    _ended: list[Ended] = field(default_factory=list)
    _begun: set[int] = field(default_factory=set)
    _is_over: set[int] = field(default_factory=set)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def run(self) -> tuple[list[Ended], Span]:
        """Return when all requests have ended, and the strike has been undone."""
        doomed = {task.id for task in self.round.tasks[-1]}
        most = int(_STRUCK_AT * len(self.round.errands))
        with Client() as victim:
            readers = [
                threading.Thread(target=self._read, args=(client, tasks))
                for client, tasks in zip([*self.clients, victim], self.round.tasks, strict=True)
            ]
            for reader in readers:
                reader.start()
            self._wait(lambda: len(self._begun | self._is_over) >= most)
            began = time.monotonic()
            self.own_outcomes = self.round.strike.strike(self.server)
            span = Span(began, time.monotonic())
            self._wait(lambda: doomed <= self._begun | self._is_over)
            victim.kill()
            for reader in readers:
                reader.join(_ROUND_S)
                assert not reader.is_alive(), f"round {self.round.number} does not end"
        return self._ended, span

    def _read(self, client: Client, tasks: list[Any]) -> None:
        http = self.server.metrics_url.removeprefix("http://").removesuffix("/metrics")
        client.begin(Order(self.server.address, http, tasks))
        for word in client.words():
            with self._changed:
                if isinstance(word, Begun):
                    self._begun.add(word.id)
                else:
                    self._ended.append(word)
                    self._is_over.add(word.id)
                self._changed.notify_all()
        with self._changed:  # also of a process that has died; then the ledger misses their ends
            self._is_over |= {task.id for task in tasks}
            self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            has_come = self._changed.wait_for(condition, _ROUND_S)
            told = f"{len(self._begun)} have begun, {len(self._is_over)} ended"
            assert has_come, f"the requests do not begin: {told} of {len(self.round.errands)}"


def _counts(found: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {"count": outcomes.total(), "outcomes": dict(outcomes.most_common())}
        for name, outcomes in sorted(found.items())
    }


def run(seed: int, rounds: range, size: int, say: Callable[[str], None] = print) -> dict[str, Any]:
    """A whole campaign."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        with Campaign(Path(name), seed, size, say) as campaign:
            for number in rounds:
                campaign.run_round(number)
            campaign.finish()
        seconds = round(time.monotonic() - began, 1)
        return {**campaign.report(), "rounds": len(rounds), "seconds": seconds}


def main() -> int:
    """Run one; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--size", type=int, default=48)
    parser.add_argument("--only", type=int, nargs="*")
    given = parser.parse_args()
    rounds = range(given.rounds) if given.only is None else given.only
    report = run(given.seed, rounds, given.size)
    print(json.dumps(report, indent=2))
    return int(bool(report["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
