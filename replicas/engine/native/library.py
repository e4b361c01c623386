"""The compiled kernels, by ctypes: `load()` finds them beside this file, where the installation built them.

Structures here have the layout of those in csrc/; a size that differs would be a crash, so `load` checks nothing else than
what it can: that the library is there and the CPU has the instructions.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_STEM = "_kernels"
_INTEGERS, _NARROW = 1, 2  # bits of ts_features

FORMATS = {"fp32": 0, "bf16": 1, "int8": 2, "int8_g32": 3, "int4": 4}
"""csrc/linear.h, Format"""
ROW_CLASSES = ("1", "2", "3-4", "5-8", "9-16", "17-32", "more")
NUM_VARIANTS = 4
"""csrc/linear.h, variants()"""
PHASES = ("embed", "qkv", "rotate", "attend", "output", "gate_up", "down", "head", "best")
"""csrc/model.h, Phase"""


class Shape(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("vocab", "hidden", "layers", "heads", "kv_heads", "dim", "mlp", "threads")),
        ("eps", c_float),
    )


class Linear(ctypes.Structure):
    _fields_ = (
        ("format", c_int32),
        ("rows", c_int32),
        ("columns", c_int32),
        ("data", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
    )


class Cache(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("format", "layers", "blocks", "heads", "dim")),
        ("data", c_void_p),
        ("scales", c_void_p),
    )


class StepBatch(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("num_rows", "num_spans", "num_samples")),
        *((name, c_void_p) for name in ("token_ids", "spans", "tables", "sample_rows", "logits", "best")),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ts_features": (c_int32, ()),
    "ts_create": (c_void_p, (POINTER(Shape), c_void_p, c_void_p)),
    "ts_free": (None, (c_void_p,)),
    "ts_linear_bytes": (c_int64, (POINTER(Linear),)),
    "ts_set_linear": (None, (c_void_p, c_int32, c_int32, POINTER(Linear), c_void_p, c_void_p, c_void_p)),
    "ts_set_norm": (None, (c_void_p, c_int32, c_int32, c_void_p)),
    "ts_set_cache": (None, (c_void_p, POINTER(Cache))),
    "ts_forward": (None, (c_void_p, POINTER(StepBatch))),
    "ts_phases": (None, (c_void_p, c_void_p)),
    "ts_read_token": (None, (POINTER(Cache), c_int32, c_int32, c_int32, c_int32, c_void_p, c_void_p)),
    "ts_write_token": (None, (POINTER(Cache), c_int32, c_int32, c_int32, c_int32, c_void_p, c_void_p)),
    "ts_multiply": (None, (POINTER(Linear), c_int32, c_void_p, c_int32, c_void_p)),
    "ts_tune": (None, (c_void_p,)),
    "ts_variants": (None, (c_void_p, c_void_p)),
    "ts_pack": (None, (POINTER(Linear), c_void_p, c_void_p, c_void_p)),
    "ts_unpack_row": (None, (POINTER(Linear), c_int32, c_void_p)),
    "ts_large_pages": (None, (c_void_p, c_int64)),
    "ts_read_rate": (c_double, (c_void_p, c_int64, c_int32, c_int32)),
    "ts_multiply_rate": (c_double, (c_int32, c_int32, c_int32)),
}


class Library:
    """The functions of csrc/api.cpp as methods of `calls`. They hold no lock of Python's while they run."""

    def __init__(self, path: Path) -> None:
        self.calls: Any = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            if name == "ts_features" or hasattr(self.calls, name):  # a build for another kind of CPU has nothing but that
                function = getattr(self.calls, name)
                function.restype, function.argtypes = result, arguments
        features = self.calls.ts_features()
        self.has_integers = bool(features & _INTEGERS)
        self.has_bf16 = bool(features & _NARROW)

    def supports(self, format: str) -> bool:
        return self.has_bf16 if format == "bf16" else self.has_integers


@cache
def load() -> Library | None:
    """None where the kernels were not built, or this CPU can't run any of them; the log says which."""
    found = [path for suffix in EXTENSION_SUFFIXES if (path := Path(__file__).with_name(_STEM + suffix)).is_file()]
    if not found:
        logger.warning("the native kernels are not built (a C++ compiler at installation builds them); torch computes, slower")
        return None
    library = Library(found[0])
    if not library.has_integers:
        logger.info("this CPU lacks AVX-512 with byte products, so torch computes instead of the native kernels")
        return None
    return library
