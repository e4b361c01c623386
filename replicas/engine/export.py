"""A GGUF model as a directory in the Hugging Face layout, for engines that can't read the file itself (vLLM on a CPU)."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from configs.schema import ModelConfig
from replicas.engine.models.config import ArchitectureConfig
from replicas.engine.models.llama import LlamaModel
from replicas.engine.weights import Checkpoint, open_checkpoint
from replicas.errors import ConfigError
from replicas.model_source import architecture, eos_token_ids, model_revision, resolve
from replicas.tokenizer_files import TokenizerSpec, from_gguf

logger = logging.getLogger(__name__)

_DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
# What the name of an exported directory begins with, so that a change of what is written makes new ones.
_LAYOUT = "v1"


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
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=cache))
        logger.info("writing %s as %s", model.source, target)
        try:
            _write(model, dtype, scratch)
            scratch.rename(target)
        except OSError:
            if not target.is_dir():
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _write(model: ModelConfig, dtype: torch.dtype, folder: Path) -> None:
    shape, spec = architecture(model), from_gguf(resolve(model).path)
    if shape.rope.divisors is not None:
        raise ConfigError("model.source: this GGUF scales rotary positions; give a directory with config.json instead")
    recorder = _Recorder(open_checkpoint(resolve(model), shape), dtype)
    LlamaModel(shape, recorder, max_positions=1, device=torch.device("cpu"), dtype=dtype)
    save_file(recorder.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ends = eos_token_ids(model)
    for name, content in {
        "config.json": _config(shape, _DTYPE_NAMES[dtype], ends),
        "generation_config.json": {"eos_token_id": list(ends)},
        "tokenizer.json": _tokenizer(spec),
        "tokenizer_config.json": _tokenizer_config(spec, shape),
    }.items():
        (folder / name).write_text(json.dumps(content))


class _Recorder:
    """A checkpoint that keeps what a model asks of it: so the model itself says which tensors it is made of."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self.tensors: dict[str, torch.Tensor] = {}

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        found = self._checkpoint.tensor(name, shape).to(self._dtype).contiguous()
        self.tensors[name] = found
        return found

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
    return {**core, "decoder": byte_level, "post_processor": None, "truncation": None, "padding": None}


def _tokenizer_config(spec: TokenizerSpec, shape: ArchitectureConfig) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.max_context_len,
        "clean_up_tokenization_spaces": False,
        **spec.template_variables,
        **({} if spec.chat_template is None else {"chat_template": spec.chat_template}),
    }
