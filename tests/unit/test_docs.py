"""What README and DESIGN name exists: files, make targets, configuration keys. Prose can't be tested, names can."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster.openai_fields import (
    HARMLESS,
    UNSUPPORTED_IN_CHAT,
    UNSUPPORTED_IN_COMPLETION,
    UNSUPPORTED_IN_MESSAGE,
    UNSUPPORTED_ROLES,
)
from cluster.openai_models import ChatBody, CompletionBody, StreamOptions
from configs.load import describe

ROOT = Path(__file__).parents[2]
DOCUMENTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "DESIGN.md")}
PATH = re.compile(r"\b((?:configs|replicas|router|cluster|tests|infra)/[\w./-]*\w\.(?:py|yaml))\b")
KEY = re.compile(r"(?<!/)\b((?:model|engine|replicas|router|ingress)\.(?!py\b)[a-z_]+(?:\.[a-z_]+)?)(?:=|`)")
TARGET = re.compile(r"`make ([a-z-]+)")

both = pytest.mark.parametrize("text", DOCUMENTS.values(), ids=DOCUMENTS.keys())


@both
def test_every_file_that_is_named_exists(text):
    assert [path for path in PATH.findall(text) if not (ROOT / path).is_file()] == []


@both
def test_every_configuration_key_that_is_named_exists(text):
    keys = {setting.key for setting in describe()}
    sections = {key.rpartition(".")[0] for key in keys}
    assert [key for key in KEY.findall(text) if key not in keys | sections] == []


@both
def test_every_make_target_that_is_named_exists(text):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(TARGET.findall(text)) - targets == set()


def test_the_tree_in_the_design_lists_the_files_of_the_product_and_no_others():
    [tree] = re.findall(r"## Layout.*?```\n(.*?)```", DOCUMENTS["DESIGN.md"], re.DOTALL)
    files = {path.name for package in ("configs", "replicas", "router", "cluster") for path in (ROOT / package).rglob("*.py")}
    assert set(re.findall(r"\b(?<!\w)_*\w+\.py\b", tree)) ^ (files - {"__init__.py"}) == set()


# The table of request fields: | `field`, `field` (remark) | what becomes of them |


def fields_in_rows(verdict: str) -> set[str]:
    api = DOCUMENTS["README.md"].partition("## API")[2].partition("Errors have OpenAI's form")[0]
    rows = re.findall(r"^\| (.*) \| (.*) \|$", api, re.MULTILINE)
    return {field for fields, said in rows if said.startswith(verdict) for field in re.findall(r"`([a-z_]+)`", fields)}


def test_the_fields_documented_as_supported_are_those_that_the_api_declares():
    declared = ChatBody.model_fields.keys() | CompletionBody.model_fields.keys() | StreamOptions.model_fields.keys()
    assert fields_in_rows("supported") | fields_in_rows("`enable_thinking` alone") == declared


def test_the_fields_documented_as_refused_are_refused():
    refused = {*UNSUPPORTED_IN_CHAT, *UNSUPPORTED_IN_COMPLETION, *UNSUPPORTED_IN_MESSAGE, *UNSUPPORTED_ROLES}
    assert fields_in_rows("refused") - refused == set()


def test_the_fields_documented_as_without_effect_are_all_there_are():
    assert fields_in_rows("accepted, without effect") == HARMLESS
