"""Attention over a paged KV cache.

kv_cache.py    KVCache: where keys and values lie; StepAttention and AttentionBackend: what a path must offer
reference.py   the plain path: every sequence alone, tile by tile with an online softmax; what the others are proven by
paged.py       torch's serving path
static.py      decode in fixed shapes, for CUDA graphs
"""
