"""vLLM's KV events and our names: against a model of vLLM's block pool (vllm_pool.py)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.blocks import hash_blocks
from replicas.contract import KVEvents
from replicas.vllm_support.kv_events import KvEventTranslator
from tests.unit.vllm_pool import CLEARED, OTHER_ROOT, ROOT, SALTS_AND_ADAPTERS, Pool, decoded, removed, stored

SIZES = (16, 128)
BLOCKS = [stored([b"%d" % i], range(16 * i, 16 * i + 16)) for i in range(2)]  # each a chain of its own
NAMES = [hash_blocks(ROOT, range(16 * i, 16 * i + 16)) for i in range(2)]


@dataclass
class World:
    """A pool, what of its events is under way, and who holds what because of them."""

    size: int
    pool: Pool = field(init=False)
    translator: KvEventTranslator = field(init=False)
    under_way: deque[list[dict[str, Any]] | None] = field(default_factory=deque)  # None: lost
    answer: bool | None = None  # to the question for a clear, under way
    mirror: set[bytes] = field(default_factory=set)  # what a receiver of KVEvents holds
    num_received: int = 0

    def __post_init__(self) -> None:
        self.pool, self.translator = Pool(self.size, 7), KvEventTranslator(self.size)

    def start(self, salt_and_adapter: tuple[str, str], branch: int, num_blocks: int) -> None:
        """Prompts are branches of one tree, which differ from their third block on."""
        self.pool.start(*salt_and_adapter, [*range(2 * self.size), *[branch] * 2 * self.size][: num_blocks * self.size])

    def step(self, num_blocks: int) -> None:
        published = self.pool.step(num_blocks)
        if published:
            self.under_way.append(published)

    def finish(self, number: int) -> None:
        if self.pool.running:
            self.pool.finish(number % len(self.pool.running))

    def deliver(self) -> None:
        """A loss shows by the number of the batch after it."""
        if all(batch is None for batch in self.under_way):
            return
        while (batch := self.under_way.popleft()) is None:
            self.receive(self.translator.clear())
        self.receive(self.translator.apply(decoded(*batch)))

    def lose(self) -> None:
        if self.under_way:
            self.under_way[0] = None

    def ask(self) -> None:
        if self.answer is None:
            self.translator.ask_clear()
            self.answer = self.pool.reset()

    def hear(self) -> None:
        if self.answer:
            self.receive(self.translator.expect_clear())
        self.answer = None

    def receive(self, events: KVEvents | None) -> None:
        if events is not None:
            self.num_received += 1
            assert events.sequence == self.num_received
            if events.cleared:
                self.mirror.clear()
            assert self.mirror.issuperset(events.removed)
            self.mirror.difference_update(events.removed)
            assert self.mirror.isdisjoint(events.stored)
            self.mirror.update(events.stored)
        assert self.translator.names == self.mirror

    def come_to_rest(self) -> None:
        while self.pool.running:
            self.finish(0)
        self.step(0)
        self.hear()
        for _ in range(len(self.under_way)):
            self.deliver()

    def check(self) -> None:
        """If nothing is under way, everything is known: of clears that vLLM hasn't published because it was told of them."""
        if not self.under_way and self.answer is None and all(event is CLEARED for event in self.pool.events):
            assert self.mirror == set(self.pool.held)
            assert self.translator.num_blocks == len(self.pool.held)

    def check_after_losses(self) -> None:
        """What is held here is held there, though there may be more."""
        if not self.under_way and self.answer is None and not self.pool.events:
            assert self.mirror.issubset(self.pool.held)


STARTS = st.tuples(st.just("start"), st.sampled_from(SALTS_AND_ADAPTERS), st.integers(0, 1), st.integers(2, 4))
STEPS = st.tuples(st.just("step"), st.integers(1, 4))
ENDS = st.tuples(st.just("finish"), st.integers(0, 3))
OTHERS = [st.just((what,)) for what in ("deliver", "ask", "hear")]


def histories(*more: Any) -> Any:
    return st.lists(st.one_of(STARTS, STARTS, STEPS, STEPS, ENDS, ENDS, *OTHERS, *more), min_size=10, max_size=60)


@pytest.mark.parametrize("size", SIZES)
@settings(deadline=None, max_examples=100)
@given(histories())
def test_whatever_happens_in_the_pool_the_names_are_those_it_holds(size, history):
    world = World(size)
    for what, *arguments in history:
        getattr(world, what)(*arguments)
        world.check()
    world.come_to_rest()
    world.check()
    assert world.translator.num_unmapped == 0


