"""A GGUF model as a directory in the Hugging Face layout, for engines that can't read the file itself (vLLM on a CPU)."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from configs.schema import ModelConfig
from replicas.engine.models.config import ArchitectureConfig
from replicas.engine.models.model_weights import ModelWeights
from replicas.engine.weights import open_checkpoint
from replicas.errors import ConfigError
from replicas.model_source import architecture, eos_token_ids, model_revision, resolve
from replicas.tokenizer_files import TokenizerSpec, from_gguf

logger = logging.getLogger(__name__)

_DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
# What the name of an exported directory begins with, so that a change of what is written makes new ones.
_LAYOUT = "v2"


def model_directory(model: ModelConfig, dtype: torch.dtype, cache: Path) -> Path:
    """The model's own directory of safetensors, or one below `cache` that is made of its GGUF, once for each file.

    Takes seconds for a small model. Two processes may ask at once: each writes a directory of its own, and the first to be
    done gives it its name. Raises ConfigError for what can't be written in that layout.
    """
    files = resolve(model)
    if files.kind == "safetensors":
        return files.path
    # By the file's own digest: `model.revision` is free text, which may stay when the file changes.
    digest = model_revision(replace(model, revision=""))
    target = cache / f"{_LAYOUT}-{digest}-{_DTYPE_NAMES[dtype]}"
    if not target.is_dir():
        logger.info("writing %s as %s", model.source, target)
        try:
            with whole_directory(target) as scratch:
                _write(model, dtype, scratch)
        except OSError:
            if not target.is_dir():
                raise
    return target


@contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """A folder that gets the name `target` when the block ends, and vanishes if that fails. OSError if `target` isn't empty."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # One folder deeper than the private one that is made for us, so that it gets the rights of any other.
    private = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        scratch = private / target.name
        scratch.mkdir()
        yield scratch
        scratch.rename(target)
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _write(model: ModelConfig, dtype: torch.dtype, folder: Path) -> None:
    shape, description = architecture(model), describe_gguf(model, dtype)
    checkpoint = open_checkpoint(resolve(model), shape)
    tensors = {name: checkpoint.tensor(name, size).to(dtype).contiguous() for name, size in tensor_shapes(shape).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_description(description, folder)


def describe_gguf(model: ModelConfig, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """File name -> content of what stands beside the weights. Raises ConfigError for what that layout can't say."""
    shape, spec, ends = architecture(model), from_gguf(resolve(model).path), eos_token_ids(model)
    if shape.rope.divisors is not None:
        raise ConfigError("model.source: this GGUF scales rotary positions; give a directory with config.json instead")
    return {
        "config.json": _config(shape, _DTYPE_NAMES[dtype], ends),
        "generation_config.json": {"eos_token_id": list(ends)},
        "tokenizer.json": _tokenizer(spec),
        "tokenizer_config.json": _tokenizer_config(spec, shape),
    }


def write_description(description: dict[str, dict[str, Any]], folder: Path) -> None:
    for name, content in description.items():
        (folder / name).write_text(json.dumps(content))


def tensor_shapes(architecture: ArchitectureConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that a model is made of, by their names: what our own decoder asks a checkpoint for."""
    recorder = _Recorder()
    weights = ModelWeights(architecture, recorder)
    for read in (weights.embedding, weights.head, weights.norm):
        read()
    for index in range(architecture.num_layers):
        weights.layer(index)
    return recorder.shapes


class _Recorder:
    """A checkpoint whose tensors have shapes and no numbers."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self.shapes[name] = shape
        return torch.empty(shape, device="meta")

    def quantized(self, name: str, shape: tuple[int, ...]) -> None:
        return None


def _config(shape: ArchitectureConfig, dtype: str, ends: tuple[int, ...]) -> dict[str, Any]:
    """transformers 4 reads `rope_theta` and `torch_dtype`, 5 `rope_parameters` and `dtype`."""
    return {
        "architectures": [shape.family.hf_name],
        "model_type": shape.family.gguf_name,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_context_len,
        "rope_theta": shape.rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope.theta},
        "tie_word_embeddings": shape.tied_embeddings,
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends),
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _tokenizer(spec: TokenizerSpec) -> dict[str, Any]:
    """tokenizer.json with the special tokens put back, which our own tokenizer keeps out of the text's vocabulary."""
    core: dict[str, Any] = json.loads(spec.core_json)
    core["model"]["vocab"].update({token.text: token.token_id for token in spec.special_tokens})
    core["added_tokens"] += [
        {
            "id": token.token_id,
            "content": token.text,
            "single_word": False,
            "lstrip": token.lstrip,
            "rstrip": token.rstrip,
            "normalized": False,
            "special": True,
        }
        for token in spec.special_tokens
    ]
    core["added_tokens"].sort(key=lambda token: token["id"])
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {**core, "decoder": byte_level, "post_processor": _post_processor(spec), "truncation": None, "padding": None}


def _post_processor(spec: TokenizerSpec) -> dict[str, Any] | None:
    """What puts the tokens before a text that begin it, if there are any."""
    text_of = {token.token_id: token.text for token in spec.special_tokens}
    texts = {text_of[token_id]: token_id for token_id in spec.bos_ids if token_id in text_of}
    if not texts:
        return None
    begin = [{"SpecialToken": {"id": text, "type_id": 0}} for text in texts]
    first, second = ({"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [*begin, first],
        "pair": [*begin, first, second],
        "special_tokens": {text: {"id": text, "ids": [token_id], "tokens": [text]} for text, token_id in texts.items()},
    }


def _tokenizer_config(spec: TokenizerSpec, shape: ArchitectureConfig) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.max_context_len,
        "clean_up_tokenization_spaces": False,
        **spec.template_variables,
        **({} if spec.chat_template is None else {"chat_template": spec.chat_template}),
    }
