"""The block pool: what is kept, what goes first, and what must always hold."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replicas.engine.block_pool import BlockPool


def names(text: str) -> list[bytes]:
    """Names of the chain whose blocks are the letters of `text`: each is the whole prefix, as in the real hash."""
    return [text[: i + 1].encode() for i in range(len(text))]


def compute(pool: BlockPool, text: str) -> list[int]:
    """A table for the chain, as a sequence leaves it that reused what is cached and computed the rest."""
    chain_names = names(text)
    num_named = pool.num_named(chain_names)
    table = pool.take(chain_names[:num_named], len(text))
    assert table is not None
    for i in range(num_named, len(text)):
        table[i] = pool.publish(table[i], chain_names[i])
    return table


def gauges(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_cached, pool.num_used


def test_a_released_block_without_a_name_is_free_and_one_with_a_name_is_cached():
    pool = BlockPool(4)
    table = pool.take([], 2)
    pool.publish(table[0], b"a")
    assert gauges(pool) == (2, 0, 2)
    pool.release(table)
    assert gauges(pool) == (3, 1, 0)
    assert table == []


def test_a_freed_block_is_reused_before_a_cached_one_is_evicted():
    pool = BlockPool(3)
    pool.release(compute(pool, "ab"))
    pool.release(pool.take([], 1))
    pool.take([], 1)
    assert pool.names() == {b"a", b"ab"}


def test_the_last_block_of_a_chain_is_evicted_first():
    pool = BlockPool(3)
    pool.release(compute(pool, "abc"))
    pool.take([], 1)
    assert pool.names() == {b"a", b"ab"}
    pool.take([], 1)
    assert pool.names() == {b"a"}


def test_the_least_recently_used_chain_is_evicted_first():
    pool = BlockPool(4)
    pool.release(compute(pool, "ab"))
    pool.release(compute(pool, "xy"))
    pool.release(compute(pool, "ab"))
    pool.take([], 2)
    assert pool.names() == {b"a", b"ab"}


def test_a_shared_block_stays_until_the_last_holder_releases_it():
    pool = BlockPool(4)
    first, second = compute(pool, "ab"), compute(pool, "ac")
    assert first[0] == second[0]
    pool.release(first)
    assert gauges(pool) == (1, 1, 2)
    pool.release(second)
    assert gauges(pool) == (1, 3, 0)


def test_who_computes_a_named_block_again_goes_on_with_the_first_and_the_copy_is_free():
    pool = BlockPool(4)
    first, second = pool.take([], 1), pool.take([], 1)
    kept = pool.publish(first[0], b"a")
    assert pool.publish(second[0], b"a") == kept == first[0]
    second[0] = kept
    assert gauges(pool) == (3, 0, 1)
    pool.release(first)
    pool.release(second)
    assert gauges(pool) == (3, 1, 0)


def test_a_table_that_does_not_fit_changes_nothing():
    pool = BlockPool(4)
    pool.release(compute(pool, "ab"))
    held = pool.take([], 1)
    assert pool.take(names("ab"), 4) is None
    assert pool.take(names("ab"), 3, num_spare=1) is None
    assert gauges(pool) == (1, 2, 1)
    table = pool.take(names("ab"), 3)
    assert len({*held, *table}) == 4


def test_sharing_a_cached_prefix_protects_it_from_the_eviction_that_the_rest_needs():
    pool = BlockPool(3)
    pool.release(compute(pool, "abc"))
    table = pool.take(names("ab"), 3)
    assert pool.names() == {b"a", b"ab"}
    assert len(set(table)) == 3


def test_growing_fails_only_when_every_block_is_used():
    pool = BlockPool(2)
    pool.release(compute(pool, "a"))
    table = pool.take([], 1)
    assert pool.grow(table)
    assert not pool.grow(table)
    assert len(table) == 2


def test_clearing_forgets_what_is_cached_and_keeps_what_is_used():
    pool = BlockPool(4)
    held = compute(pool, "a")
    pool.release(compute(pool, "ab"))
    pool.clear()
    assert pool.names() == {b"a"}
    assert gauges(pool) == (3, 0, 1)
    pool.release(held)


def test_changes_are_reported_once():
    pool = BlockPool(2)
    pool.release(compute(pool, "a"))
    assert pool.pop_changes().stored == (b"a",)
    pool.clear()
    changes = pool.pop_changes()
    assert (changes.stored, changes.removed) == ((), (b"a",))
    assert pool.pop_changes().removed == ()


def test_a_name_that_came_and_went_between_two_reports_is_in_neither_list():
    pool = BlockPool(2)
    pool.release(compute(pool, "a"))
    pool.clear()
    assert pool.pop_changes() == pool.pop_changes()


def test_a_name_that_went_and_came_back_between_two_reports_is_in_neither_list():
    pool = BlockPool(2)
    pool.release(compute(pool, "a"))
    pool.pop_changes()
    pool.clear()
    pool.release(compute(pool, "a"))
    changes = pool.pop_changes()
    assert (changes.stored, changes.removed) == ((), ())


def test_releasing_a_block_twice_is_noticed():
    pool = BlockPool(2)
    table = pool.take([], 1)
    pool.release(list(table))
    with pytest.raises(AssertionError, match="twice"):
        pool.release(table)


class PoolMachine(RuleBasedStateMachine):
    """Sequences over few letters and a small pool, so that they share, collide and evict all the time."""

    @initialize(num_blocks=st.integers(4, 12))
    def begin(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.tables: list[list[int]] = []
        self.texts: list[str] = []
        self.num_computed: list[int] = []
        self.content: dict[int, bytes] = {}  # what a device would have in each block
        self.mirror: set[bytes] = set()

    @rule(text=st.text("xyz", min_size=1, max_size=6))
    def add(self, text: str) -> None:
        num_named = self.pool.num_named(names(text))
        table = self.pool.take(names(text)[:num_named], len(text))
        if table is None:
            assert len(text) - num_named > self.pool.num_free
            return
        assert [self.content[block] for block in table[:num_named]] == names(text)[:num_named]
        self.tables.append(table)
        self.texts.append(text)
        self.num_computed.append(num_named)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def compute_a_block(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.tables) - 1))
        at = self.num_computed[i]
        if at < len(self.texts[i]):
            name, block = names(self.texts[i])[at], self.tables[i][at]
            self.content[block] = name
            self.tables[i][at] = self.pool.publish(block, name)
            self.num_computed[i] += 1

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), letter=st.sampled_from("xyz"))
    def extend(self, data: st.DataObject, letter: str) -> None:
        i = data.draw(st.integers(0, len(self.tables) - 1))
        could = self.pool.num_used < self.pool.num_blocks
        assert self.pool.grow(self.tables[i]) == could
        if could:
            self.texts[i] += letter

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.tables) - 1))
        self.pool.release(self.tables.pop(i))
        del self.texts[i], self.num_computed[i]

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        assert self.pool.num_cached == 0

    @rule()
    def report(self) -> None:
        changes = self.pool.pop_changes()
        assert set(changes.removed) <= self.mirror
        self.mirror -= set(changes.removed)
        assert not set(changes.stored) & self.mirror
        self.mirror |= set(changes.stored)
        assert self.mirror == self.pool.names()

    @invariant()
    def counts_match_the_tables(self) -> None:
        counts = Counter(chain.from_iterable(self.tables))
        assert self.pool._ref_counts == [counts[block] for block in range(self.pool.num_blocks)]
        assert self.pool.num_used == len(counts)
        assert sum(gauges(self.pool)) == self.pool.num_blocks
        assert min(gauges(self.pool)) >= 0

    @invariant()
    def every_named_block_has_its_parent_named(self) -> None:
        assert all(name[:-1] in self.pool.names() for name in self.pool.names() if len(name) > 1)

    @invariant()
    def tables_hold_the_blocks_of_their_chains(self) -> None:
        for table, text, num_computed in zip(self.tables, self.texts, self.num_computed, strict=True):
            assert [self.content[block] for block in table[:num_computed]] == names(text)[:num_computed]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
