"""Writes a GGUF in another number format: llama_cpp_quantize.py SOURCE TARGET FORMAT, by the interpreter that has llama.cpp."""

from __future__ import annotations

import ctypes
import sys

import llama_cpp

_FORMATS = {
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "bf16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
    "fp16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
}


def main(source: str, target: str, name: str) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = _FORMATS[name]
    params.allow_requantize = True
    status = llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params))
    if status:
        sys.exit(f"llama_model_quantize returned {status}")


if __name__ == "__main__":
    main(*sys.argv[1:])
