"""The native engine: `engine` (thread, inbox, outbox) drives `scheduler` -> `runner` -> `scheduler` step by step.

No torch in engine, validate, scheduler, sequence, block_pool, step.
Torch in batch, runner, sampler, weights, attention, models.
"""
