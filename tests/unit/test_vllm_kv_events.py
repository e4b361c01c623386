"""vLLM's KV events and our names: against a small model of vLLM's block pool (vllm/v1/core/block_pool.py)."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.blocks import chain_root, hash_blocks
from replicas.contract import KVEvents
from replicas.vllm_support.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventTranslator,
    batch_decoder,
)

ROOTS = tuple(chain_root(b"secret", salt=salt) for salt in ("a", "b"))
SIZES = (16, 128)


def stored(hashes: Sequence[bytes], tokens: Sequence[int], parent: bytes | None, root: bytes, **fields: Any) -> dict[str, Any]:
    """As vLLM 0.32 publishes it, with fields that 0.33 added and some that nobody knows."""
    first = ["adapter", root.hex()] if parent is None else ["adapter"]
    size = len(tokens) // len(hashes)
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": size,
        "lora_id": 1,
        "medium": "GPU",
        "lora_name": "adapter",
        "extra_keys": [first, *(["adapter"] for _ in hashes[1:])],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "lookahead_token_ids": [[1]],
        "not_heard_of": 1,
        **fields,
    }


def removed(*hashes: bytes, **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", "group_idx": 0, **fields}


CLEARED = {"type": "AllBlocksCleared"}


def decoded(*events: dict[str, Any]) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
    """Through vLLM's encoding: a batch is an array, its events are maps."""
    return batch_decoder.decode(msgspec.msgpack.encode([1.5, list(events), 0])).events


@dataclass
class Pool:
    """Physical blocks by least recent use; a hash may be in several."""

    size: int
    num_blocks: int
    blocks: OrderedDict[int, tuple[bytes, bytes]] = field(default_factory=OrderedDict)  # number -> vLLM's hash, our name
    events: list[dict[str, Any]] = field(default_factory=list)
    _next: int = 0

    def serve(self, root: bytes, tokens: Sequence[int], *, shares: bool) -> None:
        """Cache a prompt's full blocks; one that doesn't share computes again what is cached, as two at once do."""
        names = hash_blocks(root, tokens, self.size)
        hashes = [hashlib.sha256(b"vllm's own" + name).digest() for name in names]
        num_known = 0
        if shares:
            held = {vllm_hash: number for number, (vllm_hash, _) in self.blocks.items()}
            for vllm_hash in hashes:
                if vllm_hash not in held:
                    break
                num_known += 1
            for vllm_hash in reversed(hashes[:num_known]):  # a chain's beginning is used last
                self.blocks.move_to_end(held[vllm_hash])
        new = list(zip(hashes, names, strict=True))[num_known:][: self.num_blocks]
        if not new:
            return
        while len(self.blocks) + len(new) > self.num_blocks:
            _, (vllm_hash, _) = self.blocks.popitem(last=False)
            self.events.append(removed(vllm_hash))
        numbers = range(self._next, self._next + len(new))
        self._next += len(new)
        for number, block in reversed(list(zip(numbers, new, strict=True))):
            self.blocks[number] = block
        parent = hashes[num_known - 1] if num_known else None
        span = tokens[num_known * self.size : (num_known + len(new)) * self.size]
        self.events.append(stored([vllm_hash for vllm_hash, _ in new], span, parent, root))

    def clear(self) -> None:
        self.blocks.clear()
        self.events.append(CLEARED)

    def take(self) -> list[Any]:
        events, self.events = decoded(*self.events), []
        return events

    @property
    def names(self) -> set[bytes]:
        return {name for _, name in self.blocks.values()}


class Mirror:
    """What a receiver of KVEvents holds."""

    def __init__(self) -> None:
        self.names: set[bytes] = set()
        self._number = 0

    def apply(self, events: KVEvents | None) -> None:
        if events is None:
            return
        self._number += 1
        assert events.sequence == self._number
        if events.cleared:
            self.names.clear()
        assert self.names.issuperset(events.removed)
        self.names.difference_update(events.removed)
        assert self.names.isdisjoint(events.stored)
        self.names.update(events.stored)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("serve"), st.sampled_from(ROOTS), st.integers(0, 3), st.integers(1, 6), st.booleans()),
        st.just(("clear",)),
        st.just(("publish",)),
        st.just(("told of a clear",)),
    ),
    max_size=40,
)


@pytest.mark.parametrize("size", SIZES)
@settings(deadline=None, max_examples=60)
@given(actions)
def test_whatever_happens_in_the_pool_the_names_are_those_it_holds(size, history):
    pool, translator, mirror = Pool(size, 9), KvEventTranslator(size), Mirror()
    for what, *arguments in history:
        if what == "serve":
            root, branch, num_blocks, shares = arguments
            # Branches of one tree: they differ from their third block on.
            pool.serve(root, [*range(2 * size), *[branch] * 4 * size][: num_blocks * size], shares=shares)
        elif what == "clear":
            pool.clear()
        elif what == "told of a clear":
            pool.clear()
            mirror.apply(translator.expect_clear())  # before vLLM publishes it
        if what in ("publish", "serve") and pool.events:
            mirror.apply(translator.apply(pool.take()))
            assert translator.names == pool.names == mirror.names
            assert translator.num_blocks == len(pool.blocks)
    assert translator.num_unmapped == 0


