"""Who holds which prefix: for each replica the names of the KV blocks it has, fed exactly by its own KV events.

A block's name fixes the whole prefix up to it (replicas.blocks), so the trie needs no nodes and no edges: it is a set of
names per replica, and a prompt is the list of its blocks' names. Engines keep their caches closed (a block is cached only
while its parent is), so what a replica holds of a prompt is a leading run, whose length a bisection finds:

    prompt's blocks   h0 h1 h2 h3 h4 h5 h6 h7
    replica a         ## ## ## ## ## .. .. ..   -> 5
    replica b         ## ## ## ## ## ## ## ##   -> 8, one look at h7
    replica c         .. .. .. .. .. .. .. ..   -> not a holder, one look at h0

A set per replica rather than one map from block to holders: an event of thousands of blocks is one C call, a snapshot
replaces a set, and a replica that leaves takes its set along; in one map each of those walks every entry on the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from replicas.blocks import BlockHash
from replicas.contract import KVEvents

# A 32-byte bytes object (80 bytes) and its share of a dict, which is between 1/4 and full: 30 to 120 bytes, 60 on average.
# infra/bench/bench_router.py measures it.
BYTES_PER_ENTRY = 160

# How many entries one replica gives up before the next largest is looked for.
_TRIM_CHUNK = 1024


class BlockTrie:
    """Block names of each replica, at most `max_bytes` (estimated with BYTES_PER_ENTRY) in all.

    Beyond the bound the replica with the most entries gives up its *newest*. Nothing here is stale (the engine says what it
    evicts), so age is no reason to forget a block; and the oldest ones are the roots that most prompts share. A block that is
    missing here only makes a match shorter than the truth, never longer: a held name proves the whole prefix below it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_entries = max(1, max_bytes // BYTES_PER_ENTRY)
        self._held: dict[str, dict[BlockHash, None]] = {}  # dicts, not sets: the order of arrival says what is newest
        self._num_blocks: dict[str, int] = {}
        self._num_entries = 0
        self.num_trimmed = 0  # entries given up because of the bound, ever

    @property
    def num_entries(self) -> int:
        """(replica, block) pairs now."""
        return self._num_entries

    @property
    def num_blocks_each(self) -> Mapping[str, int]:
        """Blocks indexed for each replica that has any. A live view, to be read only."""
        return self._num_blocks

    def replace(self, replica: str, hashes: Iterable[BlockHash]) -> None:
        """Take a snapshot: parents before children, as far as the sender can tell, so that a trim takes leaves first."""
        self._held[replica] = dict.fromkeys(hashes)
        self._recount(replica)
        self._trim()

    def apply(self, replica: str, events: KVEvents) -> None:
        """Take one step's changes. Order and gaps are the caller's business (router.core)."""
        held = self._held.setdefault(replica, {})
        if events.cleared:
            held.clear()
        for name in events.removed:
            held.pop(name, None)
        held.update(dict.fromkeys(events.stored))
        self._recount(replica)
        self._trim()

    def drop(self, replica: str) -> None:
        """Forget a replica and all it held. Idempotent."""
        self._held.pop(replica, None)
        self._recount(replica)

    def match(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        """Number of leading blocks of the prompt that each replica holds; replicas with none are left out.

        Where a replica's names are not closed (trimmed here, or an engine's fault) the result n still ends on a held block
        and is never below `match_linear`'s, so it never promises more than a closed engine has.
        """
        if not hashes:
            return {}
        first = hashes[0]
        depth = len(hashes)  # holders of one prompt often hold equally much: the last one's depth is the first guess
        found = {}
        for replica, held in self._held.items():
            if first in held:
                found[replica] = depth = _held_depth(hashes, held, depth)
        return found

    def match_linear(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        """The plain twin of `match`: walk until the first block that is missing."""
        found = {}
        for replica, held in self._held.items():
            depth = 0
            while depth < len(hashes) and hashes[depth] in held:
                depth += 1
            if depth:
                found[replica] = depth
        return found

    def _recount(self, replica: str) -> None:
        self._num_entries -= self._num_blocks.pop(replica, 0)
        if held := self._held.get(replica):
            self._num_blocks[replica] = len(held)
            self._num_entries += len(held)

    def _trim(self) -> None:
        while (excess := self._num_entries - self._max_entries) > 0:
            largest = max(self._num_blocks, key=self._num_blocks.__getitem__)
            held = self._held[largest]
            num_dropped = min(excess, _TRIM_CHUNK, len(held))
            for _ in range(num_dropped):
                held.popitem()
            self._recount(largest)
            self.num_trimmed += num_dropped


def _held_depth(hashes: Sequence[BlockHash], held: Mapping[BlockHash, None], guess: int) -> int:
    """Bisect for n with hashes[n-1] held and hashes[n] not (or n == len(hashes)). hashes[0] is held, 1 <= guess <= len."""
    low, high = 1, len(hashes)
    if hashes[guess - 1] not in held:
        high = guess - 1
    elif guess == high or hashes[guess] not in held:
        return guess
    else:
        low = guess + 1
    while low < high:
        middle = (low + high + 1) // 2
        if hashes[middle - 1] in held:
            low = middle
        else:
            high = middle - 1
    return low
