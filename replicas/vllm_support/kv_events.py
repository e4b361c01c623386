"""vLLM's KV cache events as ours: which block names came into the prefix cache, and which left it.

vLLM names a block by a hash of its own, over the parent's hash, the tokens and extra keys. An event of a stored run of blocks
tells the parent's hash and the tokens; of a chain's first block also its cache salt, for which we give vLLM the root of our
chain (vllm_support.llm). So our name of every block can be computed, and is kept beside vLLM's for the event that removes it.

vLLM tells of *physical* blocks: two requests that compute the same prompt at the same time fill two blocks with one hash,
which are stored twice and removed twice (vllm/v1/core/block_pool.py, `cache_full_blocks` and `_emit_block_removed_events`).
A name is held as long as one of its blocks is. What else was looked at there, so that the counts are true:

- One name may have several hashes: those of vLLM 0.33 cover, under an EAGLE head, some tokens after the block too, and those of
  an adapter its path. So blocks are counted for each name beside each hash. One hash never has two names, as it covers all
  that a name does.
- `_insert_block_hash` may do nothing, and `move_block_hashes` moves a hash in silence: neither changes how many blocks have it.
- Blocks that are stored without being new are those of `kv_cache_report_mode="full"`, which a request would have to ask for.
- After a loss vLLM holds blocks that aren't counted here, and when one of them is removed it takes one off those stored since.
  So less is held here than there until both are empty, but never more.

No vLLM import: its messages are decoded by these definitions, in which unknown fields (0.33 has some more than 0.32) and
those that we don't need are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Annotated, Any

import msgspec

from replicas.blocks import BlockHash, hash_block
from replicas.contract import KVEvents

# Where a block must lie for a request to use it without a transfer. vLLM says GPU on a CPU as well.
_DEVICE = "GPU"
# A model may have several groups of layers with caches of their own, of which those that look back at all tokens decide how
# long a prefix is. None: vLLM didn't say, so there is one group.
_WHOLE_PREFIX_KINDS = frozenset({None, "full_attention", "sink_full_attention", "mla_attention"})
_ROOT_CHARS = 64

# Others have no name. To refuse them while decoding is to refuse the batch before any of it counts.
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """A run of blocks of one sequence, each of `block_size` of the tokens, after the block `parent_block_hash`."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[_TokenId]
    block_size: int
    medium: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    block_hashes: list[bytes]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """What one step of vLLM's scheduler changed."""

    ts: float
    events: list[Event]


batch_decoder: msgspec.msgpack.Decoder[EventBatch] = msgspec.msgpack.Decoder(EventBatch)


class _Known:
    """A hash of vLLM's: our name of its blocks, and how many there are."""

    __slots__ = ("name", "num_blocks")

    def __init__(self, name: BlockHash) -> None:
        self.name = name
        self.num_blocks = 0


