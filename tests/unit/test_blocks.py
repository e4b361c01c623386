"""The chained block hash: what a name fixes, and what keeps two tenants apart."""

from __future__ import annotations

import hashlib
import hmac
from array import array
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from replicas.blocks import BLOCK_SIZE, chain_root, hash_block, hash_blocks

ROOT = chain_root(b"secret", model_revision="r1")
token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=5 * BLOCK_SIZE)
texts = st.text(max_size=6)


@given(token_ids)
def test_the_names_of_all_blocks_are_each_blocks_name_chained(tokens: list[int]) -> None:
    parent, names = ROOT, []
    for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
        parent = hash_block(parent, tokens[start : start + BLOCK_SIZE])
        names.append(parent)
    assert hash_blocks(ROOT, tokens) == tuple(names)


@given(token_ids, st.integers(1, 7))
def test_only_full_blocks_have_names(tokens: list[int], block_size: int) -> None:
    names = hash_blocks(ROOT, tokens, block_size)
    assert len(names) == len(tokens) // block_size
    assert names == hash_blocks(ROOT, tokens[: len(names) * block_size], block_size)
    assert all(len(name) == 32 for name in names)


@given(token_ids, token_ids)
def test_a_prefix_has_the_first_names_of_the_whole(tokens: list[int], more: list[int]) -> None:
    names = hash_blocks(ROOT, tokens)
    assert hash_blocks(ROOT, tokens + more)[: len(names)] == names


@given(st.integers(1, 5), st.integers(0, 10**6), st.integers(1, 2**32 - 1), st.randoms(use_true_random=False))
def test_a_changed_token_changes_its_block_and_every_later_one(
    num_blocks: int, where: int, change: int, random: Random
) -> None:
    """cases NS07: equal names mean equal prefixes, so nobody's changed prompt finds another's blocks."""
    tokens = [random.randrange(2**32) for _ in range(num_blocks * BLOCK_SIZE)]
    where %= len(tokens)
    before = hash_blocks(ROOT, tokens)
    after = hash_blocks(ROOT, [*tokens[:where], tokens[where] ^ change, *tokens[where + 1 :]])
    changed = where // BLOCK_SIZE
    assert before[:changed] == after[:changed]
    assert not set(before[changed:]) & set(after)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=BLOCK_SIZE, max_size=BLOCK_SIZE))
def test_the_kind_of_sequence_does_not_matter(tokens: list[int]) -> None:
    names = hash_blocks(ROOT, tokens)
    assert names == hash_blocks(ROOT, tuple(tokens)) == hash_blocks(ROOT, array("I", tokens))
    assert hash_block(ROOT, tokens) == hash_block(ROOT, array("I", tokens)) == names[0]


def test_a_block_at_another_place_has_another_name() -> None:
    block = list(range(BLOCK_SIZE))
    first, second = hash_blocks(ROOT, block + block)
    assert first != second


@pytest.mark.parametrize("tokens", [[-1] * BLOCK_SIZE, [2**32] * BLOCK_SIZE])
def test_a_token_outside_of_uint32_is_refused_rather_than_wrapped(tokens: list[int]) -> None:
    """cases NS07: wrapping would give two prompts one name."""
    with pytest.raises(OverflowError):
        hash_blocks(ROOT, tokens)
    with pytest.raises(OverflowError):
        hash_block(ROOT, tokens)


@given(st.tuples(st.binary(max_size=6), texts, texts, texts), st.tuples(st.binary(max_size=6), texts, texts, texts))
def test_different_tenants_adapters_revisions_or_secrets_share_no_block(
    one: tuple[bytes, str, str, str], other: tuple[bytes, str, str, str]
) -> None:
    """cases NS06."""
    # HMAC pads short keys with zero bytes: b"" and b"\0" are one key, and a deployment's secret is neither.
    assume((one[0].rstrip(b"\0"), *one[1:]) != (other[0].rstrip(b"\0"), *other[1:]))
    tokens = range(2 * BLOCK_SIZE)
    names = [
        hash_blocks(chain_root(secret, salt=salt, adapter=adapter, model_revision=revision), tokens)
        for secret, salt, adapter, revision in (one, other)
    ]
    assert not set(names[0]) & set(names[1])


@given(texts, texts, texts)
def test_the_same_tenant_shares_its_blocks(salt: str, adapter: str, revision: str) -> None:
    """cases NS06: the other half of the pair. Isolation that shares nothing at all would be no prefix cache."""
    roots = {chain_root(b"secret", salt=salt, adapter=adapter, model_revision=revision) for _ in range(2)}
    assert len(roots) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"salt": "ab"}, {"salt": "a", "adapter": "b"}),
        ({"salt": "a"}, {"adapter": "a"}),
        ({"adapter": "a"}, {"model_revision": "a"}),
        ({"salt": "a\x00\x00\x00\x00"}, {"salt": "a"}),
        ({"salt": "\x01\x00\x00\x00a"}, {"salt": "", "adapter": "a"}),
        ({"salt": "é"}, {"salt": "e\u0301"}),
    ],
)
def test_text_that_moves_over_a_field_boundary_makes_another_root(one: dict[str, str], other: dict[str, str]) -> None:
    """cases NS07."""
    assert chain_root(b"secret", **one) != chain_root(b"secret", **other)


def test_names_are_the_documented_ones_so_that_processes_and_versions_agree() -> None:
    """cases NS07: SHA-256 under a secret; no hash() that changes from process to process, no hash that collides."""
    empty = (0).to_bytes(4, "little")
    root = hmac.new(b"secret", empty + empty + (2).to_bytes(4, "little") + b"r1", hashlib.sha256).digest()
    assert root == ROOT
    tokens = range(BLOCK_SIZE)
    encoded = b"".join(token.to_bytes(4, "little") for token in tokens)
    assert hash_block(ROOT, tokens) == hashlib.sha256(ROOT + encoded).digest()
