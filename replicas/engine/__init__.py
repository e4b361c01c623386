"""The native engine: `engine` (thread, inbox, outbox) drives `scheduler` -> `runner` -> `scheduler` step by step.

No torch in engine, validate, scheduler, sequence, block_pool, step.
Torch in runner, sampler, load_model, weights, and in native (C++ for CPUs), torch_model, attention, models, quantize.
"""
