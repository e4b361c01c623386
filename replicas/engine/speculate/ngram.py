"""Drafts from what was said before: the tokens that followed, the last time, what a sequence ends with now.

Prompt lookup (A. Saxena, 2023; vLLM's `ngram`): free of cost, and right where answers repeat their prompts: summaries, code
that is edited, tables, quotations.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 4
SHORTEST = 2
# A long prompt is taken in over several steps: all at once would hold up the others' tokens.
_MAX_TOKENS_AT_ONCE = 512


class NgramIndex:
    """Of one sequence, whose tokens only grow. `propose` reads what is new and looks up the end."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> where the token lies that last followed it
        self._num_read = 0  # n-grams that end before this token, and are followed by it at the latest, are in

    def propose(self, token_ids: Sequence[int], count: int) -> tuple[int, ...]:
        """At most `count` tokens that may follow `token_ids`: after the longest n-gram that ended like it. () if none did.

        Where the earlier place is so near that its continuation runs into the end, it goes on from there: "a b a b" drafts
        "a b a b ...".
        """
        self._read(token_ids)
        for length in range(LONGEST, SHORTEST - 1, -1):
            start = self._after.get(tuple(token_ids[-length:])) if len(token_ids) >= length else None
            if start is not None:
                drafts: list[int] = []
                for index in range(start, start + count):
                    drafts.append(token_ids[index] if index < len(token_ids) else drafts[index - len(token_ids)])
                return tuple(drafts)
        return ()

    def _read(self, token_ids: Sequence[int]) -> None:
        end = min(len(token_ids), self._num_read + _MAX_TOKENS_AT_ONCE)
        for follower in range(max(self._num_read, SHORTEST), end):
            for length in range(SHORTEST, min(LONGEST, follower) + 1):
                self._after[tuple(token_ids[follower - length : follower])] = follower
        self._num_read = end
