"""A radix tree of cached prefixes: RadixAttention's (Zheng et al., SGLang, arXiv 2312.07104).

An edge of the tree is a run of full blocks, compared by their tokens; below the top, a salt and
whatever else KV depends on is part of the key. A sequence holds a path from the top down: whoever
computed a block that is in the tree already holds the tree's block in its place. So all blocks of a
node have the same holders, a node is evictable or not as a whole, and nothing here happens once a
block: a prompt is one insertion, what was generated after it another one. Like all strategies it
never touches reference counts and block tables: those are the block manager's.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Set

import numpy as np
from numpy.typing import NDArray

from cupaged.engine.block_names import NO_PARENT, TOKEN_BYTES, hash_block, tokens_of_blocks
from cupaged.engine.prefix_cache import Exchange, StoringCache
from cupaged.request import Extra
from cupaged.request import Sequence as TokenSequence

Key = tuple[bytes | Extra, ...]  # tokens of a node's first block; at the top also the extras


class RadixNode:
    """A run of blocks that follow one another, and what follows them.

    Blocks [start, start + len(blocks)) of every sequence that has `tokens` there. These are the
    tokens of its blocks alone, as int32: a tree takes memory for its blocks, however long the
    prompts are, and a long run is compared at the speed of memory. `names` are `block_names` of the
    first blocks, as far as they were needed.
    """

    __slots__ = ("blocks", "children", "key", "names", "parent", "start", "tokens")

    def __init__(
        self, parent: RadixNode | None, key: Key, tokens: bytearray, start: int, blocks: list[int]
    ) -> None:
        self.parent = parent
        self.key = key
        self.tokens = tokens
        self.start = start
        self.blocks = blocks
        self.names: list[bytes] = []
        self.children: dict[Key, RadixNode] = {}

    @property
    def extras(self) -> list[Extra]:
        """What else the content depends on; of a node at the top."""
        return [part for part in self.key if isinstance(part, tuple)]


class RadixCache(StoringCache):
    """The tree, and its unreferenced nodes in the order of their last use.

    A sequence gives its path back from the end, so that no node stands in that order before what
    stands on it: the first one is always a leaf, and its last blocks are evicted first.

    Args:
        num_evicted_at_once: blocks of one leaf that `evict` gives, if it has so many. More than one
            saves time where every block that is taken has to be evicted before.
    """

    def __init__(self, block_size: int, num_evicted_at_once: int = 1) -> None:
        super().__init__(block_size)
        self.num_evictable_blocks = 0
        self._num_evicted_at_once = num_evicted_at_once
        self._block_bytes = block_size * TOKEN_BYTES
        self._top = RadixNode(None, (), bytearray(), 0, [])
        self._node_at: dict[int, RadixNode] = {}  # by the first block of each node
        self._evictable: OrderedDict[RadixNode, None] = OrderedDict()  # least recently used first

    def find(self, sequence: TokenSequence) -> list[int]:
        """One look into a dictionary and one comparison of tokens a node; changes nothing."""
        node = self._top.children.get(self._key(sequence, 0))
        if node is None or not sequence.request.uses_prefix_cache:
            return []
        blocks: list[int] = []
        stop = sequence.num_skippable_tokens // self._block_size
        while node is not None and len(blocks) < stop:
            num_equal = self._num_equal(node, sequence, stop)
            blocks += node.blocks[:num_equal]
            if num_equal < len(node.blocks):
                break
            node = node.children.get(self._key(sequence, len(blocks)))
        return blocks

    def hold(self, blocks: list[int]) -> None:
        """Their nodes are not evictable any more. The last one is split where they end."""
        rest = len(blocks)
        for node in list(self._path(blocks)):
            if rest < len(node.blocks):
                self._split(node, rest)
                break
            if node in self._evictable:
                del self._evictable[node]
                self.num_evictable_blocks -= len(node.blocks)
            rest -= len(node.blocks)

    def _insert(
        self,
        sequence: TokenSequence,
        blocks: list[int],
        first: int,
        stop: int,
        ref_counts: NDArray[np.int32],
    ) -> list[Exchange]:
        node = self._top
        if first:
            *_, node = node, *self._path(blocks[:first])
            if node.start + len(node.blocks) != first:
                return []  # what it stands on was forgotten, or could not be stored
            if node.blocks and not node.children and ref_counts.item(node.blocks[-1]) == 1:
                node.tokens += self._tokens(sequence, first, stop)
                node.blocks += blocks[first:stop]
                return []
        exchanges: list[Exchange] = []
        i = first
        while i < stop:
            key = self._key(sequence, i)
            child = node.children.get(key)
            if child is None:
                if exchanges and ref_counts.item(blocks[i]) > 1:
                    break  # a sibling has this block, too, but not what it would stand on
                alone = len(sequence.request.sequences) == 1
                end = stop if alone else i + 1
                child = RadixNode(node, key, self._tokens(sequence, i, end), i, blocks[i:end])
                node.children[key] = self._node_at[blocks[i]] = child
            elif child.blocks[0] != blocks[i]:
                num_equal = self._num_equal(child, sequence, stop)
                exchanges += zip(range(i, i + num_equal), child.blocks, strict=False)
                if num_equal < len(child.blocks):
                    child = self._split(child, num_equal)
            i += len(child.blocks)
            node = child
        return exchanges

    def forget(self, blocks: list[int]) -> list[int]:
        """With all that stands on them. Blocks that are not in the tree are passed over."""
        node = self._node_at.get(blocks[0]) if blocks else None
        if node is None:
            return []
        assert node.parent is self._top, "a sequence does not begin at the top"
        del self._top.children[node.key]
        freed: list[int] = []
        nodes = [node]
        for node in nodes:
            nodes += node.children.values()
            del self._node_at[node.blocks[0]]
            if node in self._evictable:
                del self._evictable[node]
                freed += node.blocks
        self.num_evictable_blocks -= len(freed)
        return freed

    def retire(self, blocks: list[int]) -> list[int]:
        """Keep those in the tree, as the most recently used, the end of the path first."""
        nodes: list[RadixNode] = []
        while blocks and (node := self._node_at.get(blocks[-1])) is not None:
            nodes.append(node)
            self.num_evictable_blocks += len(node.blocks)
            blocks = blocks[: -len(node.blocks)]
        for node in reversed(nodes):
            self._evictable[node] = None
        return blocks

    def withdraw(self, blocks: Set[int]) -> list[int]:
        """Whole nodes, each from its end, and what stands on others before these."""
        nodes = [node for node in self._evictable if node.blocks[0] in blocks]
        for node in nodes:
            del self._evictable[node]
            self.num_evictable_blocks -= len(node.blocks)
        return [block for node in nodes for block in reversed(node.blocks)]

    def evict(self, names: list[bytes] | None = None) -> list[int]:
        """The end of the leaf that was used least recently."""
        node = next(iter(self._evictable))
        assert not node.children, "a block would be evicted before what stands on it"
        evicted = node.blocks[: -self._num_evicted_at_once - 1 : -1]
        self.num_evictable_blocks -= len(evicted)
        if names is not None:
            names += self._names(node)[: -len(evicted) - 1 : -1]
        if len(evicted) < len(node.blocks):
            del node.blocks[-len(evicted) :]
            del node.names[len(node.blocks) :]
            del node.tokens[len(node.blocks) * self._block_bytes :]
        else:
            del self._evictable[node]
            del self._node_at[node.blocks[0]]
            assert node.parent is not None
            del node.parent.children[node.key]
        return evicted

    def reset(self) -> list[int]:
        """The counts of tokens go on."""
        blocks = [block for node in self._evictable for block in node.blocks]
        self._top.children.clear()
        self._node_at.clear()
        self._evictable.clear()
        self.num_evictable_blocks = 0
        return blocks

    def _tokens(self, sequence: TokenSequence, first: int, stop: int) -> bytearray:
        """Of a sequence's full blocks [first, stop)."""
        return tokens_of_blocks(sequence, first, stop, self._block_size)

    def _key(self, sequence: TokenSequence, index: int) -> Key:
        """Of the child that begins with a sequence's block."""
        key: Key = (bytes(self._tokens(sequence, index, index + 1)),)
        return key if index else key + sequence.request.cache_extras

    def _names(self, node: RadixNode) -> list[bytes]:
        """Of all blocks of a node. They are computed once, those of what it stands on first."""
        size, unnamed, last = self._block_bytes, [], node
        while len(last.names) < len(last.blocks):
            unnamed.append(last)
            assert last.parent is not None
            last = last.parent
        for each in reversed(unnamed):
            for i in range(len(each.names), len(each.blocks)):
                before = each.names or last.names
                parent = before[-1] if before else NO_PARENT
                tokens = each.tokens[i * size : (i + 1) * size]
                each.names.append(hash_block(parent, tokens, () if before else each.extras))
            last = each
        return node.names

    def _num_equal(self, node: RadixNode, sequence: TokenSequence, stop: int) -> int:
        """Blocks of a node that a sequence begins with, too: its key is equal, so at least one.

        Looks at blocks before `stop`. Bisects where not all are equal.
        """
        theirs, size = node.tokens, self._block_bytes
        most = min(len(node.blocks), stop - node.start)
        ours = self._tokens(sequence, node.start, node.start + most)
        low, high, middle = 1, most, most
        while low < high:
            a, b = low * size, middle * size
            if ours[a:b] == theirs[a:b]:
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        return low

    def _split(self, node: RadixNode, num_blocks: int) -> RadixNode:
        """Cut a node in two: a new one of its first blocks, not evictable, and itself below."""
        size, parent = self._block_bytes, node.parent
        assert parent is not None
        tokens, blocks = node.tokens[: num_blocks * size], node.blocks[:num_blocks]
        head = RadixNode(parent, node.key, tokens, node.start, blocks)
        parent.children[node.key] = self._node_at[head.blocks[0]] = head
        head.names = node.names[:num_blocks]
        del node.blocks[:num_blocks], node.tokens[: num_blocks * size], node.names[:num_blocks]
        node.start += num_blocks
        node.parent = head
        node.key = (bytes(node.tokens[:size]),)
        head.children[node.key] = self._node_at[node.blocks[0]] = node
        if node in self._evictable:
            self.num_evictable_blocks -= num_blocks
        return head

    def _path(self, blocks: list[int]) -> Iterator[RadixNode]:
        """The nodes of blocks that follow one another, up to the first that is not in the tree."""
        i = 0
        while i < len(blocks) and (node := self._node_at.get(blocks[i])) is not None:
            i += len(node.blocks)
            yield node

    def audit(self, ref_counts: NDArray[np.int32], unreferenced: set[int]) -> set[int]:
        """The tree is whole, no block is in it twice, and what is evictable has no holder."""
        nodes = [self._top]
        for node in nodes:
            for key, child in node.children.items():
                assert child.parent is node and child.key == key, "a child has another's place"
                assert child.start == node.start + len(node.blocks), "blocks are left out"
                assert self._node_at[child.blocks[0]] is child, "a node is not found by its block"
                assert key[0] == bytes(child.tokens[: self._block_bytes])
                num_bytes = len(child.blocks) * self._block_bytes
                assert len(child.tokens) == num_bytes, "a node has not the tokens of its blocks"
                assert len(child.names) <= len(child.blocks), "a name of no block"
                nodes.append(child)
        del nodes[0]
        assert len(nodes) == len(self._node_at), "a node is lost"
        blocks = [block for node in nodes for block in node.blocks]
        assert len(blocks) == len(set(blocks)), "a block is in the tree twice"
        for node in nodes:
            assert len(set(ref_counts[node.blocks])) == 1, "blocks of a node have different holders"
        idle = {n for n in nodes if not ref_counts[n.blocks[0]] and n.blocks[0] not in unreferenced}
        assert idle == self._evictable.keys(), "a node is held and evictable, or neither"
        kept = {block for node in idle for block in node.blocks}
        assert len(kept) == self.num_evictable_blocks, "evictable blocks are miscounted"
        seen: set[RadixNode] = set()
        for node in self._evictable:
            assert seen.issuperset(node.children.values()), "a node would go before what is on it"
            seen.add(node)
        return kept

    def audit_sequence(self, sequence: TokenSequence, blocks: list[int]) -> None:
        """What can be found of its blocks is a path from the top, full, and has its tokens."""
        size = self._block_size
        path = list(self._path(blocks))
        if not sequence.request.uses_prefix_cache:
            assert not path, "a block of a request without cache is shared"
        end = 0
        for node in path:
            end = (node.start + len(node.blocks)) * size
            tokens = array("i", sequence.token_ids[node.start * size : end]).tobytes()
            assert node.tokens == tokens, "a block has another's tokens"
        assert end <= sequence.num_computed_tokens, "a block is findable too soon"
        if path:
            top = path[0]
            assert top.parent is self._top, "a path does not begin at the top"
            assert top.key[1:] == sequence.request.cache_extras, "a block of another salt"
        assert not {block for block in blocks if block in self._node_at} - {
            node.blocks[0] for node in path
        }, "a block is in the tree, but not what it stands on"
