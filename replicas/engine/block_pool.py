"""The KV cache's blocks: who holds which, and which are kept because their content may be asked for again. No torch here.

Every block is in exactly one of three states, so free + cached + used == total after each call:

    free    no content                        --take/grow-->  used
    used    in at least one block table       --release---->  cached if it has a name, else free
    cached  in no table, but named            --take------->  used;   --evicted for a fresh block-->  free

A block's name is the chained hash of all tokens up to its end (replicas.blocks). What must hold:

1. One block per name. Who computes a block that another sequence named first goes on with that one (`publish`).
2. Named blocks are closed under "parent": if a block is named, so is the one before it in its chain. For a table holds every
   block of its chain, so a parent's count is never below its child's; tables are released last block first, so a child
   is always nearer to eviction than its parent. Hence a chain's cached part is found by bisection, here and in the router.
3. A block is named only after it was computed: `publish` is called with the results of a step.

All operations are O(1) per block touched, finding a prefix is O(log blocks).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from replicas.blocks import BlockHash


@dataclass(frozen=True, slots=True)
class NameChanges:
    """How the set of named blocks changed. Disjoint: a name that came and went in between is in neither."""

    stored: tuple[BlockHash, ...]
    removed: tuple[BlockHash, ...]


class BlockPool:
    """`num_blocks` blocks, numbered from 0. Not thread-safe: the scheduler's thread owns it."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, num_blocks
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._names: list[BlockHash | None] = [None] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is the warmest in the CPU's cache
        self._cached: OrderedDict[int, BlockHash] = OrderedDict()  # next to be evicted first
        self._block_of: dict[BlockHash, int] = {}  # every named block, used or cached
        self._stored: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    def names(self) -> frozenset[BlockHash]:
        """All named blocks: what a receiver of every change so far believes to be here."""
        return frozenset(self._block_of)

    def num_named(self, chain: Sequence[BlockHash]) -> int:
        """How many of the chain's blocks, from its first, need not be computed."""
        return bisect_left(chain, True, key=lambda name: name not in self._block_of)

    def take(self, prefix: Sequence[BlockHash], num_blocks: int, *, num_spare: int = 0) -> list[int] | None:
        """A table of `num_blocks`: the named blocks `prefix`, shared, then fresh ones, evicting as needed.

        None, and nothing changed, unless `num_spare` blocks would remain that could still be taken.
        """
        table = [self._block_of[name] for name in prefix]
        num_revived = sum(self._ref_counts[block] == 0 for block in table)
        num_fresh = num_blocks - len(table)
        if num_fresh + num_revived + num_spare > len(self._free) + len(self._cached):
            return None
        for block in table:  # before any eviction, which could hit them
            self._share(block)
        table.extend(self._fresh() for _ in range(num_fresh))
        return table

    def grow(self, table: list[int]) -> bool:
        """Append one fresh block to `table`. False, and nothing changed, if every block is used."""
        if not self._free and not self._cached:
            return False
        table.append(self._fresh())
        return True

    def shrink(self, table: list[int], num_blocks: int) -> None:
        """Give up the blocks of `table` beyond `num_blocks`."""
        beyond = table[num_blocks:]
        del table[num_blocks:]
        self.release(beyond)

    def release(self, table: list[int]) -> None:
        """Give up a whole table, leaving it empty; named blocks that nobody else holds stay cached, last one oldest."""
        while table:
            block = table.pop()
            self._ref_counts[block] -= 1
            assert self._ref_counts[block] >= 0, f"block {block} was released twice"
            if self._ref_counts[block] == 0:
                name = self._names[block]
                if name is None:
                    self._free.append(block)
                else:
                    self._cached[block] = name

    def publish(self, block: int, name: BlockHash) -> int:
        """Name a block that was just computed. Returns the block to hold from now on: another, if `name` exists already."""
        assert self._ref_counts[block] == 1, f"block {block} is shared before it has a name"
        assert self._names[block] is None, f"block {block} has a name already"
        holder = self._block_of.get(name)
        if holder is not None:
            self._share(holder)
            self.release([block])
            return holder
        self._names[block] = name
        self._block_of[name] = block
        if name in self._removed:
            del self._removed[name]
        else:
            self._stored[name] = None
        return block

    def clear(self) -> None:
        """Forget every cached block. What tables hold keeps its name."""
        while self._cached:
            self._free.append(self._evict())

    def pop_changes(self) -> NameChanges:
        """What changed since the last call."""
        changes = NameChanges(stored=tuple(self._stored), removed=tuple(self._removed))
        self._stored.clear()
        self._removed.clear()
        return changes

    def _share(self, block: int) -> None:
        if self._ref_counts[block] == 0:
            del self._cached[block]
        self._ref_counts[block] += 1

    def _fresh(self) -> int:
        block = self._free.pop() if self._free else self._evict()
        self._ref_counts[block] = 1
        return block

    def _evict(self) -> int:
        block, name = self._cached.popitem(last=False)
        self._names[block] = None
        del self._block_of[name]
        if name in self._stored:
            del self._stored[name]
        else:
            self._removed[name] = None
        return block
