"""A small model of vLLM's block pool (vllm/v1/core/block_pool.py), and its events as they are on the wire."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from replicas.blocks import chain_root, hash_blocks
from replicas.vllm_support.kv_events import Event, batch_decoder

SALTS_AND_ADAPTERS = (("a", ""), ("b", ""), ("a", "0" * 64))  # the name of the adapter looks like a root
ROOTS = {each: chain_root(b"secret", salt=each[0], adapter=each[1]) for each in SALTS_AND_ADAPTERS}
ROOT, OTHER_ROOT = ROOTS["a", ""], ROOTS["b", ""]


def stored(
    hashes: Sequence[bytes],
    tokens: Sequence[int],
    parent: bytes | None = None,
    root: bytes = ROOT,
    adapter: str = "",
    **fields: Any,
) -> dict[str, Any]:
    """As vLLM 0.33 publishes it: 0.32 has no `lookahead_token_ids`, and neither has one that nobody knows yet."""
    keys = [adapter] if adapter else []
    first = [*keys, root.hex()] if parent is None else keys
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": len(tokens) // len(hashes),
        "lora_id": 1 if adapter else None,
        "medium": "GPU",
        "lora_name": adapter or None,
        "extra_keys": [first or None, *([keys or None] * (len(hashes) - 1))],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "lookahead_token_ids": [[1]],
        "not_heard_of": 1,
        **fields,
    }


def removed(*hashes: bytes, **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", "group_idx": 0, **fields}


CLEARED = {"type": "AllBlocksCleared"}


def decoded(*events: dict[str, Any]) -> list[Event]:
    """Through vLLM's encoding: a batch is an array, its events are maps."""
    return batch_decoder.decode(msgspec.msgpack.encode([1.5, list(events), 0])).events


@dataclass(eq=False)
class Block:
    """A physical one."""

    vllm_hash: bytes | None = None  # None: computed by nobody yet, or forgotten
    name: bytes = b""
    num_users: int = 0


@dataclass(eq=False)
class Running:
    adapter: str
    root: bytes
    tokens: list[int]
    hashes: list[bytes]
    names: Sequence[bytes]
    blocks: list[Block]
    num_cached: int


class Pool:
    """Blocks are taken from the front of `free`, and come back to its end, a sequence's last one first."""

    def __init__(self, size: int, num_blocks: int) -> None:
        self.size = size
        self.free = deque(Block() for _ in range(num_blocks))
        self.running: list[Running] = []
        self.events: list[dict[str, Any]] = []
        self._cached: dict[bytes, list[Block]] = {}

    @property
    def held(self) -> list[bytes]:
        """The name of each block that has one."""
        return [block.name for blocks in self._cached.values() for block in blocks]

    def start(self, salt: str, adapter: str, tokens: list[int]) -> None:
        """Looks its blocks up now and shows its own only when they are computed: two that start together have twins."""
        root, size = ROOTS[salt, adapter], self.size
        hashes, parent = [], (salt + "/" + adapter).encode()
        for first in range(0, len(tokens), size):
            parent = hashlib.sha256(parent + repr(tokens[first : first + size]).encode()).digest()
            hashes.append(parent)
        shared: list[Block] = []
        for vllm_hash in hashes[:-1]:
            if vllm_hash not in self._cached:
                break
            shared.append(self._cached[vllm_hash][0])
        if len(self.free) < len(hashes) - sum(1 for block in shared if block.num_users):
            return
        for block in shared:
            if not block.num_users:
                self.free.remove(block)
            block.num_users += 1
        own = [self.free.popleft() for _ in hashes[len(shared) :]]
        for block in own:
            self._evict(block)
            block.num_users = 1
        names = hash_blocks(root, tokens, size)
        self.running.append(Running(adapter, root, tokens, hashes, names, shared + own, len(shared)))

    def step(self, num_blocks: int) -> list[dict[str, Any]]:
        """Computes so many blocks of each sequence. What is published then."""
        for each in self.running:
            first, last = each.num_cached, min(each.num_cached + num_blocks, len(each.blocks))
            if first == last:
                continue
            for index in range(first, last):
                block = each.blocks[index]
                block.vllm_hash, block.name = each.hashes[index], each.names[index]
                self._cached.setdefault(block.vllm_hash, []).append(block)
            tokens = each.tokens[first * self.size : last * self.size]
            parent = each.hashes[first - 1] if first else None
            self.events.append(stored(each.hashes[first:last], tokens, parent, each.root, each.adapter))
            each.num_cached = last
        published, self.events = self.events, []
        return published

    def finish(self, number: int) -> None:
        for block in reversed(self.running.pop(number).blocks):
            block.num_users -= 1
            if not block.num_users and block.vllm_hash is None:
                self.free.appendleft(block)
            elif not block.num_users:
                self.free.append(block)

    def reset(self) -> bool:
        if self.running:
            return False
        self._cached.clear()
        for block in self.free:
            block.vllm_hash = None
        self.events.append(CLEARED)
        return True

    def _evict(self, block: Block) -> None:
        if block.vllm_hash is not None:
            self._cached[block.vllm_hash].remove(block)
            if not self._cached[block.vllm_hash]:
                del self._cached[block.vllm_hash]
            self.events.append(removed(block.vllm_hash))
            block.vllm_hash = None
