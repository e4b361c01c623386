"""The decoder models: what they are and how they compute.

config.py    ArchitectureConfig, and the table of families: which config.json or GGUF becomes which traits   [no torch]
model_weights.py   a checkpoint's tensors as the decoder wants them: side by side, quantized or not
fp8.py       linear maps in fp8, for GPUs that have it
layers.py    linear (plain, or packed for oneDNN), RMS norm, rotary embedding
llama.py     the one decoder of all families: Llama, SmolLM2, Mistral, Qwen2, Qwen3
"""
