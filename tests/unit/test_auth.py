"""Who is let in, and that tenants are told apart by something only the server can make."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.auth import ANONYMOUS, Authenticator, hash_api_key
from configs.schema import ApiKey
from replicas.errors import AuthenticationError

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789"


@pytest.fixture
def authenticator() -> Authenticator:
    return Authenticator([ApiKey("alice", hash_api_key(ALICE)), ApiKey("bob", hash_api_key(BOB).upper())])


def test_each_key_finds_its_own_tenant(authenticator):
    assert authenticator.identify(f"Bearer {ALICE}").name == "alice"
    assert authenticator.identify(f"Bearer {BOB}").name == "bob"


def test_the_scheme_is_read_without_regard_to_case_and_spaces(authenticator):
    assert authenticator.identify(f"  bearer   {ALICE} ").name == "alice"


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", f"Basic {ALICE}", ALICE, f"Bearer {ALICE}x", "Bearer \ud800"]
)
def test_anything_but_a_known_key_is_refused_with_401(authenticator, header):
    with pytest.raises(AuthenticationError) as caught:
        authenticator.identify(header)
    assert caught.value.status == 401


@given(st.text(min_size=1))
def test_a_refusal_never_repeats_what_was_sent(sent):
    with pytest.raises(AuthenticationError) as caught:
        Authenticator([ApiKey("alice", hash_api_key(ALICE))]).identify(f"Bearer canary-{sent}")
    assert "canary" not in caught.value.message


def test_without_keys_everybody_is_anonymous_whatever_the_header_says():
    assert Authenticator([]).identify(None) == Authenticator([]).identify("Bearer x") == ANONYMOUS


def test_salts_differ_between_tenants_and_do_not_change_between_ingresses(authenticator):
    """cases NS06: the salt is the server's own, and every ingress derives the same."""
    alice, bob = authenticator.identify(f"Bearer {ALICE}"), authenticator.identify(f"Bearer {BOB}")
    assert len({alice.salt, bob.salt, ANONYMOUS.salt}) == 3
    assert Authenticator([ApiKey("alice", hash_api_key(ALICE))]).identify(f"Bearer {ALICE}").salt == alice.salt


def test_the_salt_is_not_the_digest_in_the_configuration(authenticator):
    assert authenticator.identify(f"Bearer {ALICE}").salt != hash_api_key(ALICE)


def test_every_key_is_compared_even_after_one_fitted(authenticator, monkeypatch):
    compared = []

    def compare(a: str, b: str) -> bool:
        compared.append(a)
        return a == b

    monkeypatch.setattr("cluster.auth.hmac.compare_digest", compare)
    authenticator.identify(f"Bearer {ALICE}")
    assert len(compared) == 2
