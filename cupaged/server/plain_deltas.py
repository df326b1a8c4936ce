"""The bytes of deltas that are nothing but text and token ids: most messages of most streams.

Text and ids of a token say all that the message of that token alone can hold, so such messages are
made once and kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from cupaged.v1 import generation_pb2 as pb

_MAX_KEPT = 2**16  # messages of about 100 bytes with all that belongs to them


class PlainDeltas:
    """Makes messages for all requests of a front end.

    Args:
        max_kept: most messages that are kept.
    """

    def __init__(self, max_kept: int = _MAX_KEPT) -> None:
        self._max_kept = max_kept
        self._kept: dict[int, tuple[str, bytes]] = {}  # by token id, of sample 0
        self._response = pb.GenerateStreamResponse()  # filled again and again
        self._delta = self._response.delta

    def encode(self, index: int, text: str, token_ids: Sequence[int]) -> bytes:
        """The bytes of a delta of sample `index`."""
        if index or len(token_ids) != 1:
            return self._encode(index, text, token_ids)
        token_id = token_ids[0]
        kept = self._kept.get(token_id)
        if kept is not None and kept[0] == text:
            return kept[1]
        data = self._encode(index, text, token_ids)
        if kept is not None or len(self._kept) < self._max_kept:
            self._kept[token_id] = text, data
        return data

    def _encode(self, index: int, text: str, token_ids: Sequence[int]) -> bytes:
        delta = self._delta
        delta.index = index
        delta.text = text
        del delta.token_ids[:]
        delta.token_ids.extend(token_ids)
        return self._response.SerializeToString()
