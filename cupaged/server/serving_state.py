"""What the supervisor knows about the server at one moment, for probes and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Phase = Literal["loading", "ready", "draining", "dead"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True, slots=True)
class ServingState:
    """The supervisor replaces the whole object at every change, so that threads read one moment.

    phase, reason, restarting: as in the `state` message to the children; the reason says why the
        engine is dead.
    num_listening: front ends that could serve at least once since they were started.
    silent: the engine runs, and has said nothing for a minute.
    forced: a second signal came, and the children are being killed.
    """

    phase: Phase = "loading"
    reason: str = ""
    restarting: bool = False
    num_listening: int = 0
    silent: bool = False
    forced: bool = False

    def why_not_live(self) -> str | None:
        """Why the whole server should be started again; None while it need not."""
        if self.forced:
            return "a second signal has forced the end"
        if self.phase == "dead" and not self.restarting:
            return f"the engine is dead: {self.reason or 'no reason is known'}"
        return None

    def why_not_ready(self) -> str | None:
        """Why no requests should be sent now; None when they may be."""
        if (dead := self.why_not_live()) is not None:
            return dead
        if self.phase == "loading":
            return "the model is being loaded"
        if self.phase == "draining":
            return "the server is draining"
        if self.phase == "dead":
            return f"the engine is being restarted: {self.reason or 'no reason is known'}"
        if self.num_listening < 1:
            return "no front end is listening"
        if self.silent:
            return "the engine does not answer"
        return None
