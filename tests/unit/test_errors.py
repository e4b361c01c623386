"""Errors keep their identity over process boundaries, and each has what an HTTP answer needs."""

from __future__ import annotations

import re

import pytest

from replicas import errors
from replicas.errors import (
    EngineError,
    NoReplicaError,
    OverloadedError,
    RequestError,
    TrieserveError,
    UnsupportedError,
    rebuild,
)


def all_errors(root: type[TrieserveError] = TrieserveError) -> list[type[TrieserveError]]:
    """Depth first, as they are drawn; without what other modules may derive."""
    children = [child for child in root.__subclasses__() if child.__module__ == errors.__name__]
    return [root, *(found for child in children for found in all_errors(child))]


def crossed(error: TrieserveError) -> TrieserveError:
    return rebuild(type(error).__name__, error.message, error.param, error.code)


@pytest.mark.parametrize("error_type", all_errors())
def test_every_error_survives_a_process_boundary(error_type: type[TrieserveError]) -> None:
    error = crossed(error_type("what happened", code="a_code"))
    assert type(error) is error_type
    assert (error.message, error.code, str(error)) == ("what happened", "a_code", "what happened")
    assert (error.status, error.kind) == (error_type.status, error_type.kind)


@pytest.mark.parametrize("error_type", all_errors(RequestError))
def test_a_request_error_still_names_the_parameter_at_fault(error_type: type[RequestError]) -> None:
    assert crossed(error_type("too hot", param="temperature")).param == "temperature"


@pytest.mark.parametrize("error_type", all_errors())
def test_a_missing_code_becomes_the_types_own(error_type: type[TrieserveError]) -> None:
    assert rebuild(error_type.__name__, "x", None, None).code == error_type.code


@pytest.mark.parametrize("error_type", all_errors(OverloadedError))
def test_an_overload_from_elsewhere_can_still_say_when_to_come_back(error_type: type[OverloadedError]) -> None:
    error = rebuild(error_type.__name__, "busy", None, None)
    assert isinstance(error, OverloadedError)
    assert error.retry_after_s > 0


@pytest.mark.parametrize("name", ["KeyError", "Exception", "", "rebuild", "__import__"])
def test_an_unknown_name_is_a_bug_of_the_engine_and_never_looked_up(name: str) -> None:
    error = rebuild(name, "x", "p", None)
    assert type(error) is EngineError
    assert error.status == 500


def test_a_code_belongs_to_one_error_and_not_to_its_type() -> None:
    assert UnsupportedError("x", code="other").code == "other"
    assert UnsupportedError("x").code == "unsupported_parameter"
    assert NoReplicaError("x", retry_after_s=3.0).retry_after_s == 3.0


@pytest.mark.parametrize("error_type", all_errors())
def test_status_and_words_fit_what_clients_expect(error_type: type[TrieserveError]) -> None:
    assert 400 <= error_type.status <= 599
    assert issubclass(error_type, RequestError) == (error_type.status < 500)
    assert re.fullmatch(r"[a-z][a-z_]*", error_type.code)
    assert re.fullmatch(r"[a-z][a-z_]*", error_type.kind)


def test_the_drawn_tree_is_the_real_one() -> None:
    assert errors.__doc__ is not None
    drawn = re.findall(r"^[ |]*(?:\+-- )?(\w+(?:Error|TooLarge))\b(?: +(\d{3}))?", errors.__doc__, re.MULTILINE)
    assert [name for name, _ in drawn] == [error_type.__name__ for error_type in all_errors()]
    statuses = {error_type.__name__: error_type.status for error_type in all_errors()}
    assert all(statuses[name] == int(status) for name, status in drawn if status)
