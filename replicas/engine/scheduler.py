"""Which tokens are computed next. Pure: no thread, no clock, no torch; the simulator drives this same class.

One rule: each sequence has known tokens that are not computed yet, and a step grants it as many as budget and blocks allow.
A step goes, in this order,
1. to running sequences with one pending token (they decode, and never wait behind a prompt), first come first served;
2. to draft tokens behind those, as many as `drafter` thinks pay, and as blocks are there for without preempting anybody;
3. to running sequences with more (prompts under way), first come first served;
4. to waiting sequences, likewise, as long as the next one gets blocks for *all* its known tokens. It takes them at once, so
   a prompt under way never lacks a block, and only if one block per running sequence remains: else the newcomer, or who
   was preempted a moment ago, would be out again within the next block. Who doesn't fit holds up those behind it, so that
   large prompts are served too.

A waiting sequence whose next block is being computed by a running one is passed over until that block is there to be
shared, or until the other ended without it.

When a decoding sequence needs a block and all are used, the running sequence that arrived last gives its blocks up
(*preemption*) and goes back to the head of the queue. It keeps its tokens, and what it computed stays cached as long as
nobody needs the room.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from dataclasses import dataclass

from replicas.blocks import BLOCK_SIZE, BlockHash
from replicas.contract import (
    Delta,
    EngineStats,
    ErrorInfo,
    FinishReason,
    GenerationRequest,
    KVEvents,
    StepTimeCoefficients,
    TokenLogprob,
)
from replicas.engine.block_pool import BlockPool
from replicas.engine.sequence import Sequence, SequenceState
from replicas.engine.speculate.drafter import DraftCounts, Drafter, DraftRequest, StepLoad
from replicas.engine.step import ChunkResult, SequenceChunk, StepPlan, StepResult
from replicas.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """See configs.schema.EngineConfig for the reasons. Raises ConfigError where the limits contradict each other."""

    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int  # tokens: prompt + output
    eos_token_ids: tuple[int, ...] = ()
    chunked_prefill: bool = True
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.max_num_seqs <= self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs ({self.max_num_seqs}): "
                "a step gives every running sequence its next token"
            )
        if not 1 <= self.max_model_len <= self.num_blocks * BLOCK_SIZE:
            raise ConfigError(
                f"max_model_len ({self.max_model_len}) must be at least 1 and fit into the KV cache "
                f"({self.num_blocks} blocks of {BLOCK_SIZE} tokens)"
            )


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of a step, and of the aborts since the last one."""

    deltas: tuple[Delta, ...]
    kv_events: KVEvents | None


