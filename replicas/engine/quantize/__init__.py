"""Weights in few bits.

formats.py     QuantizedTensor: three formats, to them and back to numbers
scheme.py      which quantized layout a config.json declares, and whether we read it. No torch
parts.py       a quantized matrix as tensors of a file of our own
packed.py      AWQ's and GPTQ's matrices, to int4 or to numbers
checkpoint.py  a model quantized once, into a directory
"""
