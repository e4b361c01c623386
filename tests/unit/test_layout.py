"""The shape of the tree: which way imports point, where Ray, torch and vLLM may appear, how large a file may grow.

A rule that no test checks is forgotten within a month. Each failure lists `file:line` of what breaks the rule.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("configs", "replicas", "router", "cluster")  # each may import those before it
FOLDERS = (*PACKAGES, "tests", "infra")
MAX_FILE_LINES = 400
MAX_FUNCTION_STATEMENTS = 50

# Leaf of the whole tree, the standard library alone: even the configuration raises its errors.
ERRORS_MODULE = "replicas.errors"
ROUTER_SEES_OF_REPLICAS = {f"replicas.{name}" for name in ("contract", "blocks", "errors", "step_time", "wire", "link")}

RAY_FILES = {
    "replicas/deployment.py",
    "router/serve_router.py",
    "cluster/app.py",
    "cluster/ingress.py",
    "cluster/serve_backend.py",
    "cluster/launch.py",
    "cluster/status.py",
    "cluster/__main__.py",
}
VLLM_FILES = {"replicas/vllm_support/llm.py", "replicas/vllm_support/installed.py"}
TORCH_FOLDER = "replicas/engine/"
# The last two set Ray's and vLLM's variables, before those are imported.
ENVIRONMENT_FILES = {"configs/load.py", "cluster/launch.py", "replicas/vllm_support/start.py"}

# They decide: they take `now` as an argument and return a value, so that tests and simulations run them on any clock.
PURE_FILES = {
    "configs/check.py",
    "replicas/admission.py",
    "replicas/blocks.py",
    "replicas/contract.py",
    "replicas/errors.py",
    "replicas/memory_plan.py",
    "replicas/step_time.py",
    "replicas/vllm_support/kv_events.py",
    "replicas/vllm_support/memory.py",
    "replicas/vllm_support/options.py",
    "replicas/vllm_support/outputs.py",
    "replicas/vllm_support/sampling.py",
    "replicas/vllm_support/telemetry.py",
    "replicas/engine/step.py",
    "replicas/engine/sequence.py",
    "replicas/engine/scheduler.py",
    "replicas/engine/block_pool.py",
    "replicas/engine/capacity.py",
    "router/core.py",
    "router/fleet.py",
    "router/policy.py",
    "router/trie.py",
}
NOT_IN_PURE = {"time", "datetime", "random", "threading", "asyncio", "socket", "ray", "torch", "vllm", "httpx", "fastapi"}
NO_TORCH_IN_ENGINE = PURE_FILES | {"replicas/engine/engine.py"}

UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle"}
UNSAFE_CALLS = {"eval", "exec", "__import__", "torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system"}
ENVIRONMENT_ACCESS = {"os.environ", "os.environb", "os.getenv", "os.putenv"}


@dataclass(frozen=True)
class Source:
    path: str  # relative to the root, with slashes
    text: str = field(repr=False)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text, self.path)))

    @property
    def package(self) -> str:
        return self.path.split("/")[0]

    @cached_property
    def imports(self) -> list[tuple[int, str]]:
        """(line, module) of every import, wherever it stands; `from a import b` counts as `a.b` too if that is a module."""
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                submodules = [f"{module}.{alias.name}" for alias in node.names if _is_ours(f"{module}.{alias.name}")]
                found += [(node.lineno, name) for name in submodules or [module]]
        return found

    def importing(self, *libraries: str) -> list[str]:
        return [f"{self.path}:{line} imports {name}" for line, name in self.imports if name.split(".")[0] in libraries]


def _is_ours(module: str) -> bool:
    path = ROOT / module.replace(".", "/")
    return module.split(".")[0] in PACKAGES and (path.with_suffix(".py").is_file() or (path / "__init__.py").is_file())


def _dotted(node: ast.AST) -> str:
    """`eval` and `os.environ` as they are written; of anything else nothing."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _read() -> Iterator[Source]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def everything() -> list[Source]:
    return list(_read())


@pytest.fixture(scope="module")
def product(everything) -> list[Source]:
    return [source for source in everything if source.package in PACKAGES]


def _ours(source: Source) -> list[tuple[int, str]]:
    return [(line, name) for line, name in source.imports if name.split(".")[0] in FOLDERS]


# Imports


def test_imports_point_one_way(product):
    wrong = [
        f"{source.path}:{line} imports {name}"
        for source in product
        for line, name in _ours(source)
        if name.split(".")[0] not in PACKAGES[: PACKAGES.index(source.package) + 1] and name != ERRORS_MODULE
    ]
    assert wrong == []


