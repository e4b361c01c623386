import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.contract import KVEvents
from router.trie import BYTES_PER_ENTRY, BlockTrie

ROOMY = 2**30


def chain(name: str, length: int) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(f"{name}/{depth}".encode()).digest() for depth in range(length))


def trie_of(held: dict[str, tuple[bytes, ...]], max_bytes: int = ROOMY) -> BlockTrie:
    trie = BlockTrie(max_bytes)
    for replica, hashes in held.items():
        trie.replace(replica, hashes)
    return trie


def test_each_holder_is_matched_to_its_own_depth_and_strangers_not_at_all() -> None:
    prompt = chain("p", 20)
    trie = trie_of({"a": prompt[:5], "b": prompt, "c": chain("other", 9)})
    assert trie.match(prompt) == {"a": 5, "b": 20}


def test_an_empty_prompt_matches_nothing() -> None:
    assert trie_of({"a": chain("p", 3)}).match(()) == {}


def test_events_store_remove_and_clear_in_the_order_of_the_contract() -> None:
    prompt = chain("p", 4)
    trie = BlockTrie(ROOMY)
    trie.apply("a", KVEvents(1, stored=prompt))
    trie.apply("a", KVEvents(2, removed=prompt[2:], stored=prompt[2:3]))
    assert trie.match(prompt) == {"a": 3}
    trie.apply("a", KVEvents(3, cleared=True, stored=prompt[:1]))
    assert trie.match(prompt) == {"a": 1}
    assert trie.num_entries == trie.num_blocks_each["a"] == 1


def test_a_snapshot_replaces_all_that_was_known() -> None:
    trie = trie_of({"a": chain("old", 8)})
    trie.replace("a", chain("new", 3))
    assert trie.match(chain("old", 8)) == {}
    assert trie.match(chain("new", 8)) == {"a": 3}
    assert trie.num_entries == 3


def test_a_replica_that_leaves_takes_its_blocks_along_and_its_name_can_be_used_again() -> None:
    """cases MM02"""
    prompt = chain("p", 8)
    trie = trie_of({"a": prompt, "b": prompt[:2]})
    trie.drop("a")
    trie.drop("a")
    assert trie.match(prompt) == {"b": 2}
    assert trie.num_entries == 2
    trie.apply("a", KVEvents(1, stored=prompt[:1]))
    assert trie.match(prompt) == {"b": 2, "a": 1}


def test_beyond_its_bytes_the_largest_replica_gives_up_its_newest_blocks_so_roots_stay() -> None:
    """cases MM02"""
    trie = BlockTrie(100 * BYTES_PER_ENTRY)
    big, small = chain("big", 90), chain("small", 30)
    trie.apply("a", KVEvents(1, stored=big))
    trie.apply("b", KVEvents(1, stored=small))
    assert trie.num_entries == 100
    assert trie.num_trimmed == 20
    assert trie.match(big) == {"a": 70}
    assert trie.match(small) == {"b": 30}


def test_no_stream_of_events_makes_it_outgrow_its_bytes() -> None:
    """cases MM02"""
    trie = BlockTrie(64 * BYTES_PER_ENTRY)
    for step in range(200):
        trie.apply(f"replica{step % 3}", KVEvents(step, stored=chain(f"{step}", 7)))
        assert trie.num_entries == sum(trie.num_blocks_each.values()) <= 64


def test_a_late_joiner_gets_its_share_of_a_full_index() -> None:
    trie = BlockTrie(2000 * BYTES_PER_ENTRY)
    trie.replace("old", chain("old", 5000))
    trie.replace("new", chain("new", 600))
    assert trie.num_entries == 2000
    assert trie.match(chain("new", 600)) == {"new": 600}


depths = st.dictionaries(st.sampled_from([f"replica{i}" for i in range(9)]), st.integers(0, 40))


@given(depths, st.integers(0, 40))
def test_bisection_agrees_with_the_linear_walk_on_closed_caches(held: dict[str, int], length: int) -> None:
    prompt = chain("p", 40)
    trie = trie_of({replica: prompt[:depth] for replica, depth in held.items()})
    expected = {replica: min(depth, length) for replica, depth in held.items() if min(depth, length)}
    assert trie.match(prompt[:length]) == trie.match_linear(prompt[:length]) == expected


@given(st.lists(st.sets(st.integers(0, 24)), max_size=6))
def test_with_gaps_a_match_ends_on_a_held_block_and_is_never_below_the_walk(held: list[set[int]]) -> None:
    prompt = chain("p", 25)
    trie = trie_of({f"replica{i}": tuple(prompt[depth] for depth in sorted(blocks)) for i, blocks in enumerate(held)})
    linear = trie.match_linear(prompt)
    for i, blocks in enumerate(held):
        depth = trie.match(prompt).get(f"replica{i}", 0)
        assert depth >= linear.get(f"replica{i}", 0)
        assert depth == 0 or depth - 1 in blocks


@pytest.mark.parametrize("num_holders", [1, 64])
def test_a_long_prompt_is_matched_with_few_looks(num_holders: int) -> None:
    class Counted(tuple[bytes, ...]):
        looks = 0

        def __getitem__(self, index: int) -> bytes:  # type: ignore[override]
            Counted.looks += 1
            return super().__getitem__(index)

    prompt = chain("p", 750)
    trie = trie_of({f"replica{i}": prompt[:400] for i in range(num_holders)})
    assert set(trie.match(Counted(prompt)).values()) == {400}
    assert Counted.looks <= 1 + 12 + 2 * num_holders
