"""A decoder's step in C++, for CPUs with AVX-512: all layers in one call, from packed weights, over KV blocks in place.

library.py     the compiled library, loaded without torch or Python in it; None where it isn't built or the CPU lacks it
cache.py       NativeKVCache: keys and values as the kernels want them, in fp32, bf16 or int8
model.py       NativeModel: packs a checkpoint, computes steps
csrc/          linear (packed products of five formats), attention (over blocks in place), model (the step), pool, machine

Its plain twin is replicas/engine/models/llama.py, which serves where this can't.
"""