@settings(deadline=None, max_examples=100)
@given(histories(st.just(("lose",)), st.just(("lose",))))
def test_after_a_loss_a_clear_makes_the_names_right_again(history):
    world = World(16)
    for what, *arguments in history:
        getattr(world, what)(*arguments)
        world.check_after_losses()
    world.come_to_rest()
    world.check_after_losses()
    for branch in range(3):  # with the first batch a loss shows, whereupon the cache is cleared
        world.start(SALTS_AND_ADAPTERS[0], branch, 4)
        world.step(4)
        world.come_to_rest()
        if branch < 2:
            world.ask()
            world.come_to_rest()
    world.check()
    assert len(world.mirror) == 4


@pytest.mark.parametrize("size", SIZES)
def test_a_block_is_named_by_root_and_tokens_alone(size):
    translator = KvEventTranslator(size)
    tokens = list(range(5 * size))
    names = hash_blocks(ROOT, tokens, size)
    first = stored([b"1", b"2"], tokens[: 2 * size], None, ROOT)
    second = stored([b"3"], tokens[2 * size : 3 * size], b"2", ROOT)
    events = translator.apply(decoded(first, second))
    assert events == KVEvents(1, names[:3])
    assert translator.num_leading(names) == 3
    assert translator.num_leading(hash_blocks(OTHER_ROOT, tokens, size)) == 0


def test_a_name_is_held_as_long_as_one_of_its_blocks_is():
    translator, tokens = KvEventTranslator(16), list(range(16))
    once = stored([b"1"], tokens, None, ROOT)
    assert translator.apply(decoded(once, once)) is not None
    assert translator.apply(decoded(removed(b"1"))) is None
    events = translator.apply(decoded(removed(b"1")))
    assert events is not None
    assert events.removed == hash_blocks(ROOT, tokens)


def test_a_name_is_held_as_long_as_one_of_its_hashes_is():
    """vLLM 0.33 has several for a block under an EAGLE head, by the token that follows; what follows has names by either."""
    translator, names = KvEventTranslator(16), hash_blocks(ROOT, range(32))
    twins = [stored([vllm_hash], range(16)) for vllm_hash in (b"1", b"2")]
    child = stored([b"3"], range(16, 32), b"2")
    assert translator.apply(decoded(*twins, child)) == KVEvents(1, names)
    assert translator.apply(decoded(removed(b"1"))) is None
    assert translator.apply(decoded(removed(b"3", b"2"))) == KVEvents(2, removed=(names[1], names[0]))
    assert (translator.num_blocks, translator.names) == (0, set())


def test_what_comes_and_goes_within_a_batch_is_nothing():
    translator = KvEventTranslator(16)
    assert translator.apply(decoded(stored([b"1"], range(16), None, ROOT), removed(b"1"))) is None


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
    assert translator.apply(decoded(stored([b"1"], range(16), None, ROOT, **fields))) is None
    assert translator.apply(decoded(removed(b"1", medium=fields.get("medium", "GPU")))) is None


def test_only_the_first_group_that_looks_back_at_everything_counts():
    translator = KvEventTranslator(16)
    of = {group: stored([b"1"], range(16), None, ROOT, group_idx=group) for group in (1, 2)}
    assert translator.apply(decoded(of[1], of[2])) is not None
    assert translator.apply(decoded(removed(b"1", group_idx=2))) is None
    assert translator.apply(decoded(removed(b"1", group_idx=1))) is not None


def test_a_group_that_was_not_counted_is_not_counted_when_the_other_is_empty():
    translator = KvEventTranslator(16)
    of = {group: stored([b"1"], range(16), group_idx=group) for group in (1, 2)}
    translator.apply(decoded(of[1], of[2], removed(b"1", group_idx=1)))
    assert translator.apply(decoded(of[2])) is None
    assert translator.apply(decoded(of[1], removed(b"1", group_idx=2))) == KVEvents(1, hash_blocks(ROOT, range(16)))


@pytest.mark.parametrize("kind", ["full_attention", "sink_full_attention", "mla_attention", None])
def test_caches_that_look_back_at_all_tokens_are_prefixes(kind):
    assert KvEventTranslator(16).apply(decoded(stored([b"1"], range(16), kv_cache_spec_kind=kind))) is not None


