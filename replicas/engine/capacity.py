"""How many KV blocks a memory budget buys, and how long a sequence may get in them. Pure, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.errors import CapacityError

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Capacity:
    num_blocks: int
    max_model_len: int  # tokens of prompt + output


def plan_capacity(
    *, kv_bytes: int, bytes_per_token: int, block_size: int, max_model_len: int, max_context_len: int
) -> Capacity:
    """Blocks of `block_size` tokens in `kv_bytes`, and the longest sequence.

    `max_model_len` is what was asked for (0: as long as both the model and the memory allow), `max_context_len` what the
    model can do. Raises CapacityError, with what is missing and what would fit, if the answer is no.
    """
    if max_model_len > max_context_len:
        raise CapacityError(
            f"model.max_model_len={max_model_len} is more than this model can use ({max_context_len}); 0 takes all of it"
        )
    num_blocks = max(kv_bytes, 0) // (bytes_per_token * block_size)
    max_tokens = num_blocks * block_size
    needed_tokens = -(-max(max_model_len, 1) // block_size) * block_size
    if needed_tokens > max_tokens:
        missing_mib = -(-(needed_tokens * bytes_per_token - kv_bytes) // _MIB)
        fits = f"in {max(kv_bytes, 0)} bytes a max_model_len of {max_tokens} would fit" if num_blocks else "nothing would fit"
        raise CapacityError(
            f"the KV cache of one sequence of {max(max_model_len, 1)} tokens needs {missing_mib} MiB more: set "
            f"engine.kv_cache_bytes={needed_tokens * bytes_per_token} or more; {fits}"
        )
    return Capacity(num_blocks, max_model_len or min(max_context_len, max_tokens))