def test_the_errors_that_everybody_imports_import_nobody(product):
    [errors] = [source for source in product if source.path == "replicas/errors.py"]
    assert [name for _, name in errors.imports] == ["__future__"]


def test_the_router_sees_only_the_light_part_of_replicas(product):
    wrong = [
        f"{source.path}:{line} imports {name}"
        for source in product
        if source.package == "router"
        for line, name in _ours(source)
        if name.startswith("replicas") and name not in ROUTER_SEES_OF_REPLICAS
    ]
    assert wrong == []


def test_a_process_that_only_routes_never_loads_torch(product):
    """Directly or through what it imports: an ingress starts in a second and in a few hundred megabytes."""
    modules = {source.path.removesuffix(".py").replace("/", "."): source for source in product}
    reached = {name for name in modules if name.startswith("router.")}
    frontier = set(reached)
    while frontier:
        frontier = {name for module in frontier for _, name in modules[module].imports if name in modules} - reached
        reached |= frontier
    assert [hit for module in sorted(reached) for hit in modules[module].importing("torch")] == []


def test_imports_are_written_with_full_paths(everything):
    relative = [
        f"{source.path}:{node.lineno}"
        for source in everything
        for node in source.nodes
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]
    assert relative == []


def test_ray_appears_in_the_edge_files_alone(product):
    assert [hit for source in product if source.path not in RAY_FILES for hit in source.importing("ray")] == []


def test_vllm_appears_in_one_file_alone(product):
    assert [hit for source in product if source.path not in VLLM_FILES for hit in source.importing("vllm")] == []


def test_torch_appears_below_the_engine_alone_and_not_where_it_decides(product):
    outside = [source for source in product if not source.path.startswith(TORCH_FOLDER) or source.path in NO_TORCH_IN_ENGINE]
    assert [hit for source in outside for hit in source.importing("torch")] == []


def test_unit_tests_start_neither_ray_nor_torch(everything):
    unit = [source for source in everything if source.path.startswith("tests/unit/")]
    assert [hit for source in unit for hit in source.importing("torch", "ray", "vllm")] == []


def test_what_decides_has_no_clock_no_thread_and_no_network(product):
    pure = [source for source in product if source.path in PURE_FILES]
    assert [hit for source in pure for hit in source.importing(*NOT_IN_PURE)] == []


# Safety


def test_nothing_unpickles_or_evaluates(everything):
    """cases NS01, TL01: no pickle, eval, torch.load or unsafe YAML, in the product or around it."""
    wrong = [hit for source in everything for hit in source.importing(*UNSAFE_MODULES)]
    for source in everything:
        for node in source.nodes:
            if not isinstance(node, ast.Call):
                continue
            if _dotted(node.func) in UNSAFE_CALLS:
                wrong.append(f"{source.path}:{node.lineno} calls {_dotted(node.func)}")
    assert wrong == []


def test_the_environment_is_read_in_one_file(product):
    wrong = []
    for source in product:
        if source.path in ENVIRONMENT_FILES:
            continue
        for node in source.nodes:
            if _dotted(node) in ENVIRONMENT_ACCESS:
                wrong.append(f"{source.path}:{node.lineno}")
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                wrong += [f"{source.path}:{node.lineno}" for alias in node.names if "env" in alias.name]
    assert wrong == []


# Size


def test_no_file_outgrows_the_fence(everything):
    sizes = {source.path: len(source.text.splitlines()) for source in everything}
    assert {path: lines for path, lines in sizes.items() if lines > MAX_FILE_LINES} == {}


def test_no_function_outgrows_the_fence(everything):
    wrong = {}
    for source in everything:
        for node in source.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                statements = sum(isinstance(inner, ast.stmt) for inner in ast.walk(node)) - 1
                if statements > MAX_FUNCTION_STATEMENTS:
                    wrong[f"{source.path}:{node.lineno} {node.name}"] = statements
    assert wrong == {}


# Packages


def test_the_packages_listed_are_the_packages_there_are(product):
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    on_disk = {str(Path(source.path).parent).replace("/", ".") for source in product}
    assert sorted(listed) == sorted(on_disk)


def test_every_package_has_an_init_that_is_a_map_and_nothing_else(product):
    folders = {str(Path(source.path).parent) for source in product}
    maps = {str(Path(source.path).parent): source for source in product if source.path.endswith("__init__.py")}
    assert folders == set(maps)
    wrong = []
    for source in maps.values():
        tree = ast.parse(source.text)
        if len(tree.body) != 1 or not ast.get_docstring(tree):
            wrong.append(source.path)
    assert wrong == []


def test_the_files_that_the_rules_name_exist(product):
    paths = {source.path for source in product}
    assert (RAY_FILES | PURE_FILES | ENVIRONMENT_FILES) - paths == set()
