"""Weights in few bits.

formats.py     QuantizedTensor: three formats, to them and back to numbers
"""
