"""The layers above the file: `replicas.num=3` of a command line and TRIESERVE_REPLICAS__NUM=3 of an environment.

Both name a dotted key and hold a value in YAML's notation (`3`, `true`, `[a, b]`), except where the key is known to hold
text: there every character counts, so that a secret with a `#` in it survives.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from configs.reflect import Shape, dials_of
from configs.schema import AppConfig
from replicas.errors import ConfigError

ENVIRONMENT_PREFIX = "TRIESERVE_"
_LEVEL_MARK = "__"


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe types, without the two surprises of PyYAML: a repeated key overwrites, and `1e-3` is text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} appears twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_yaml(text: str, origin: str) -> Any:
    """One YAML document. Raises ConfigError naming `origin`, and the line where there is one."""
    try:
        loader = _StrictLoader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{origin}{line}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{origin}: not readable as YAML: {error}") from None


def from_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """`["replicas.num=3", ...]` as a nested mapping; of two for one key the later counts. Raises ConfigError."""
    pairs = []
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"override {assignment!r}: write it as key=value, for instance replicas.num=3")
        pairs.append((key.strip(), text))
    return _nest(pairs)


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The variables that are meant for the configuration, as a nested mapping. Raises ConfigError.

    A variable without `__` counts only if it names a top-level key: TRIESERVE_DATA belongs to the benchmarks, and
    Kubernetes sets TRIESERVE_PORT and more in every pod beside a Service called trieserve.
    """
    pairs = []
    for variable, text in sorted(environment.items()):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        levels = variable.removeprefix(ENVIRONMENT_PREFIX).lower().split(_LEVEL_MARK)
        if len(levels) > 1 or levels[0] in dials_of(AppConfig):
            pairs.append((".".join(levels), text))
    return _nest(pairs)


def merge(base: Any, over: Any) -> Any:
    """`over` on top of `base`, section by section; leaves and lists are replaced as a whole, an empty section adds nothing."""
    if over is None:
        return base
    if not isinstance(base, Mapping) or not isinstance(over, Mapping):
        return over
    return {**base, **{key: merge(base.get(key), value) for key, value in over.items()}}


def _nest(pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, text in pairs:
        value: Any = text if _holds_text(key) else parse_yaml(text, key)
        for level in reversed(key.split(".")):
            value = {level: value}
        nested = merge(nested, value)
    return nested


def _holds_text(key: str) -> bool:
    section: Any = AppConfig
    *sections, leaf = key.split(".")
    for name in sections:
        dial = dials_of(section).get(name)
        if dial is None or dial.shape is not Shape.SECTION:
            return False
        section = dial.type
    dial = dials_of(section).get(leaf)
    return dial is not None and dial.shape is Shape.LEAF and dial.type is str
