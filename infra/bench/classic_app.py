"""`python -m cluster up` with Ray Serve's streaming as it is without our merging: a message of Serve's for each token.

    python infra/bench/classic_app.py --config configs/tiny-cpu.yaml ingress.data_path=classic ingress.haproxy=false

On the classic path as we ship it, tokens that wait for Serve go out merged, so that a burst takes few messages. This is what a
generator deployment that yields each token costs; everything else is the same.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a checkout, installed or not

import cluster.app
from cluster.__main__ import main
from replicas.contract import Delta, GenerationRequest
from replicas.delta_buffer import split
from replicas.deployment import EngineReplica


class TokenByToken(EngineReplica):
    async def generate(self, ticket: Any, request: GenerationRequest) -> AsyncIterator[Delta]:
        async for delta in super().generate(ticket, request):
            rest = delta
            while len(rest.token_ids) > 1:
                token, rest = split(rest, 1)
                yield token
            yield rest


if __name__ == "__main__":
    cluster.app.EngineReplica = TokenByToken  # type: ignore[attr-defined]
    sys.exit(main(["up", *sys.argv[1:]]))
