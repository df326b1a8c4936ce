"""Names of full blocks: a chain of hashes over all that a block's content depends on.

A name is the sha256 of the name of the block before it, the block's own tokens, and what else its
content depends on. Equal names mean equal tokens from the first one on. They live as long as the
process.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import sha256

from cupaged.request import Extra, Sequence

NO_PARENT = bytes(32)  # stands before the first block
TOKEN_BYTES = array("i").itemsize


def hash_block(parent: bytes, tokens: bytes | bytearray, extras: Iterable[Extra] = ()) -> bytes:
    """Name of a full block, 32 bytes.

    Args:
        parent: name of the block before it; `NO_PARENT` for the first.
        tokens: its tokens as int32.
        extras: (kind, value) of what else its content depends on. The names of later blocks
            depend on those of the first.
    """
    data = parent + tokens
    for kind, value in extras:
        for text in (kind, value):
            body = text.encode("utf-8", "surrogatepass")
            data += len(body).to_bytes(4, "little") + body
    return sha256(data).digest()


def name_block(sequence: Sequence, index: int, block_size: int) -> bytes:
    """Name of a sequence's full block; names are computed once, those before it first."""
    names = sequence.block_names
    while len(names) <= index:
        i = len(names)
        tokens = tokens_of_blocks(sequence, i, i + 1, block_size)
        if names:
            name = hash_block(names[-1], tokens)
        else:
            name = hash_block(NO_PARENT, tokens, sequence.request.cache_extras)
        names.append(name)
    return names[index]


def tokens_of_blocks(sequence: Sequence, first: int, stop: int, block_size: int) -> bytearray:
    """Of a sequence's full blocks [first, stop), as int32. Packed once a sequence."""
    packed, size = sequence.packed_tokens, block_size * TOKEN_BYTES
    if len(packed) < stop * size:
        num_packed = len(packed) // TOKEN_BYTES
        packed += array("i", sequence.token_ids[num_packed : stop * block_size]).tobytes()
    return packed[first * size : stop * size]
