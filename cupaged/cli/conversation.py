"""A conversation: what was said so far, and what of it still fits into the context.

It knows no model and no terminal: how many tokens some messages take is told by a function.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from cupaged.cli.streams import StreamError, reason

Message = dict[str, str]


class Conversation:
    """A system message, which is always kept, and turns: a user's message and its answer.

    Args:
        system: what opens the conversation, None for nothing.
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self._turns: list[list[Message]] = []  # one message while it is not answered
        self._dropped: list[list[Message]] = []  # for the turn that has begun
        self._saved_to: Path | None = None

    @property
    def messages(self) -> list[Message]:
        """All of it, as a chat template takes it."""
        opening = [] if self.system is None else [{"role": "system", "content": self.system}]
        return opening + [message for turn in self._turns for message in turn]

    def ask(self, text: str) -> None:
        """Begin a turn."""
        self._turns.append([{"role": "user", "content": text}])

    def answer(self, text: str) -> None:
        """End the turn."""
        self._dropped.clear()
        self._turns[-1].append({"role": "assistant", "content": text})

    def withdraw(self) -> None:
        """Forget the turn that has begun, which could not be answered; have back what it cost."""
        self._turns.pop()
        self._turns[:0] = self._dropped
        self._dropped.clear()

    def reopen(self) -> bool:
        """Take the last answer back; False if there is none."""
        if not self._turns:
            return False
        del self._turns[-1][1:]
        return True

    def reset(self) -> None:
        """Forget all turns."""
        self._turns.clear()

    def make_room(self, num_tokens: Callable[[list[Message]], int], limit: int) -> int:
        """Drop the oldest turns until the rest takes at most `limit` tokens.

        The turn that has begun stays, even if it takes more by itself. Returns how many went.
        """
        while len(self._turns) > 1 and num_tokens(self.messages) > limit:
            self._dropped.append(self._turns.pop(0))
        return len(self._dropped)

    def save(self, path: Path) -> None:
        """Write the messages as JSON, a line that `run-batch` takes.

        A file that is there already stays as it is, unless this conversation was saved to it.

        Raises:
            StreamError: it is there, or cannot be written.
        """
        mode = "w" if path == self._saved_to else "x"
        try:
            with path.open(mode, encoding="utf-8") as file:
                file.write(json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n")
        except FileExistsError:
            raise StreamError(f"{path}: is there already; give another name") from None
        except OSError as error:
            raise StreamError(f"{path}: cannot be written: {reason(error)}") from None
        self._saved_to = path
