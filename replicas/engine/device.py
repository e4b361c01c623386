"""What the machine offers: which device, which number format, how much memory. Asked once, when an engine loads."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from replicas.errors import ConfigError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_CPU_KV_SHARE = 0.25


def choose_device(name: str) -> torch.device:
    """Raises ConfigError if cuda is asked for and there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device=cuda, but torch finds no CUDA device here")
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bf16 where the device multiplies it natively; emulated it is slower than fp32."""
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        capabilities = torch.cpu.get_capabilities()
        native = any(capabilities.get(feature, False) for feature in ("avx512_bf16", "amx_bf16", "arm_bf16"))
    return torch.bfloat16 if native else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """As the configuration writes it: bf16, fp16 or fp32."""
    return next(name for name, known in _DTYPES.items() if known is dtype)


def kv_cache_budget_bytes(device: torch.device, gpu_memory_share: float, replicas_on_node: int) -> int:
    """Memory for a KV cache where none was configured; ask after the weights are loaded."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(total * gpu_memory_share) - (total - free)
    return int(free_memory_bytes() * _CPU_KV_SHARE) // max(replicas_on_node, 1)


def gpu_memory_bytes() -> tuple[int, int] | None:
    """(free, all) of this process's first GPU; None where it sees none."""
    return torch.cuda.mem_get_info() if torch.cuda.is_available() else None


def free_memory_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """What this process could still allocate: the machine's available memory, or its container's (cgroup v2) if less."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo = proc / "meminfo"
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        available = min(available, max(int(text) - int(used.read_text()), 0))
    return available
