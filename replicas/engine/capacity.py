"""How many KV blocks a memory budget buys, and how long a sequence may get in them. Pure, no torch.

Used when an engine loads, and before there is one by replicas/memory_plan.py: what a plan says fits is what loads.
"""

from __future__ import annotations

from dataclasses import dataclass

from replicas.errors import CapacityError

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Capacity:
    num_blocks: int
    max_model_len: int  # tokens of prompt + output


def check_context(max_model_len: int, max_context_len: int) -> None:
    """Raises CapacityError if more is asked for than the model can do, whatever the memory."""
    if max_model_len > max_context_len:
        raise CapacityError(
            f"model.max_model_len={max_model_len} is more than this model can use ({max_context_len}); 0 takes all of it"
        )


def fit_blocks(
    *, kv_bytes: int, bytes_per_block: int, block_size: int, max_model_len: int, max_context_len: int
) -> Capacity | None:
    """Blocks of `block_size` tokens in `kv_bytes`, and the longest sequence; None if not one sequence fits.

    `max_model_len` is what was asked for (0: as long as both the model and the memory allow), `max_context_len` what the
    model can do.
    """
    num_blocks = max(kv_bytes, 0) // bytes_per_block
    if num_blocks < num_blocks_of(max(max_model_len, 1), block_size):
        return None
    return Capacity(num_blocks, max_model_len or min(max_context_len, num_blocks * block_size))


def plan_block_capacity(
    *, kv_bytes: int, bytes_per_block: int, block_size: int, max_model_len: int, max_context_len: int
) -> Capacity:
    """As `fit_blocks`, but raises CapacityError, with what is missing and what would fit, if the answer is no."""
    check_context(max_model_len, max_context_len)
    capacity = fit_blocks(
        kv_bytes=kv_bytes,
        bytes_per_block=bytes_per_block,
        block_size=block_size,
        max_model_len=max_model_len,
        max_context_len=max_context_len,
    )
    if capacity is not None:
        return capacity
    needed_bytes = num_blocks_of(max(max_model_len, 1), block_size) * bytes_per_block
    missing_mib = -(-(needed_bytes - kv_bytes) // _MIB)
    max_tokens = max(kv_bytes, 0) // bytes_per_block * block_size
    fits = f"in {max(kv_bytes, 0)} bytes a max_model_len of {max_tokens} would fit" if max_tokens else "nothing would fit"
    raise CapacityError(
        f"the KV cache of one sequence of {max(max_model_len, 1)} tokens needs {missing_mib} MiB more: set "
        f"engine.kv_cache_bytes={needed_bytes} or more; {fits}"
    )


def plan_capacity(
    *, kv_bytes: int, bytes_per_token: int, block_size: int, max_model_len: int, max_context_len: int
) -> Capacity:
    """`plan_block_capacity` where a block has nothing but its tokens' numbers."""
    return plan_block_capacity(
        kv_bytes=kv_bytes,
        bytes_per_block=bytes_per_token * block_size,
        block_size=block_size,
        max_model_len=max_model_len,
        max_context_len=max_context_len,
    )


def num_blocks_of(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` take, the last one maybe in part."""
    return -(-num_tokens // block_size)
