"""Which of a chunk's draws stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Drawn(Protocol):
    @property
    def token_id(self) -> int | None: ...


Outcome = TypeVar("Outcome", bound=Drawn)


def standing(draft_token_ids: Sequence[int], outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The draws that a plain engine would have made one step after the other.

    `outcomes[0]` was drawn from the row of the last known token, `outcomes[i]` from that of draft token i - 1. The first always
    counts, an error included. A later row without a token ends the run before it: if its sequence comes there again, that
    row is the first one and its error is told.
    """
    assert len(outcomes) == len(draft_token_ids) + 1, (len(outcomes), len(draft_token_ids))
    taken = [outcomes[0]]
    for draft, outcome in zip(draft_token_ids, outcomes[1:], strict=True):
        if taken[-1].token_id != draft or outcome.token_id is None:
            break
        taken.append(outcome)
    return taken
