"""The signed conversation: both ends prove the secret, and nothing altered, replayed or foreign gets through."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_cluster.errors import AuthenticationError
from hvd_cluster.rendezvous.session import SignedSession

SECRET = b"s" * 32


def shake_hands(opener: SignedSession, accepter: SignedSession) -> None:
    for _ in range(3):
        deliver(opener, accepter)
        deliver(accepter, opener)


def deliver(source: SignedSession, target: SignedSession) -> list[bytes]:
    data = bytes(source.outgoing)
    source.outgoing.clear()
    return target.feed(data)


@pytest.fixture
def pair() -> tuple[SignedSession, SignedSession]:
    opener, accepter = SignedSession(SECRET, accepts=False), SignedSession(SECRET, accepts=True)
    shake_hands(opener, accepter)
    assert opener.established
    assert accepter.established
    return opener, accepter


def test_messages_arrive_in_both_directions_in_order(pair: tuple[SignedSession, SignedSession]) -> None:
    opener, accepter = pair
    for message in (b"", b"one", b"x" * 100_000):
        opener.seal(message)
    assert deliver(opener, accepter) == [b"", b"one", b"x" * 100_000]
    accepter.seal(b"back")
    assert deliver(accepter, opener) == [b"back"]


@given(st.lists(st.binary(max_size=200), max_size=5), st.lists(st.integers(1, 64), min_size=1, max_size=8))
def test_any_fragmentation_gives_the_same_messages(messages: list[bytes], cuts: list[int]) -> None:
    opener, accepter = SignedSession(SECRET, accepts=False), SignedSession(SECRET, accepts=True)
    deliver(accepter, opener)
    sent = bytes(opener.outgoing)
    opener.outgoing.clear()
    # The opener is established only by the accepter's proof, which needs the opener's challenge first.
    accepter.feed(sent)
    deliver(accepter, opener)
    for message in messages:
        opener.seal(message)
    stream, received, position = bytes(opener.outgoing), [], 0
    while position < len(stream):
        step = cuts[position % len(cuts)]
        received += accepter.feed(stream[position : position + step])
        position += step
    assert received == messages


def test_a_peer_with_another_secret_is_refused_by_both_ends() -> None:
    opener, accepter = SignedSession(SECRET, accepts=False), SignedSession(b"t" * 32, accepts=True)
    with pytest.raises(AuthenticationError, match="another job"):
        shake_hands(opener, accepter)
    assert not opener.established
    assert not accepter.established


def test_a_stranger_is_refused_at_its_first_bytes() -> None:
    with pytest.raises(AuthenticationError, match="protocol"):
        SignedSession(SECRET, accepts=True).feed(b"GET / HTTP/1.1")


def test_an_echo_of_our_own_challenge_is_refused() -> None:
    accepter = SignedSession(SECRET, accepts=True)
    with pytest.raises(AuthenticationError, match="our own challenge"):
        accepter.feed(bytes(accepter.outgoing))


@pytest.mark.parametrize("position", [8, 20, 45], ids=["length's neighbour", "signature", "payload"])
def test_an_altered_message_is_refused(pair: tuple[SignedSession, SignedSession], position: int) -> None:
    opener, accepter = pair
    opener.seal(b"payload")
    altered = bytearray(opener.outgoing)
    altered[position] ^= 1
    with pytest.raises(AuthenticationError, match="signature"):
        accepter.feed(bytes(altered))


def test_a_replayed_message_is_refused(pair: tuple[SignedSession, SignedSession]) -> None:
    opener, accepter = pair
    opener.seal(b"pay 1")
    recorded = bytes(opener.outgoing)
    assert accepter.feed(recorded) == [b"pay 1"]
    with pytest.raises(AuthenticationError):
        accepter.feed(recorded)


def test_a_message_reflected_to_its_sender_is_refused(pair: tuple[SignedSession, SignedSession]) -> None:
    opener, _ = pair
    opener.seal(b"mine")
    with pytest.raises(AuthenticationError):
        deliver(opener, opener)


def test_nothing_is_sealed_before_the_peer_has_proved_itself() -> None:
    with pytest.raises(AuthenticationError, match="before"):
        SignedSession(SECRET, accepts=False).seal(b"x")


def test_an_empty_secret_is_refused() -> None:
    with pytest.raises(AuthenticationError, match="empty"):
        SignedSession(b"", accepts=False)
