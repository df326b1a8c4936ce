"""Requests of beams on running sequences: `BeamSearch` chooses, here its choices become forks.

A beam is a sequence like any other, until it has computed its last token and its candidates are
known: then it has nothing to compute, is passed over by the scheduler, and may lose its blocks and
be parked. When the last live beam of the request has told its candidates, beams that nothing
follows are dropped and give their blocks back, and of what follows one beam the first token goes to
the beam itself and every other to a fork of it, which shares its blocks.
"""

from __future__ import annotations

from collections.abc import Callable

from cupaged.engine.beam_search import BeamSearch, Candidate, candidates_of
from cupaged.engine.runner import FAILED_TOKEN
from cupaged.engine.scheduler import Scheduler
from cupaged.outputs import CoreOutput, FinishReason, TokenLogprobs
from cupaged.request import Request, Sequence, SequenceStatus


class _Group:
    """The search of one request, whose sequences stand in the order of the search's live beams."""

    __slots__ = ("candidates", "search")

    def __init__(self, request: Request) -> None:
        assert request.core.beams is not None
        self.candidates: dict[Sequence, list[Candidate]] = {}
        self.search = BeamSearch(
            request.core.beams, max_tokens=request.max_tokens, ending_ids=request.ending_ids
        )


class BeamGroups:
    """The requests of beams that are unfinished and have computed something.

    Args:
        scheduler: forks sequences and takes them out.
        count_end: called with (arrival, place) and the reason for each output of a request.
    """

    def __init__(
        self, scheduler: Scheduler, count_end: Callable[[tuple[int, int], FinishReason], None]
    ) -> None:
        self._scheduler = scheduler
        self._count_end = count_end
        self._groups: dict[Request, _Group] = {}

    def tell(
        self, beam: Sequence, tokens: list[int], told: list[TokenLogprobs] | None
    ) -> list[CoreOutput]:
        """What may follow a beam; the last of the request's beams to tell moves all of them on.

        A beam that loses its blocks before it has told everything computes, and tells it later.

        Args:
            tokens: what was drawn, of which only a failure matters.
            told: one report on the likeliest tokens.

        Returns:
            The request's outputs when it has ended, else nothing.
        """
        request = beam.request
        if tokens == [FAILED_TOKEN]:
            for sequence in request.sequences:
                self._scheduler.distrust(sequence)
            name, width = request.core.request_id, request.core.params.n
            outputs = [CoreOutput(name, i, [], finish_reason="error") for i in range(width)]
            self._end(request, outputs)
            return outputs
        assert told is not None, "the runner reports nothing"
        group = self._groups.get(request)
        if group is None:
            group = self._groups[request] = _Group(request)
            beam.num_pending_samples = 1  # it was that many so that there is room for all beams
        group.candidates[beam] = candidates_of(told[0])
        if len(group.candidates) == len(request.sequences):
            self._move_on(request, group)
        if group.search.live:
            return []
        outputs = self.outputs(request, "length")
        self._end(request, outputs)
        return outputs

    def outputs(self, request: Request, unended: FinishReason) -> list[CoreOutput]:
        """The best hypotheses of a request, best first, as its samples 0, 1, ...

        Args:
            unended: the finish reason of those that did not end by themselves.
        """
        group = self._groups.get(request)
        hypotheses = [] if group is None else group.search.hypotheses()
        return [
            CoreOutput(
                request.core.request_id,
                place,
                [token.token_id for token in hypothesis.tokens],
                [TokenLogprobs([t.token_id], [t.logprob], [t.rank]) for t in hypothesis.tokens],
                (),
                request.num_preemptions,
                request.num_cached_tokens,
                request.first_scheduled_time,
                "stop" if hypothesis.has_ended else unended,
            )
            for place, hypothesis in enumerate(hypotheses)
        ]

    def forget(self, request: Request) -> None:
        """The request has ended, or is of another kind."""
        self._groups.pop(request, None)

    def _end(self, request: Request, outputs: list[CoreOutput]) -> None:
        for sequence in request.sequences:
            self._drop(sequence)
        for output in outputs:
            assert output.finish_reason is not None
            self._count_end((request.arrival, output.index), output.finish_reason)

    def _drop(self, beam: Sequence) -> None:
        self._scheduler.remove(beam)
        beam.status = SequenceStatus.FINISHED

    def _move_on(self, request: Request, group: _Group) -> None:
        beams, scheduler = request.sequences.copy(), self._scheduler
        chosen = group.search.advance([group.candidates[beam] for beam in beams])
        group.candidates.clear()
        if not chosen:
            return
        followed = {continuation.beam for continuation in chosen}
        for place, beam in enumerate(beams):
            if place not in followed:
                self._drop(beam)
        unused = {*range(len(chosen))} - {beams[place].index for place in followed}
        indices = iter(sorted(unused))
        live = []
        for place, _ in chosen:
            is_first = place in followed
            live.append(beams[place] if is_first else scheduler.branch(beams[place], next(indices)))
            followed.discard(place)
        for beam, (_, token_id) in zip(live, chosen, strict=True):
            beam.append(token_id)
        request.sequences[:] = live
        for beam in sorted(live, key=lambda s: s.order, reverse=True):
            scheduler.resume(beam)