@pytest.mark.parametrize("size", SIZES)
def test_a_block_is_named_by_root_and_tokens_alone(size):
    translator = KvEventTranslator(size)
    tokens = list(range(5 * size))
    names = hash_blocks(ROOTS[0], tokens, size)
    first = stored([b"1", b"2"], tokens[: 2 * size], None, ROOTS[0])
    second = stored([b"3"], tokens[2 * size : 3 * size], b"2", ROOTS[0])
    events = translator.apply(decoded(first, second))
    assert events == KVEvents(1, names[:3])
    assert translator.num_leading(names) == 3
    assert translator.num_leading(hash_blocks(ROOTS[1], tokens, size)) == 0


def test_a_name_is_held_as_long_as_one_of_its_blocks_is():
    translator, tokens = KvEventTranslator(16), list(range(16))
    once = stored([b"1"], tokens, None, ROOTS[0])
    assert translator.apply(decoded(once, once)) is not None
    assert translator.apply(decoded(removed(b"1"))) is None
    events = translator.apply(decoded(removed(b"1")))
    assert events is not None
    assert events.removed == hash_blocks(ROOTS[0], tokens)


def test_what_comes_and_goes_within_a_batch_is_nothing():
    translator = KvEventTranslator(16)
    assert translator.apply(decoded(stored([b"1"], range(16), None, ROOTS[0]), removed(b"1"))) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"medium": "CPU"},
        {"kv_cache_spec_kind": "sliding_window"},
        {"block_size": 8},
        {"token_ids": list(range(8))},
    ],
)
def test_other_caches_and_parts_of_blocks_are_no_prefixes(fields):
    translator = KvEventTranslator(16)
    assert translator.apply(decoded(stored([b"1"], range(16), None, ROOTS[0], **fields))) is None
    assert translator.apply(decoded(removed(b"1", medium=fields.get("medium", "GPU")))) is None


def test_only_the_first_group_that_looks_back_at_everything_counts():
    translator = KvEventTranslator(16)
    of = {group: stored([b"1"], range(16), None, ROOTS[0], group_idx=group) for group in (1, 2)}
    assert translator.apply(decoded(of[1], of[2])) is not None
    assert translator.apply(decoded(removed(b"1", group_idx=2))) is None
    assert translator.apply(decoded(removed(b"1", group_idx=1))) is not None


def test_a_block_without_a_known_parent_or_root_has_no_name_and_leaves_without_one():
    translator = KvEventTranslator(16)
    orphan = stored([b"2"], range(16), b"unknown", ROOTS[0])
    foreign = stored([b"3"], range(16), None, ROOTS[0], extra_keys=[["no salt of ours"]])
    assert translator.apply(decoded(orphan, foreign, removed(b"2"), removed(b"3"))) is None
    assert translator.num_unmapped == 2


class TestClears:
    def held(self) -> KvEventTranslator:
        translator = KvEventTranslator(16)
        translator.apply(decoded(stored([b"1"], range(16), None, ROOTS[0])))
        return translator

    def test_told_before_vllm_publishes_it_what_is_older_is_out_of_date(self):
        translator = self.held()
        told = translator.expect_clear()
        assert told is not None
        assert told.cleared
        late = stored([b"2"], range(16, 32), b"1", ROOTS[0])
        assert translator.apply(decoded(late)) is None
        new = stored([b"1"], range(16), None, ROOTS[0])
        events = translator.apply(decoded(late, CLEARED, new))
        assert events is not None
        assert events.stored == hash_blocks(ROOTS[0], range(16))

    def test_told_after_vllm_published_it_nothing_is_forgotten(self):
        translator = self.held()
        new = stored([b"2"], range(50, 66), None, ROOTS[0])
        events = translator.apply(decoded(CLEARED, new))
        assert events is not None
        assert (events.cleared, events.stored) == (True, hash_blocks(ROOTS[0], range(50, 66)))
        assert translator.expect_clear() is None
        assert translator.names == set(events.stored)

    def test_after_a_loss_it_begins_anew(self):
        translator = self.held()
        translator.expect_clear()
        assert translator.clear() is None  # nothing was held any more
        new = stored([b"1"], range(16), None, ROOTS[0])
        assert translator.apply(decoded(new)) is not None

    def test_a_new_receiver_gets_number_1(self):
        translator = self.held()
        translator.expect_clear()
        translator.renumber()
        events = translator.apply(decoded(CLEARED, stored([b"1"], range(16), None, ROOTS[0])))
        assert events is not None
        assert events.sequence == 1