class Scheduler:
    """`add` and `abort` at any time; `plan`, run, `apply` in turns. A request's last Delta comes out of the next `apply`."""

    def __init__(self, config: SchedulerConfig, drafter: Drafter | None = None) -> None:
        self.config = config
        self._drafter = drafter
        self._pool = BlockPool(config.num_blocks)
        self._sequences: dict[str, Sequence] = {}  # waiting and running
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()
        self._running: list[Sequence] = []  # by arrival
        self._computing: dict[BlockHash, Sequence] = {}  # full prompt blocks that running sequences have yet to compute
        self._planned: list[Sequence] = []  # of the step under way, in the plan's order
        self._last_deltas: list[Delta] = []  # of sequences that ended outside a step
        self._num_arrivals = 0
        self._num_waiting_tokens = 0
        self._num_kv_events = 0
        self._num_finished = {reason.value: 0 for reason in FinishReason}
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._num_hits = 0
        self._num_preemptions = 0
        self._num_steps = 0
        self._drafts = DraftCounts()

    @property
    def has_work(self) -> bool:
        """Whether `plan` and `apply` would do anything."""
        return bool(self._sequences or self._last_deltas)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Of all sequences that haven't ended."""
        return tuple(self._sequences)

    def add(self, request: GenerationRequest, now: float) -> None:
        """Queue a request that is valid (replicas.engine.validate) and whose full prompt blocks are named."""
        assert request.request_id not in self._sequences, f"{request.request_id} is here already"
        assert 0 < len(request.prompt_token_ids) < self.config.max_model_len, len(request.prompt_token_ids)
        assert not self.config.prefix_caching or len(request.block_hashes) == len(request.prompt_token_ids) // BLOCK_SIZE
        self._num_arrivals += 1
        sequence = Sequence(request, arrival=self._num_arrivals, eos_token_ids=self.config.eos_token_ids, now=now)
        if not self.config.prefix_caching:
            sequence.block_hashes.clear()  # a sequence without names neither finds nor leaves anything
        self._sequences[request.request_id] = sequence
        self._waiting[request.request_id] = sequence
        self._num_waiting_tokens += len(sequence.token_ids)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a sequence; its blocks are free on return. An id that is unknown, or ended before, is ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._last_deltas.append(self._end(sequence, reason))

    def clear_cache(self) -> None:
        """Forget all blocks that no running sequence holds. The next `apply` reports them removed."""
        self._pool.clear()

    def plan(self, now: float) -> StepPlan:
        """The next step's work; without chunks if there is none. Must be followed by its `apply`."""
        budget = self.config.max_num_batched_tokens
        chunks: list[SequenceChunk] = []
        self._planned = []

        decoding: list[Sequence] = []
        index = 0
        while index < len(self._running):  # preemption shortens the list, from its end
            sequence = self._running[index]
            if sequence.num_pending_tokens == 1 and self._has_room(sequence):
                decoding.append(sequence)
            index += 1
        budget -= len(decoding)
        for sequence, draft in zip(decoding, self._draft(decoding, budget), strict=True):
            chunks.append(sequence.chunk(1, draft))
            budget -= len(draft)
        self._planned.extend(decoding)

        for sequence in self._running:
            if budget == 0:
                break
            if sequence.num_pending_tokens > 1:
                num_tokens = min(sequence.num_pending_tokens, budget)
                self._grant(chunks, sequence, num_tokens)
                budget -= num_tokens

        self._admit(chunks, budget, now)
        assert chunks or not self._sequences, "sequences wait, and nothing moves"
        return StepPlan(tuple(chunks))

    def apply(self, plan: StepPlan, result: StepResult) -> Applied:
        """Take in the step's results, one per chunk. Sequences that were aborted meanwhile are left alone."""
        deltas = self._last_deltas
        self._last_deltas = []
        for sequence, chunk, outcome in zip(self._planned, plan.chunks, result.chunks, strict=True):
            assert chunk.request_id == outcome.request_id == sequence.request_id, "results in another order than planned"
            if sequence.state is SequenceState.RUNNING:
                delta = self._advance(sequence, chunk, outcome)
                if delta is not None:
                    deltas.append(delta)
        self._planned = []
        if plan.chunks:
            self._num_steps += 1
        return Applied(tuple(deltas), self._pop_kv_events())

    def stats(self, step_time: StepTimeCoefficients | None = None) -> EngineStats:
        """Now. `step_time` is passed through: the scheduler doesn't measure."""
        pool = self._pool
        num_pending_tokens = self._num_waiting_tokens
        num_context_tokens = 0
        for sequence in self._running:
            num_computed = sequence.num_computed_tokens
            num_pending_tokens += len(sequence.token_ids) - num_computed
            num_context_tokens += num_computed
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_pending_tokens=num_pending_tokens,
            num_context_tokens=num_context_tokens,
            num_blocks_total=pool.num_blocks,
            num_blocks_free=pool.num_free,
            num_blocks_cached=pool.num_cached,
            num_blocks_used=pool.num_used,
            started_total=self._num_arrivals,
            finished_total=self._num_finished.copy(),
            prompt_tokens_total=self._num_prompt_tokens,
            generation_tokens_total=self._num_generated_tokens,
            prefix_queries_total=self._num_prompt_tokens if self.config.prefix_caching else 0,
            prefix_hits_total=self._num_hits,
            preemptions_total=self._num_preemptions,
            drafts_total=self._drafts.num_drafts,
            draft_tokens_total=self._drafts.num_tokens,
            accepted_tokens_total=sum(self._drafts.num_accepted),
            accepted_per_position_total=tuple(self._drafts.num_accepted),
            steps_total=self._num_steps,
            step_time=step_time,
        )

    def _grant(self, chunks: list[SequenceChunk], sequence: Sequence, num_tokens: int) -> None:
        chunks.append(sequence.chunk(num_tokens))
        self._planned.append(sequence)

    def _draft(self, decoding: list[Sequence], budget: int) -> list[tuple[int, ...]]:
        """For each sequence its draft tokens, with blocks for them."""
        if self._drafter is None or not decoding or budget == 0:
            return [()] * len(decoding)
        longest = self.config.max_model_len
        requests = [
            DraftRequest(one.request_id, one.token_ids, min(one.max_drafts, longest - len(one.token_ids) - 1))
            for one in decoding
        ]
        num_prompt_tokens = min(budget, sum(one.num_pending_tokens for one in self._running if one.num_pending_tokens > 1))
        num_context_tokens = sum(one.num_computed_tokens for one in self._running)
        load = StepLoad(len(decoding) + num_prompt_tokens, num_context_tokens, len(self._running))
        drafts = self._drafter.draft(requests, load, budget)
        return [draft and draft[: self._room_for(one, len(draft))] for one, draft in zip(decoding, drafts, strict=True)]

    def _room_for(self, sequence: Sequence, num_drafts: int) -> int:
        """How many of the draft tokens have a block, after taking what nobody uses or waits for."""
        table, num_known = sequence.block_table, len(sequence.token_ids)
        while len(table) * BLOCK_SIZE < num_known + num_drafts and not self._waiting and self._pool.grow(table):
            pass
        return min(num_drafts, len(table) * BLOCK_SIZE - num_known)

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether the pending token has a block, after preempting who arrived later. False: this one was preempted."""
        if len(sequence.block_table) == sequence.num_blocks_needed:
            return True
        while not self._pool.grow(sequence.block_table):
            victim = self._running.pop()
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._give_up_blocks(sequence)
        sequence.state = SequenceState.WAITING
        self._waiting[sequence.request_id] = sequence
        self._waiting.move_to_end(sequence.request_id, last=False)
        self._num_waiting_tokens += len(sequence.token_ids)
        self._num_preemptions += 1

    def _admit(self, chunks: list[SequenceChunk], budget: int, now: float) -> None:
        admitted: list[Sequence] = []
        for sequence in self._waiting.values():
            if budget <= 0 or len(self._running) == self.config.max_num_seqs:
                break
            num_named = self._pool.num_named(sequence.block_hashes)
            num_reused = min(num_named, sequence.num_reusable_blocks)
            if num_reused < sequence.num_reusable_blocks and sequence.block_hashes[num_reused] in self._computing:
                continue
            num_tokens = len(sequence.token_ids) - num_reused * BLOCK_SIZE
            if self.config.chunked_prefill:
                num_tokens = min(num_tokens, budget)
            elif num_tokens > budget and admitted:
                break  # a whole prompt may exceed the budget, but not together with another
            names = sequence.block_hashes[:num_reused]
            table = self._pool.take(names, sequence.num_blocks_needed, num_spare=len(self._running))
            if table is None:
                break
            self._computing.update(dict.fromkeys(sequence.block_hashes[num_named:], sequence))
            self._start(sequence, table, num_reused, now)
            admitted.append(sequence)
            self._grant(chunks, sequence, num_tokens)
            budget -= num_tokens
        for sequence in admitted:
            del self._waiting[sequence.request_id]

    def _start(self, sequence: Sequence, table: list[int], num_reused: int, now: float) -> None:
        """WAITING -> RUNNING with blocks for all known tokens, the first `num_reused` of which are computed."""
        sequence.state = SequenceState.RUNNING
        sequence.block_table = table
        sequence.num_published_blocks = num_reused
        sequence.num_computed_tokens = num_reused * BLOCK_SIZE
        insort(self._running, sequence, key=lambda running: running.arrival)
        self._num_waiting_tokens -= len(sequence.token_ids)
        if sequence.queue_s is None:  # not a return after preemption: a request's prompt counts once
            sequence.queue_s = now - sequence.added_s
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self._num_prompt_tokens += len(sequence.token_ids)
            self._num_hits += sequence.num_cached_tokens

    def _advance(self, sequence: Sequence, chunk: SequenceChunk, outcome: ChunkResult) -> Delta | None:
        """What the runner's outcome means for a running sequence; None unless a token or an error came of it."""
        if outcome.error is not None:
            return self._end(sequence, FinishReason.ERROR, error=ErrorInfo("EngineError", outcome.error))
        if chunk.sample is None:
            sequence.num_computed_tokens += len(chunk.token_ids)
            self._publish(sequence)
            return None
        assert outcome.token_id is not None, f"no token was sampled for {sequence.request_id}"
        token_ids = [outcome.token_id]
        logprobs = [] if outcome.logprob is None else [outcome.logprob]
        reason = sequence.append(outcome.token_id, self.config.max_model_len)
        for token in outcome.further:
            if reason is not None:
                break
            token_ids.append(token.token_id)
            if token.logprob is not None:
                logprobs.append(token.logprob)
            reason = sequence.append(token.token_id, self.config.max_model_len)
        self._num_generated_tokens += len(token_ids)
        sequence.num_computed_tokens = len(sequence.token_ids) - 1  # draft tokens that were accepted are computed already
        if chunk.draft_samples:
            self._count_drafts(sequence, len(chunk.draft_samples), len(outcome.further))
        self._publish(sequence)
        if reason is None:
            return self._delta(sequence, token_ids, logprobs, None)
        return self._end(sequence, reason, token_ids, logprobs)

    def _count_drafts(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """And give up the blocks that refused draft tokens alone had."""
        self._pool.shrink(sequence.block_table, sequence.num_blocks_needed)
        self._drafts.add(num_drafted, num_accepted)
        if self._drafter is not None:
            self._drafter.observe(sequence.request_id, num_drafted, num_accepted)

    def _publish(self, sequence: Sequence) -> None:
        if not self.config.prefix_caching:
            return
        for index in range(sequence.num_published_blocks, sequence.num_computed_blocks):
            name = sequence.block_hash(index)
            sequence.block_table[index] = self._pool.publish(sequence.block_table[index], name)
            self._computing.pop(name, None)
        sequence.num_published_blocks = sequence.num_computed_blocks

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprob] | None = None,
        *,
        error: ErrorInfo | None = None,
    ) -> Delta:
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
            self._give_up_blocks(sequence)
        else:
            del self._waiting[sequence.request_id]
            self._num_waiting_tokens -= len(sequence.token_ids)
        sequence.state = SequenceState.FINISHED
        del self._sequences[sequence.request_id]
        self._num_finished[reason] += 1
        if self._drafter is not None:
            self._drafter.forget(sequence.request_id)
        return self._delta(sequence, token_ids or [], logprobs, reason, error)

    def _give_up_blocks(self, sequence: Sequence) -> None:
        """Whoever awaits a block of this sequence's will look again, and compute it itself."""
        for name in sequence.block_hashes[sequence.num_published_blocks :]:
            if self._computing.get(name) is sequence:
                del self._computing[name]
        self._pool.release(sequence.block_table)
        sequence.num_computed_tokens = 0

    def _delta(
        self,
        sequence: Sequence,
        token_ids: list[int],
        logprobs: list[TokenLogprob] | None,
        reason: FinishReason | None,
        error: ErrorInfo | None = None,
    ) -> Delta:
        first = not sequence.reported_start
        sequence.reported_start = True
        return Delta(
            request_id=sequence.request_id,
            token_ids=tuple(token_ids),
            finish_reason=reason,
            logprobs=tuple(logprobs) if logprobs else None,
            stop_token_id=token_ids[-1] if token_ids and reason is FinishReason.STOP else None,
            num_cached_tokens=sequence.num_cached_tokens if first else None,
            queue_s=sequence.queue_s if first else None,
            error=error,
        )

    def _pop_kv_events(self) -> KVEvents | None:
        changes = self._pool.pop_changes()
        if not changes.stored and not changes.removed:
            return None
        self._num_kv_events += 1
        return KVEvents(self._num_kv_events, stored=changes.stored, removed=changes.removed)
