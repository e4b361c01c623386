"""Starts peers and asks them, one at a time: `with Peer("openvino", "int8", models, threads=2) as peer: peer.decode(...)`.

`models` is the folder that prepare_models.py has filled. Every peer is a process of another interpreter, in a process group
of its own, so that ending a peer ends what it has started and nothing else.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from protocol import Job, Prompts

ROOT = Path(__file__).resolve().parents[3]
_HERE = Path(__file__).resolve().parent

# vLLM, which compiles, takes two minutes, and ten where torch emulates bf16.
_START_TIMEOUT_S = 3600.0 if os.environ.get("FULL") else 240.0
_ANSWER_TIMEOUT_S = 900.0
_QUIT_TIMEOUT_S = 30.0
_LOG_TAIL_CHARS = 3000


EMBEDDED = "builtin:smollm2-135m-instruct"  # for our own engine, which reads the shipped file


class PeerKind(NamedTuple):
    interpreter: str  # relative to the repository's root
    script: str
    precisions: Mapping[str, str]  # to the model's name below the folder of models


PEERS: Mapping[str, PeerKind] = {
    "llama_cpp": PeerKind(
        ".venv-peers/llama_cpp/bin/python",
        "llama_cpp_peer.py",
        {name: f"{name}.gguf" for name in ("bf16", "fp16", "q8_0", "q4_1")},
    ),
    "openvino": PeerKind(
        ".venv-peers/openvino/bin/python",
        "openvino_peer.py",
        {name: f"openvino-{name}" for name in ("fp16", "int8", "int4")},
    ),
    "vllm_cpu": PeerKind(".venv-vllm/bin/python", "vllm_cpu_peer.py", {"bf16": "safetensors-bf16"}),
    "trieserve": PeerKind(".venv/bin/python", "trieserve_peer.py", dict.fromkeys(("fp32", "bf16", "int8", "int4"), EMBEDDED)),
    "transformers": PeerKind(".venv/bin/python", "transformers_peer.py", {"bf16": "safetensors-bf16"}),
}

# Which of a peer's precisions are compared with which of ours.
ALIKE: Mapping[str, tuple[str, ...]] = {"bf16": ("bf16", "fp16"), "int8": ("int8", "q8_0"), "int4": ("int4", "q4_1")}


class PeerError(Exception):
    """A peer can't be started, has died, was too slow, or has refused a request."""


@dataclass(frozen=True)
class DecodeFigures:
    """`seconds` and `num_tokens` are of the time in which all sequences decoded; `total_s` has the prefill too."""

    seconds: float
    num_tokens: int
    total_s: float
    token_ids: list[list[int]]

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


class Peer:
    """A peer whose process runs within the `with` statement, from which on `load_s`, `options` and the like are known."""

    load_s: float  # from the process's start until it takes requests, less the time of its imports
    import_s: float
    version: str
    options: dict[str, Any]
    method: str

    def __init__(
        self,
        name: str,
        precision: str,
        models: Path,
        *,
        threads: int,
        max_sequences: int = 32,
        max_context: int = 1280,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises PeerError where the environment or the model is missing. `options` replace some of the peer's own choices."""
        kind = PEERS[name]
        self.name, self.precision = name, precision
        model = kind.precisions[precision]
        if model != EMBEDDED:
            model = str(models / model)
        # Not resolved: an environment's interpreter is a link, and what it links to knows nothing of the environment.
        self._interpreter, self._script = ROOT / kind.interpreter, _HERE / kind.script
        if not self._interpreter.exists():
            raise PeerError(f"{name}: there is no {kind.interpreter}; run `make bench-peers-setup`")
        if model != EMBEDDED and not Path(model).exists():
            raise PeerError(f"{name}: there is no model {model} for {precision}; run `make bench-peers-setup`")
        self._job = Job(model, precision, threads, max_sequences, max_context, options or {})

    def __enter__(self) -> Peer:
        self._log = tempfile.TemporaryFile(prefix="peer-")
        self._process = subprocess.Popen(
            [self._interpreter, self._script, self._job.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": str(self._job.threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
        )
        self._unread = b""
        try:
            ready = self._receive(_START_TIMEOUT_S)
        except BaseException:
            self._kill()
            raise
        self.load_s, self.import_s, self.version = ready["load_s"], ready["import_s"], ready["version"]
        self.options, self.method = ready["options"], ready["method"]
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self._send({"op": "quit"})
            self._process.wait(_QUIT_TIMEOUT_S)
        except (PeerError, subprocess.TimeoutExpired):
            pass
        finally:
            self._kill()

    def decode(self, prompts: Prompts, num_tokens: int) -> DecodeFigures:
        """Greedy, with all prompts at once, `num_tokens` for each whatever they are. Raises PeerError."""
        return DecodeFigures(**self._ask({"op": "decode", "prompts": prompts, "num_tokens": num_tokens}))

    def prefill(self, prompt: Sequence[int]) -> float:
        """Seconds to the first new token."""
        return float(self._ask({"op": "prefill", "prompt": prompt})["seconds"])

    def memory(self) -> int:
        """The peak so far of resident bytes, of the peer and its child processes."""
        return int(self._ask({"op": "memory"})["peak_rss_bytes"])

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._send(request)
        answer = self._receive(_ANSWER_TIMEOUT_S)
        if "error" in answer:
            raise self._failure(f"refused {request['op']}: {answer['error']}")
        return answer

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failure("has ended") from error

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        """The next line that is a JSON object: what a library prints while it is imported is passed over."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while True:
                line, found, rest = self._unread.partition(b"\n")
                if found:
                    self._unread = rest
                    if line.startswith(b"{"):
                        return dict(json.loads(line))
                    continue
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self._failure(f"has not answered within {timeout_s:.0f} s")
                more = os.read(self._process.stdout.fileno(), 1 << 16)
                if not more:
                    raise self._failure("has ended")
                self._unread += more

    def _failure(self, what: str) -> PeerError:
        self._log.seek(0)
        tail = self._log.read().decode(errors="replace")[-_LOG_TAIL_CHARS:]
        return PeerError(f"{self.name} ({self.precision}) {what}; the end of its log:\n{tail}")

    def _kill(self) -> None:
        """Whatever of its process group is left, such as an engine's worker."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            try:
                pipe.close()
            except OSError:  # what was still to be written, to a peer that has ended
                pass
