"""The compiled kernels, by ctypes: `load()` finds them beside this file; the installation built them for two kinds of CPU.

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

_BUILDS = (("_kernels_avx512", 2, "AVX-512"), ("_kernels_avx2", 1, "AVX2"))
"""Best first: file, bit of ts_features (csrc/features.cpp), what it needs."""

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

    def __init__(self, path: Path, instructions: str) -> None:
        self.instructions = instructions
        self.calls: Any = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self.calls, name)
            function.restype, function.argtypes = result, arguments


def _found(stem: str) -> Path | None:
    places = (Path(__file__).with_name(stem + suffix) for suffix in EXTENSION_SUFFIXES)
    return next((path for path in places if path.is_file()), None)


@cache
def load() -> Library | None:
    """The best build that this CPU can run. None where none is, or none was built; the log says which."""
    built = [(path, bit, needs) for stem, bit, needs in _BUILDS if (path := _found(stem)) is not None]
    if not built:
        logger.warning("the native kernels are not built (a C++ compiler at installation builds them); torch computes, slower")
        return None
    features = ctypes.CDLL(str(built[-1][0])).ts_features()
    for path, bit, needs in built:
        if features & bit:
            return Library(path, needs)
    logger.info("this CPU has no AVX2, so torch computes instead of the native kernels")
    return None
