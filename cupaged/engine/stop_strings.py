"""Stop strings in a text that arrives in pieces.

Owns the search and what must be held back for it. It is the automaton of Aho and Corasick (1975):
its state is the longest end of the text that begins a stop string, so a state's depth is exactly
what may not be delivered yet. One step a character, amortised, however many stop strings there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from cupaged.errors import InvalidParameterError

__all__ = ["StopStringMatcher"]


class StopStringMatcher:
    """Cuts a text at the first stop string in it, however the text is split into pieces.

    The first is the one that is complete first, as if the text came character by character and
    generation stopped at once. When several are complete at the same character it is the longest,
    that is the one that starts first. What follows the match is dropped.

    Args:
        stop: strings that end the text; none of them empty.
        include_stop: keep the stop string itself at the end of the text. Nothing is held back
            then, since all of it is delivered anyway.

    Raises:
        InvalidParameterError: a stop string is empty or no string.
    """

    def __init__(self, stop: Sequence[str], *, include_stop: bool = False) -> None:
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise InvalidParameterError("stop", stop, "a list of strings that are not empty")
        self._include_stop = include_stop
        self._matched: str | None = None
        self._held = ""
        self._state = 0
        # Of each state: its edges, the state of its longest proper end, its depth, and the longest
        # stop string that the text ends with there. State 0 is the empty beginning.
        self._edges: list[dict[str, int]] = [{}]
        self._fallbacks = [0]
        self._depths = [0]
        self._matches: list[str | None] = [None]
        for text in stop:
            self._add(text)
        self._link()

    def feed(self, delta: str) -> tuple[str, str | None]:
        """Take the next piece of the text.

        Returns the text that may be delivered, and the stop string that was found, or None. After
        a match there is no more text: every later call returns '' and the same stop string.
        """
        if self._matched is not None:
            return "", self._matched
        if len(self._edges) == 1:
            return delta, None
        edges, fallbacks, matches, state = self._edges, self._fallbacks, self._matches, self._state
        for position, char in enumerate(delta, start=len(self._held) + 1):
            while state and char not in edges[state]:
                state = fallbacks[state]
            state = edges[state].get(char, 0)
            match = matches[state]
            if match is not None:
                return self._cut(position, match, self._held + delta), match
        self._state = state
        text = self._held + delta
        if self._include_stop:
            return text, None
        num_free = max(0, len(text) - self._depths[state])  # less was held where it was skipped
        self._held = text[num_free:]
        return text[:num_free], None

    def skip(self, delta: str) -> None:
        """A piece that is delivered whatever is in it; a stop string may begin in it, not end."""
        for char in delta:
            while self._state and char not in self._edges[self._state]:
                self._state = self._fallbacks[self._state]
            self._state = self._edges[self._state].get(char, 0)

    def flush(self) -> str:
        """The text has ended without a match; returns what was held back."""
        held, self._held = self._held, ""
        self._state = 0
        return held

    def _cut(self, end: int, match: str, text: str) -> str:
        """Remember the match, which ends at `text[end]`; returns what may still be delivered."""
        self._matched, self._held = match, ""
        return text[: end if self._include_stop else max(0, end - len(match))]

    def _add(self, text: str) -> None:
        state = 0
        for char in text:
            following = self._edges[state].get(char)
            if following is None:
                following = len(self._edges)
                self._edges[state][char] = following
                self._edges.append({})
                self._fallbacks.append(0)
                self._depths.append(self._depths[state] + 1)
                self._matches.append(None)
            state = following
        self._matches[state] = text

    def _link(self) -> None:
        """Fill in the fallbacks, nearest states first, as each one needs those above it."""
        waiting = deque(self._edges[0].values())
        while waiting:
            parent = waiting.popleft()
            for char, state in self._edges[parent].items():
                waiting.append(state)
                fallback = self._fallbacks[parent]
                while fallback and char not in self._edges[fallback]:
                    fallback = self._fallbacks[fallback]
                fallback = self._edges[fallback].get(char, 0)
                self._fallbacks[state] = fallback
                if self._matches[state] is None:
                    self._matches[state] = self._matches[fallback]
