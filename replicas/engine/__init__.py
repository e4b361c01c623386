"""The native engine: `engine` (thread, inbox, outbox) drives `scheduler` -> `runner` -> `scheduler` step by step.

No torch in engine, step, sequence, scheduler, block_pool, prefix_cache; torch in batch, runner, sampler, weights, attention, models.
"""