class KvEventTranslator:
    """Turns batches of one vLLM engine into KVEvents, numbered from 1. `num_blocks` physical blocks have a name now;
    `num_unmapped` counts those that came without: their parent isn't known, or they have no root of ours."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._known: dict[bytes, _Known] = {}
        self._num_blocks_of: dict[BlockHash, int] = {}  # physical ones
        self._group_idx: int | None = None
        self._sequence = 0
        self._num_clears_due = 0  # that we were told of, and that vLLM hasn't published yet
        self._is_clear_early = False  # published since it was asked for, and we haven't been told of it yet
        self.num_blocks = 0  # physical ones with a name
        self.num_unmapped = 0

    @property
    def names(self) -> Set[BlockHash]:
        """All that are held now, for reading."""
        return self._num_blocks_of.keys()

    def num_leading(self, names: Iterable[BlockHash]) -> int:
        """How many of a prompt's blocks are held, from its first on."""
        num_held = 0
        for name in names:
            if name not in self._num_blocks_of:
                break
            num_held += 1
        return num_held

    def apply(self, events: Sequence[Event]) -> KVEvents | None:
        """One batch. None if no name came or went."""
        held_before: dict[BlockHash, bool] = {}
        cleared = False
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._is_clear_early = not self._num_clears_due
                self._num_clears_due = max(self._num_clears_due - 1, 0)
                cleared = cleared or bool(self._num_blocks_of) or any(held_before.values())
                self._forget_all()
                held_before = {}
            elif self._num_clears_due:
                continue  # older than a clear that we were told of
            elif isinstance(event, BlockStored):
                self._store(event, held_before)
            else:
                self._remove(event, held_before)
        stored = tuple(name for name, held in held_before.items() if not held and name in self._num_blocks_of)
        removed = tuple(name for name, held in held_before.items() if held and name not in self._num_blocks_of)
        return self._numbered(stored, removed, cleared)

    def clear(self) -> KVEvents | None:
        """Forget all: batches were lost, so what vLLM holds isn't known any more. Nor is which clears it has published, and
        to wait for one that was lost would be to wait for ever."""
        self._num_clears_due = 0
        self._is_clear_early = True
        return self._forget_and_tell()

    def ask_clear(self) -> None:
        """vLLM is about to be asked to empty its cache; `expect_clear` follows if it did."""
        self._is_clear_early = False

    def expect_clear(self) -> KVEvents | None:
        """vLLM answered that its cache is empty. It publishes that with its next step only, and what comes before is out of
        date; or it has come already, because the two ways aren't equally fast."""
        if self._is_clear_early:
            return None
        self._num_clears_due += 1
        return self._forget_and_tell()

    def renumber(self) -> None:
        """The next KVEvents is number 1 again: who gets it has heard nothing before."""
        self._sequence = 0

    def _store(self, event: BlockStored, held_before: dict[BlockHash, bool]) -> None:
        if not self._concerns_us(event):
            return
        parent = self._parent_name(event)
        if parent is None:
            self.num_unmapped += len(event.block_hashes)
            return
        for index, vllm_hash in enumerate(event.block_hashes):
            start = index * self._block_size
            parent = hash_block(parent, event.token_ids[start : start + self._block_size])
            held_before.setdefault(parent, parent in self._num_blocks_of)
            self._known.setdefault(vllm_hash, _Known(parent)).num_blocks += 1
            self._num_blocks_of[parent] = self._num_blocks_of.get(parent, 0) + 1
            self.num_blocks += 1

    def _remove(self, event: BlockRemoved, held_before: dict[BlockHash, bool]) -> None:
        if event.medium not in (None, _DEVICE) or event.group_idx != self._group_idx:
            return
        for vllm_hash in event.block_hashes:
            known = self._known.get(vllm_hash)
            if known is None:
                continue  # one of those that have no name
            name = known.name
            held_before.setdefault(name, True)
            self.num_blocks -= 1
            known.num_blocks -= 1
            if not known.num_blocks:
                del self._known[vllm_hash]
            self._num_blocks_of[name] -= 1
            if not self._num_blocks_of[name]:
                del self._num_blocks_of[name]

    def _concerns_us(self, event: BlockStored) -> bool:
        """Whole blocks on the device, of the first group that looks back at all tokens. vLLM stores the beginnings of blocks
        as well for some models, which no prefix of ours ends in."""
        if event.medium not in (None, _DEVICE) or event.kv_cache_spec_kind not in _WHOLE_PREFIX_KINDS:
            return False
        if event.block_size != self._block_size or len(event.token_ids) != self._block_size * len(event.block_hashes):
            return False
        if self._group_idx is None:  # for good: what the other groups hold wasn't counted, and couldn't be later
            self._group_idx = event.group_idx
        return event.group_idx == self._group_idx

    def _parent_name(self, event: BlockStored) -> BlockHash | None:
        if event.parent_block_hash is not None:
            known = self._known.get(event.parent_block_hash)
            return None if known is None else known.name
        keys = (event.extra_keys or [None])[0] or []
        if event.lora_name is not None:
            keys = keys[1:]  # may look like a root
        return next((root for key in keys if (root := _as_root(key)) is not None), None)

    def _forget_all(self) -> None:
        self._known.clear()
        self._num_blocks_of.clear()
        self.num_blocks = 0

    def _forget_and_tell(self) -> KVEvents | None:
        had_any = bool(self._num_blocks_of)
        self._forget_all()
        return self._numbered((), (), had_any)

    def _numbered(self, stored: tuple[BlockHash, ...], removed: tuple[BlockHash, ...], cleared: bool) -> KVEvents | None:
        if not (stored or removed or cleared):
            return None
        self._sequence += 1
        return KVEvents(self._sequence, stored, removed, cleared)


def _as_root(key: Any) -> BlockHash | None:
    """Among a block's extra keys are places of other media too."""
    if not isinstance(key, str) or len(key) != _ROOT_CHARS:
        return None
    try:
        return bytes.fromhex(key)
    except ValueError:
        return None
