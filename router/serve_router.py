"""The adapter between Ray Serve's request router (ray 2.60, alpha API) and router.core, which decides.

Serve makes one of these per handle and process, and runs it on an event loop of its own thread. What Serve punishes, and what
we do about it (each measured on 2.60):
- an exception in `choose_replicas` leaves the request hanging for ever: everything is caught, and a random order is returned;
- an empty answer without `should_backoff` spins the loop: it is always set;
- blocking here blocks every handle of the process: nothing here waits; telemetry comes through ReplicaFeed tasks.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from replicas.blocks import BlockHash
from replicas.contract import EngineStats, KVEvents
from replicas.wire import Endpoint
from router import runtime
from router.core import Router
from router.feed import ReplicaFeed
from router.fleet import ReplicaFacts
from router.policy import Decision, Question
from router.ticket import Ticket

logger = logging.getLogger("ray.serve")


class PrefixRequestRouter(RequestRouter):
    """Chooses by cached prefix and predicted time to first token. See router.core and router.policy for how."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._core: Router | None = None
        self._secret = b""
        self._feeds: dict[str, ReplicaFeed] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._seen_errors: set[str] = set()
        context = runtime.context()
        if context is None:
            return
        self._secret = context.secret
        self._core = Router.from_config(context.config)
        runtime.register(self._core)

    # ---- membership: Serve calls these on the router's loop ----

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        try:
            self._follow({replica.replica_id.unique_id: replica for replica in replicas})
        except Exception as error:  # a raise here would stop Serve's long poll, and with it every membership update
            self._log_once("membership", error)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id.unique_id)

    def _follow(self, replicas: dict[str, RunningReplica]) -> None:
        for name in self._feeds.keys() - replicas.keys():
            self._forget(name)
        if self._core is None:
            return
        for name in replicas.keys() - self._feeds.keys():
            facts = replicas[name].replica_metadata
            if "endpoint" not in facts:
                continue
            host, port = facts["endpoint"]
            self._core.join(
                name,
                ReplicaFacts(
                    max_num_batched_tokens=facts["info"]["max_num_batched_tokens"],
                    max_num_seqs=facts["info"]["max_num_seqs"],
                    block_size=facts["info"]["block_size"],
                    num_recomputed_blocks=facts["info"]["num_recomputed_blocks"],
                ),
            )
            feed = ReplicaFeed(name, Endpoint(host, port, facts["boot_id"]), self._secret, _Listener(self._core))
            feed.start()
            self._feeds[name] = feed

    def _forget(self, name: str) -> None:
        feed = self._feeds.pop(name, None)
        if feed is not None:
            task = asyncio.ensure_future(feed.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        if self._core is not None:
            self._core.leave(name)

    # ---- the choice ----

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        try:
            return self._choose(candidate_replicas, _ticket(pending_request))
        except Exception as error:
            self._log_once("choice", error)
            shuffled = random.sample(candidate_replicas, len(candidate_replicas))
            return [[replica] for replica in shuffled]

    def _choose(self, candidates: Sequence[RunningReplica], ticket: Ticket | None) -> list[list[RunningReplica]]:
        if ticket is not None:
            ticket.release()  # of an earlier attempt that no replica accepted
            candidates = [replica for replica in candidates if replica.replica_id.unique_id not in ticket.excluded]
        if not candidates:
            return []
        if ticket is None or self._core is None:
            # Without a prompt or a context there is nothing to match: Serve picks the shorter queue of two.
            return [random.sample(candidates, min(2, len(candidates)))]
        by_name = {replica.replica_id.unique_id: replica for replica in candidates}
        started, now = time.thread_time(), time.monotonic()
        question = Question(num_prompt_tokens=ticket.num_prompt_tokens, block_hashes=ticket.block_hashes)
        decision: Decision = self._core.route(question, tuple(by_name), now)
        ticket.lease = self._core.commit(decision, question, now)
        ticket.decision = decision
        ticket.decide_s = time.thread_time() - started
        return [[by_name[name]] for name in decision.ranking]

    def _log_once(self, where: str, error: Exception) -> None:
        kind = f"{where}:{type(error).__name__}"
        if kind not in self._seen_errors:
            self._seen_errors.add(kind)
            logger.exception("router error in %s; falling back (logged once per kind)", where)


def _ticket(pending_request: PendingRequest | None) -> Ticket | None:
    if pending_request is None or not pending_request.args:
        return None
    first = pending_request.args[0]
    return first if isinstance(first, Ticket) else None


class _Listener:
    """Carries one process's feeds into its Router core. False asks the feed for a new snapshot."""

    def __init__(self, core: Router) -> None:
        self._core = core

    def on_snapshot(self, replica: str, sequence: int, hashes: Sequence[BlockHash]) -> None:
        self._core.snapshot(replica, sequence, hashes)

    def on_events(self, replica: str, events: KVEvents) -> bool:
        return self._core.apply(replica, events)

    def on_report(self, replica: str, stats: EngineStats) -> None:
        self._core.report(replica, stats, time.monotonic())

    def on_lost(self, replica: str) -> None:
        """What was known stays in use: a replica that died leaves by Serve's word, another sends a snapshot soon."""
