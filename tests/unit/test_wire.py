"""Frames and messages of the token path."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas import wire
from replicas.contract import (
    Delta,
    EngineStats,
    ErrorInfo,
    FinishReason,
    GenerationRequest,
    KVEvents,
    SamplingParams,
    StepTimeCoefficients,
    TokenLogprob,
)
from replicas.errors import ContextLengthError, OverloadedError, TrieserveError, rebuild

NONCE = bytes(32)
REQUEST = GenerationRequest(
    "r",
    (1, 2, 2**31),
    SamplingParams(5, logit_bias=((3, -1.5),), seed=2**63, stop_token_ids=(7,), num_logprobs=2),
    NONCE,
    (bytes(32), b"x" * 32),
    choice=1,
)
DELTA = Delta("r", (1, 2), FinishReason.STOP, (TokenLogprob(1, -0.1, ((1, -0.1),)),), 2, 16, 0.5, ErrorInfo("n", "m"))
STATS = EngineStats(num_running=3, finished_total={"stop": 2}, step_time=StepTimeCoefficients(1e-3, 1e-5, 1e-9, 1e-5))
FROM_CLIENT = [
    wire.Submit(1, REQUEST, "slot", 8),
    wire.Submit(2, REQUEST, None, 8),
    wire.Abort(1, FinishReason.STOP),
    wire.Credit(1, 5),
    wire.Subscribe(),
    wire.Ping(),
]
FROM_SERVER = [
    wire.Challenge(1, NONCE),
    wire.Welcome("boot", b"proof"),
    wire.Accepted(1),
    wire.Refused(1, ErrorInfo("RequestError", "no", "n", "c")),
    wire.Tokens(((1, (5,)), (2, (6, 7))), ((3, DELTA),)),
    wire.Snapshot(4, (NONCE,), True),
    wire.Events(KVEvents(5, (NONCE,), (b"y" * 32,), True)),
    wire.Report(STATS),
    wire.Pong(),
]
DECODERS = [wire.hello_decoder, wire.client_decoder, wire.server_decoder]


def _body(message) -> bytes:
    return wire.encode_frame(message)[4:]


@pytest.mark.parametrize("message", FROM_CLIENT, ids=lambda message: type(message).__name__)
def test_what_a_client_says_arrives_as_it_was(message):
    assert wire.client_decoder.decode(_body(message)) == message


@pytest.mark.parametrize("message", FROM_SERVER, ids=lambda message: type(message).__name__)
def test_what_a_server_says_arrives_as_it_was(message):
    assert wire.server_decoder.decode(_body(message)) == message


def test_before_the_handshake_a_server_understands_hello_alone():
    assert wire.hello_decoder.decode(_body(wire.Hello(NONCE, b"p"))) == wire.Hello(NONCE, b"p")
    for message in FROM_CLIENT:
        with pytest.raises(msgspec.ValidationError):
            wire.hello_decoder.decode(_body(message))


@pytest.mark.parametrize(
    "message",
    [wire.Hello(b"short", b""), wire.Credit(1, 0), wire.Credit(1, -5), wire.Submit(1, REQUEST, None, 0)],
    ids=["short nonce", "no credit", "negative credit", "no window"],
)
def test_values_that_would_break_the_other_end_are_refused(message):
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.Decoder(type(message)).decode(_body(message))


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_by_the_errors_that_a_channel_expects(data):
    for decoder in DECODERS:
        try:
            decoder.decode(data)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            pass


@given(st.data())
def test_a_damaged_message_is_refused_by_the_errors_that_a_channel_expects(data):
    body = bytearray(_body(data.draw(st.sampled_from(FROM_CLIENT + FROM_SERVER))))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    for decoder in DECODERS:
        try:
            decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            pass


def test_deep_nesting_is_refused_and_does_not_exhaust_the_stack():
    with pytest.raises((msgspec.MsgspecError, RecursionError)):
        wire.client_decoder.decode(b"\x92\x08" + b"\x91" * 100_000)


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(1, 30)))
def test_frames_are_found_however_the_network_cuts_them(bodies, cuts):
    data = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
    splitter, found = wire.FrameSplitter(40), []
    for size in [*cuts, len(data) + 1]:
        found += splitter.feed(data[:size])
        data = data[size:]
    assert found == bodies


def test_a_frame_over_the_limit_is_refused_by_its_header_alone():
    splitter = wire.FrameSplitter(100)
    with pytest.raises(wire.WireError, match="101 bytes"):
        list(splitter.feed((101).to_bytes(4, "big")))


def test_a_message_that_no_receiver_would_take_is_not_sent(monkeypatch):
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 10)
    with pytest.raises(wire.WireError, match="Snapshot"):
        wire.encode_frame(wire.Snapshot(1, (NONCE,), True))


def test_a_proof_fits_one_secret_one_handshake_and_one_direction():
    other = b"1" * 32
    proofs = [
        wire.client_proof(b"secret", NONCE, other),
        wire.client_proof(b"another", NONCE, other),
        wire.client_proof(b"secret", other, other),
        wire.client_proof(b"secret", NONCE, NONCE),
        wire.server_proof(b"secret", NONCE, other, ""),
        wire.server_proof(b"secret", NONCE, other, "boot"),
    ]
    assert len(set(proofs)) == len(proofs)


@pytest.mark.parametrize(
    "error",
    [
        ContextLengthError("too long", param="messages"),
        OverloadedError("full", retry_after_s=7.2),
        TrieserveError("x", code="y"),
    ],
)
def test_an_error_is_the_same_on_the_other_side(error):
    info = wire.to_error_info(error)
    again = rebuild(info.name, info.message, info.param, info.code, info.retry_after_s)
    assert (type(again), again.message, again.param, again.code) == (type(error), error.message, error.param, error.code)
    assert getattr(again, "retry_after_s", None) == getattr(error, "retry_after_s", None)