@pytest.mark.parametrize("token_id", [-1, 1 << 32])
def test_a_batch_with_a_token_that_has_no_name_is_refused_whole(token_id):
    with pytest.raises(msgspec.ValidationError):
        decoded(removed(b"0"), stored([b"1"], [token_id] * 16))


def test_the_batches_of_vllm_0_32_have_fewer_fields():
    """And neither version writes what has its default."""
    event = stored([b"1"], range(16))
    for name in ("lookahead_token_ids", "not_heard_of", "kv_cache_spec_kind", "group_idx"):
        del event[name]
    assert KvEventTranslator(16).apply(decoded(event)) == KVEvents(1, hash_blocks(ROOT, range(16)))


def test_a_block_without_a_known_parent_or_root_has_no_name_and_leaves_without_one():
    translator = KvEventTranslator(16)
    orphan = stored([b"2"], range(16), b"unknown", ROOT)
    foreign = stored([b"3"], range(16), None, ROOT, extra_keys=[["no salt of ours"]])
    assert translator.apply(decoded(orphan, foreign, removed(b"2"), removed(b"3"))) is None
    assert translator.num_unmapped == 2


def test_a_clear_of_nothing_is_nothing():
    assert KvEventTranslator(16).apply(decoded(CLEARED)) is None


class TestClears:
    """[0] is held, [1] another block, and what is told and asked comes before or after what is published."""

    def held(self) -> KvEventTranslator:
        translator = KvEventTranslator(16)
        translator.apply(decoded(BLOCKS[0]))
        return translator

    def test_what_was_held_before_one_in_its_batch_is_gone_with_it(self):
        assert self.held().apply(decoded(removed(b"0"), CLEARED)) == KVEvents(2, cleared=True)

    def test_what_comes_back_after_one_in_its_batch_is_stored(self):
        assert self.held().apply(decoded(BLOCKS[1], CLEARED, BLOCKS[0])) == KVEvents(2, NAMES[0], cleared=True)

    def test_told_before_vllm_publishes_it_what_is_older_is_out_of_date(self):
        translator = self.held()
        translator.ask_clear()
        assert translator.expect_clear() == KVEvents(2, cleared=True)
        assert translator.apply(decoded(BLOCKS[1])) is None
        assert translator.apply(decoded(BLOCKS[1], CLEARED, BLOCKS[0])) == KVEvents(3, NAMES[0])

    def test_told_twice_before_vllm_publishes_the_first_what_is_between_is_out_of_date_too(self):
        translator = self.held()
        for _ in range(2):
            translator.ask_clear()
            translator.expect_clear()
        assert translator.apply(decoded(CLEARED, BLOCKS[1])) is None
        assert translator.apply(decoded(CLEARED, BLOCKS[0])) == KVEvents(3, NAMES[0])

    def test_told_after_vllm_published_it_nothing_is_forgotten(self):
        translator = self.held()
        translator.ask_clear()
        assert translator.apply(decoded(CLEARED, BLOCKS[1])) == KVEvents(2, NAMES[1], cleared=True)
        assert translator.expect_clear() is None
        assert translator.names == set(NAMES[1])

    def test_one_that_was_lost_is_not_waited_for(self):
        translator = self.held()
        translator.ask_clear()
        translator.expect_clear()
        assert translator.clear() is None  # nothing was held any more
        assert translator.apply(decoded(BLOCKS[0])) == KVEvents(3, NAMES[0])

    def test_one_that_was_lost_before_it_was_told_of_is_not_waited_for(self):
        translator = self.held()
        translator.ask_clear()
        assert translator.clear() == KVEvents(2, cleared=True)
        assert translator.expect_clear() is None
        assert translator.apply(decoded(BLOCKS[0])) == KVEvents(3, NAMES[0])

    def test_after_a_loss_the_next_is_told_of_at_once(self):
        translator = self.held()
        translator.clear()
        translator.apply(decoded(CLEARED, BLOCKS[0]))
        translator.ask_clear()
        assert translator.expect_clear() == KVEvents(4, cleared=True)

    def test_a_new_receiver_gets_number_1(self):
        translator = self.held()
        translator.ask_clear()
        translator.expect_clear()
        translator.renumber()
        assert translator.apply(decoded(CLEARED, BLOCKS[0])) == KVEvents(1, NAMES[0])
