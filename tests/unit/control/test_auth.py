"""The handshake lets in exactly those who know secret and job, and sealed frames arrive once."""

from __future__ import annotations

import random

import msgspec
import pytest

from paceline.control.transport import auth
from paceline.control.transport.auth import CallerHandshake, ListenerHandshake, Session
from paceline.errors import AuthError, BadFrame, PacelineError, VersionMismatch

SECRET = b"s" * 32


def caller(secret=SECRET, **changes):
    fields = {"job_id": "j", "listener": "rank 3", "role": "worker", "rank": 1, "purpose": "p"}
    return CallerHandshake(secret, **(fields | changes))


def listener(secret=SECRET, job_id="j", name="rank 3"):
    return ListenerHandshake(secret, job_id=job_id, listener=name)


def shake(one: CallerHandshake, other: ListenerHandshake) -> tuple[Session, Session]:
    accepted = other.accept(one.answer(other.challenge(one.hello())))
    return one.finish(accepted), other.session


def test_hkdf_matches_the_test_vector_of_rfc_5869():
    key = auth.hkdf(b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)))
    assert key.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"


def test_both_sides_agree_and_can_talk():
    other = listener()
    near, far = shake(caller(), other)
    assert (other.caller.rank, other.caller.role, other.caller.purpose) == (1, "worker", "p")
    for text in (b"one", b"", b"three"):
        assert far.open(near.seal(text)) == text
        assert near.open(far.seal(text)) == text


@pytest.mark.parametrize(
    "other",
    [listener(secret=b"t" * 32), listener(job_id="k"), listener(name="rank 4")],
    ids=["secret", "job", "listener"],
)
def test_a_caller_refuses_a_listener_that_is_not_the_one_it_wants(other):
    one = caller()
    with pytest.raises(AuthError, match="not the rank 3 of job j with our secret"):
        one.answer(other.challenge(one.hello()))


def test_a_listener_refuses_a_wrong_proof_without_a_word():
    other = listener()
    other.challenge(caller().hello())
    wrong = msgspec.msgpack.encode(auth.Proof(b"x" * 32))
    with pytest.raises(AuthError):
        other.accept(wrong)
    assert not hasattr(other, "session")


def test_a_recorded_handshake_does_not_work_again():
    one, other = caller(), listener()
    hello = one.hello()
    proof = one.answer(other.challenge(hello))
    other.accept(proof)
    again = listener()
    again.challenge(hello)
    with pytest.raises(AuthError):
        again.accept(proof)


def test_a_listeners_own_proof_reflected_to_it_does_not_work():
    other = listener()
    challenge = msgspec.msgpack.decode(other.challenge(caller().hello()), type=auth.Challenge)
    with pytest.raises(AuthError):
        other.accept(msgspec.msgpack.encode(auth.Proof(challenge.proof)))


def test_claims_are_bound_to_the_proof():
    """A man in the middle who changes the rank in the hello gets nowhere."""
    one, other = caller(), listener()
    hello = msgspec.msgpack.decode(one.hello(), type=auth.Hello)
    forged = msgspec.structs.replace(hello, rank=0)
    with pytest.raises(AuthError):
        one.answer(other.challenge(msgspec.msgpack.encode(forged)))


def test_versions_are_compared_before_anything_else(monkeypatch):
    monkeypatch.setattr(auth, "PROTOCOL_VERSION", 2)
    one = caller()
    hello = one.hello()
    monkeypatch.setattr(auth, "PROTOCOL_VERSION", 1)
    other = listener()
    challenge = other.challenge(hello)
    with pytest.raises(VersionMismatch, match="speaks protocol 2, this process 1"):
        other.require_version()
    monkeypatch.setattr(auth, "PROTOCOL_VERSION", 2)
    with pytest.raises(VersionMismatch, match="protocol 1 there, 2 here"):
        one.answer(challenge)


def test_a_hello_of_a_future_version_need_not_look_like_ours():
    other = listener()
    other.challenge(msgspec.msgpack.encode({"version": 9, "greeting": "hi"}))
    with pytest.raises(VersionMismatch):
        other.require_version()


def test_short_nonces_are_refused():
    hello = auth.Hello(auth.PROTOCOL_VERSION, "worker", 0, "p", b"short")
    with pytest.raises(BadFrame, match="nonce of 5 bytes"):
        listener().challenge(msgspec.msgpack.encode(hello))


@pytest.mark.parametrize("name", [b"\xa2\x80\x80", b"\x91" * 3000 + b"\xc0"], ids=["text", "depth"])
def test_a_hello_that_cannot_be_read_is_a_bad_frame(name: bytes):
    hello = auth.Hello(auth.PROTOCOL_VERSION, "XX", 0, "p", b"n" * auth.NONCE_BYTES)
    message = msgspec.msgpack.encode(hello).replace(b"\xa2XX", name)
    with pytest.raises(BadFrame, match="not a Hello|not a _Version"):
        listener().challenge(message)


@pytest.mark.parametrize("attack", ["replay", "reflect", "reorder", "flip", "truncate"])
def test_frames_that_are_not_exactly_the_next_one_are_refused(attack):
    near, far = shake(caller(), listener())
    first, second = near.seal(b"first"), near.seal(b"second")
    if attack == "reflect":
        with pytest.raises(AuthError):
            near.open(first)
        return
    if attack == "replay":
        far.open(first)
        bad = first
    elif attack == "reorder":
        bad = second
    elif attack == "flip":
        bad = bytes([first[0] ^ 1]) + first[1:]
    else:
        bad = first[:-1]
    with pytest.raises(AuthError, match="wrong tag"):
        far.open(bad)


def test_random_bytes_never_get_in_and_only_raise_our_errors():
    rng = random.Random(1)
    good = caller().hello()
    for _ in range(2000):
        other = listener()
        message = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            message[rng.randrange(len(message))] = rng.randrange(256)
        try:
            other.challenge(bytes(message[: rng.randrange(len(message) + 1)]))
            other.accept(rng.randbytes(rng.randrange(80)))
        except PacelineError:
            continue
        pytest.fail(f"accepted {bytes(message)!r}")
