"""The command line: `python -m cluster up|check|status|plan|quantize|build|hash-key`. Each command has a file of its own."""

from __future__ import annotations

import argparse
import getpass
import importlib
import sys
from collections.abc import Callable, Sequence

from cluster.auth import hash_api_key
from configs.load import load
from configs.schema import EMBEDDED_MODEL, AppConfig, EngineConfig
from replicas.errors import TrieserveError

DEFAULT_URL = "http://127.0.0.1:8000"


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="python -m cluster", description="Trieserve: an LLM serving cluster on Ray.")
    commands = root.add_subparsers(dest="command", required=True)

    def with_config(name: str, help: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help)
        command.add_argument("config_file", nargs="?", metavar="CONFIG", help="YAML file; without one, the defaults")
        command.add_argument("--config", dest="config_option", metavar="CONFIG", help="the same, as an option")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides, e.g. replicas.num=3")
        return command

    with_config("up", "start the app and serve; on RAY_ADDRESS's cluster if set, else on one of its own until Ctrl-C")
    check = with_config("check", "check a configuration and say what it needs, without starting anything")
    check.add_argument("--explain", action="store_true", help="list every key with its meaning, default and limits")
    check.add_argument("--strict", action="store_true", help="a path that isn't on this machine is a fault, not a note")
    build = with_config("build", "write a Ray Serve config file for `serve deploy`")
    build.add_argument("-o", "--output", default="-", help="file to write; - is standard output")

    status = commands.add_parser("status", help="ask a running app how it is")
    status.add_argument("--url", default=DEFAULT_URL)
    status.add_argument("--json", action="store_true", help="one JSON object instead of a table")

    _add_plan(commands.add_parser("plan", help="what a model takes of a memory in each precision, and how many users fit"))

    quantize = commands.add_parser("quantize", help="write a model in few bits, as a directory that loads faster")
    quantize.add_argument("--model", default=EMBEDDED_MODEL, help="as model.source: a GGUF file, a directory, or builtin:...")
    quantize.add_argument("--format", required=True, choices=("int8", "int4"), help="int4 keeps a GGUF's Q4_0, Q4_1 and Q8_0")
    quantize.add_argument("--output", required=True, metavar="DIR", help="a directory that is empty or doesn't exist")

    commands.add_parser("hash-key", help="read an API key and print the sha256 for ingress.api_keys")
    return root


def _add_plan(plan: argparse.ArgumentParser) -> None:
    engine = EngineConfig()
    add = plan.add_argument
    add("--model", default=EMBEDDED_MODEL, help="as model.source; a config.json, or a directory with no more, will do")
    add("--memory-gb", type=float, required=True, help="GiB (2**30 bytes, as nvidia-smi and cgroups count) of one device")
    add("--devices", type=int, default=1, help="devices of that memory, which share the model")
    add("--max-model-len", type=int, default=0, help="tokens of the longest request, which must fit; 0: what fits")
    add("--quantization", default="", choices=("fp32", "bf16", "int8", "int4", "shipped"), help="of weights; shipped: a GGUF's")
    add("--kv-cache-dtype", default="", choices=("fp32", "bf16", "int8"), help="of keys and values")
    add("--max-num-seqs", type=int, default=engine.max_num_seqs, help="as engine.max_num_seqs")
    add("--max-num-batched-tokens", type=int, default=engine.max_num_batched_tokens, help="as the key of engine")
    add("--runtime-gb", type=float, default=0.5, help="GiB that Python, torch and their libraries take")
    add("--device", choices=("cpu", "cuda"), help="whose sizes: cpu, our native kernels'; cuda, torch's. Several are cuda")
    add("--json", action="store_true", help="one JSON object instead of tables")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        return _COMMANDS[arguments.command](arguments)
    except TrieserveError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


Command = Callable[[argparse.Namespace], int]


def _load(arguments: argparse.Namespace) -> AppConfig:
    path, overrides = arguments.config_option, list(arguments.overrides)
    if arguments.config_file is not None:
        # `up replicas.num=3` has no file: what contains "=" is an override wherever it stands.
        if "=" in arguments.config_file:
            overrides.insert(0, arguments.config_file)
        else:
            path = path or arguments.config_file
    return load(path, overrides)


def _with_config(module: str, function: str, *options: str) -> Command:
    """Import late: `check` must not need Ray, nor `hash-key` anything."""

    def run(arguments: argparse.Namespace) -> int:
        call = getattr(importlib.import_module(module), function)
        call(_load(arguments), **{option: getattr(arguments, option) for option in options})
        return 0

    return run


def _status(arguments: argparse.Namespace) -> int:
    call = importlib.import_module("cluster.status").status
    ok: bool = call(arguments.url, as_json=arguments.json)
    return 0 if ok else 1


def _plan(arguments: argparse.Namespace) -> int:
    importlib.import_module("cluster.plan").run(**{key: value for key, value in vars(arguments).items() if key != "command"})
    return 0


def _quantize(arguments: argparse.Namespace) -> int:
    run = importlib.import_module("cluster.quantize").run
    run(model=arguments.model, format=arguments.format, output=arguments.output)
    return 0


def _hash_key(_arguments: argparse.Namespace) -> int:
    key = getpass.getpass("API key: ") if sys.stdin.isatty() else sys.stdin.readline().strip()
    print(hash_api_key(key))
    return 0


_COMMANDS: dict[str, Command] = {
    "up": _with_config("cluster.launch", "up"),
    "check": _with_config("cluster.check", "check", "explain", "strict"),
    "build": _with_config("cluster.build_config", "build", "output"),
    "status": _status,
    "plan": _plan,
    "quantize": _quantize,
    "hash-key": _hash_key,
}


if __name__ == "__main__":
    sys.exit(main())
