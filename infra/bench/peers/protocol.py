"""What the driver and the peers say to each other, and how every peer is timed. Standard library only: any interpreter runs it.

A peer is started with one argument, a Job as JSON, and then talks JSON lines over standard input and output:

    <- {"ready": true, "load_s": s, "import_s": s, "version": v, "options": {...}, "method": text}
    -> {"op": "decode", "prompts": [[id, ...], ...], "num_tokens": n}
    <- {"seconds": s, "num_tokens": n, "total_s": s, "token_ids": [[id, ...], ...]}
    -> {"op": "prefill", "prompt": [id, ...]}
    <- {"seconds": s}                 from the request to the prompt's first new token
    -> {"op": "memory"}
    <- {"peak_rss_bytes": n}          of the peer and its child processes since it started
    -> {"op": "quit"}

A request that fails is answered by {"error": text}; the peer stays.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Job:
    """What a peer loads, and for how much it makes room: `max_sequences` at once of `max_context` tokens, answers included."""

    model: str
    precision: str
    threads: int
    max_sequences: int = 32
    max_context: int = 1280
    options: Mapping[str, Any] = field(default_factory=dict)  # of that engine alone, instead of what its script chooses

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class DecodeWindow:
    """The stretch of a batch in which every sequence decodes.

    It begins when the last sequence has its first token, and so no prefill is in it, and ends when the first sequence has all
    of its tokens, and so no step with a smaller batch is in it. Where an engine staggers its prompts, tokens that the early
    ones get meanwhile are outside.
    """

    def __init__(self, num_tokens: int) -> None:
        self._target = num_tokens
        self._begin: tuple[float, int] | None = None
        self._end: tuple[float, int] | None = None

    def note(self, counts: Sequence[int], at_s: float | None = None) -> None:
        """After a step: how many tokens each sequence of the batch has, now or at a time by a clock of the engine's own."""
        if self._end is not None:
            return
        step = (time.perf_counter() if at_s is None else at_s, sum(counts))
        if self._begin is None:
            if min(counts) < 1:
                return
            self._begin = step
        if max(counts) >= self._target:
            self._end = step

    def figures(self) -> tuple[float, int]:
        """Seconds, and the tokens of all sequences that came in them; both are 0 where one token was asked for."""
        if self._begin is None or self._end is None:
            raise RuntimeError("the sequences of the batch never decoded together")
        return self._end[0] - self._begin[0], self._end[1] - self._begin[1]


class Engine(Protocol):
    """What a peer's script implements. Its constructor takes the Job and loads the model."""

    version: str
    options: dict[str, Any]
    method: str  # how its steps are told apart

    def generate(self, prompts: Prompts, num_tokens: int, window: DecodeWindow) -> list[list[int]]:
        """`num_tokens` greedy tokens for each prompt, whatever they are; all prompts in one batch, each step noted in `window`.

        Nothing is kept of a prompt for the next call.
        """


def serve(open_engine: Callable[[Job], Engine]) -> None:
    """Answers requests until told to quit or the driver is gone. Called at a script's end: the time before is its imports."""
    began = time.perf_counter()
    import_s = _process_age_s()
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what engines print, also from C++, must not come between the answers
    engine = open_engine(Job(**json.loads(sys.argv[1])))
    ready = {"ready": True, "load_s": time.perf_counter() - began, "import_s": import_s}
    _send(answers, ready | {"version": engine.version, "options": engine.options, "method": engine.method})
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "quit":
            break
        try:
            _send(answers, _HANDLERS[request.pop("op")](engine, **request))
        except Exception as error:
            traceback.print_exc()
            _send(answers, {"error": f"{type(error).__name__}: {error}"})


def _send(answers: Any, message: Mapping[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _decode(engine: Engine, prompts: Prompts, num_tokens: int) -> dict[str, Any]:
    window = DecodeWindow(num_tokens)
    began = time.perf_counter()
    token_ids = engine.generate(prompts, num_tokens, window)
    total_s = time.perf_counter() - began
    lengths = {len(ids) for ids in token_ids}
    if lengths != {num_tokens}:
        raise RuntimeError(f"asked for {num_tokens} tokens a sequence, got {sorted(lengths)}")
    seconds, counted = window.figures()
    return {"seconds": seconds, "num_tokens": counted, "total_s": total_s, "token_ids": token_ids}


def _prefill(engine: Engine, prompt: Sequence[int]) -> dict[str, Any]:
    return {"seconds": _decode(engine, [prompt], 1)["total_s"]}


def _memory(engine: Engine) -> dict[str, Any]:
    """Pages that a parent and its children share are counted for each of them."""
    return {"peak_rss_bytes": sum(_peak_rss_bytes(pid) for pid in _family(os.getpid()))}


_HANDLERS: dict[str, Callable[..., dict[str, Any]]] = {"decode": _decode, "prefill": _prefill, "memory": _memory}


def _process_age_s() -> float:
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


def _family(root: int) -> set[int]:
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:  # that process has ended since
            continue
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family


def _peak_rss_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
