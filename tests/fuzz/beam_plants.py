"""Defects in the search with beams and in how it uses sequences; see `plants`."""

from __future__ import annotations

from tests.fuzz.plant import Plant

_BEAMS, _SEARCH = "engine/beams.py", "engine/beam_search.py"
_SCHEDULER = "engine/scheduler.py"

BEAM_PLANTS = (
    Plant(
        "a beam that nothing follows keeps its blocks",
        _BEAMS,
        "                self._drop(beam)",
        "                pass",
    ),
    Plant(
        "beams move on before all have told",
        _BEAMS,
        "if len(group.candidates) == len(request.sequences):",
        "if len(group.candidates) >= len(request.sequences) - 1:",
    ),
    Plant(
        "two continuations of one beam are one sequence",
        _BEAMS,
        "followed.discard(place)",
        "pass",
    ),
    Plant(
        "beams stand in another order than their scores",
        _BEAMS,
        "request.sequences[:] = live",
        "request.sequences[:] = sorted(live, key=lambda s: s.order)",
    ),
    Plant(
        "a beam that has told is computed once more when it was preempted",
        _SCHEDULER,
        "if not has_told:",
        "if True:",
    ),
    Plant(
        "beams that wait for siblings never give way to them",
        _SCHEDULER,
        "            self._preempt(plan, self.running[-1])  # a beam; see above",
        "            pass",
    ),
    Plant(
        "a fork of a parked beam shares the blocks of nobody",
        _SCHEDULER,
        "if parent.status is SequenceStatus.RUNNING and self._num_free_slots() > 0:",
        "if self._num_free_slots() > 0:",
    ),
    Plant(
        "ended candidates of any rank count",
        _SEARCH,
        "if rank < self._width:",
        "if True:",
    ),
    Plant(
        "the length does not count the token that ends the output",
        _SEARCH,
        "math.pow(len(self.tokens), length_penalty)",
        "math.pow(max(1, len(self.tokens) - self.has_ended), length_penalty)",
    ),
    Plant(
        "a search never ends before the last token",
        _SEARCH,
        "if live and self._is_over():",
        "if False:",
    ),
    Plant(
        "as many candidates as beams",
        "sampling_params.py",
        "return max(2, 1 + num_ending_ids) * self.beam_width",
        "return self.beam_width",
    ),
)
