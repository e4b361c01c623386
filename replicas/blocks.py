"""The chained hash of a KV block: one definition for the router's trie and the engine's prefix cache.

A full block of BLOCK_SIZE tokens is named by SHA-256(parent name || token ids as little-endian uint32). The root of a
chain is HMAC-SHA256(deployment secret, salt, adapter, model revision), so that
- the name of a block fixes the whole prefix up to it (two equal names mean two equal prefixes);
- tenants with different salts, adapters or model revisions never share a block (cases NS06, NS07);
- nobody outside the deployment can forge or search for a name: the secret is shared by ingresses and engines only.
Source of the scheme: vLLM V1's prefix caching design; GHSA-rm76-4mrf-v9r8 for why the hash must resist collisions.
"""

from __future__ import annotations

import hashlib
import hmac
from array import array
from collections.abc import Sequence

BLOCK_SIZE = 16
BlockHash = bytes  # 32 bytes

_TOKEN_BYTES = 4
assert array("I").itemsize == _TOKEN_BYTES


def chain_root(secret: bytes, *, salt: str = "", adapter: str = "", model_revision: str = "") -> BlockHash:
    """The parent of a sequence's first block. Fields are length-prefixed, so no two field lists collide."""
    parts = [part.encode() for part in (salt, adapter, model_revision)]
    message = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hmac.new(secret, message, hashlib.sha256).digest()


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Name of one full block. `token_ids` has exactly one block's tokens, each in [0, 2**32)."""
    return hashlib.sha256(parent + array("I", token_ids).tobytes()).digest()


def hash_blocks(root: BlockHash, token_ids: Sequence[int], block_size: int = BLOCK_SIZE) -> tuple[BlockHash, ...]:
    """Names of all *full* blocks of `token_ids`, first to last; the partial tail has none."""
    data = memoryview(array("I", token_ids).tobytes())
    width = block_size * _TOKEN_BYTES
    sha256 = hashlib.sha256
    parent, names = root, []
    for start in range(0, len(data) - width + 1, width):
        parent = sha256(parent + data[start : start + width]).digest()
        names.append(parent)
    return tuple(names)
