"""The signed protocol between two ends, without I/O: bytes in, messages out.

Both ends prove that they know the secret before either accepts a message: each sends 32 random bytes, and each answers
with an HMAC-SHA256 over both (mutual challenge and response, as in ISO/IEC 9798-4). Each direction has its own key,
derived from the secret and both challenges, and every message carries an HMAC over its sequence number and its bytes.
Therefore a recorded message cannot be replayed, reordered, reflected or moved to another connection. Messages are
signed, not encrypted; if the secret contains a certificate, all of this goes through TLS
(:mod:`hvd_cluster.rendezvous.tls`).

On the wire a message is ``length (8 bytes, big endian) | HMAC-SHA256 (32 bytes) | payload``.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import TYPE_CHECKING

from hvd_cluster.errors import AuthenticationError
from hvd_cluster.rendezvous.secret import certificate_of

if TYPE_CHECKING:
    from hvd_cluster.rendezvous.tls import TlsLayer

_MAGIC = b"hvdc/1\r\n"
_CHALLENGE_BYTES = 32
_MAC_BYTES = 32
_LENGTH = struct.Struct(">Q")
_HEADER_BYTES = _LENGTH.size + _MAC_BYTES
#: For shorter messages a copy is cheaper than a second call.
_SHORT_BYTES = 1 << 16
#: No valid message is this large; a larger length means a corrupt or hostile stream.
_MAX_MESSAGE_BYTES = 1 << 40


class SignedSession:
    """One end of a connection, without its socket.

    Pass received bytes to :meth:`feed`; send the bytes in :attr:`outgoing`.

    Args:
        accepts: whether this end accepted the connection; otherwise it opened the connection.
    """

    def __init__(self, secret: bytes, *, accepts: bool) -> None:
        if not secret:
            raise AuthenticationError(
                "the job's secret is empty: was this process started by a launcher of hvd_cluster?"
            )
        self._secret = secret
        self._accepts = accepts
        self._challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        self._incoming = bytearray()
        self._send_key = b""
        self._receive_key = b""
        self._num_sent = 0
        self._num_received = 0
        self._proof_expected = b""
        #: Bytes to send to the peer; the sender removes them.
        self.outgoing = bytearray()
        #: Whether the peer has proved that it knows the secret.
        self.established = False
        self._tls: TlsLayer | None = None
        if certificate := certificate_of(secret):
            from hvd_cluster.rendezvous.tls import TlsLayer

            self._tls = TlsLayer(certificate, accepts=accepts)
        self._emit(_MAGIC + self._challenge)

    def seal(self, message: bytes | bytearray | memoryview) -> None:
        """Sign ``message`` and append it to :attr:`outgoing`."""
        if not self.established:
            raise AuthenticationError("a message was sent before the peer proved that it knows the secret")
        header = _LENGTH.pack(len(message)) + _mac(self._send_key, self._num_sent, message)
        self._num_sent += 1
        if self._tls is None:  # without a further copy of the message
            self.outgoing += header
            self.outgoing += message
        else:
            self._emit(header + message)

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """Process received bytes; return the messages that they complete.

        Raises:
            AuthenticationError: the peer does not know the secret, or a message was altered. Close the connection.
        """
        self._incoming += data if self._tls is None else self._decrypted(self._tls, data)
        if not self.established and not self._handshake():
            return []
        messages: list[bytes] = []
        start = 0
        while len(self._incoming) - start >= _HEADER_BYTES:
            (length,) = _LENGTH.unpack_from(self._incoming, start)
            if length > _MAX_MESSAGE_BYTES:
                raise AuthenticationError(f"a message of {length} bytes was announced: the stream is corrupt")
            end = start + _HEADER_BYTES + length
            if len(self._incoming) < end:
                break
            with memoryview(self._incoming) as view:  # slicing the bytearray would copy twice
                mac = bytes(view[start + _LENGTH.size : start + _HEADER_BYTES])
                message = bytes(view[start + _HEADER_BYTES : end])
            if not hmac.compare_digest(mac, _mac(self._receive_key, self._num_received, message)):
                raise AuthenticationError("a message does not carry the job's signature")
            self._num_received += 1
            messages.append(message)
            start = end
        del self._incoming[:start]
        return messages

    def _emit(self, data: bytes) -> None:
        if self._tls is None:
            self.outgoing += data
        else:
            self._tls.write(data)
            self.outgoing += self._tls.pending()

    def _decrypted(self, tls: TlsLayer, data: bytes | memoryview) -> bytes:
        plain = tls.feed(data)
        self.outgoing += tls.pending()  # its handshake
        return plain

    def _handshake(self) -> bool:
        """Handle received bytes of the handshake; returns whether it is complete."""
        hello_bytes = len(_MAGIC) + _CHALLENGE_BYTES
        if not self._send_key:
            known = min(len(self._incoming), len(_MAGIC))
            if self._incoming[:known] != _MAGIC[:known]:
                raise AuthenticationError("the peer does not speak this protocol")
            if len(self._incoming) < hello_bytes:
                return False
            theirs = bytes(self._incoming[len(_MAGIC) : hello_bytes])
            del self._incoming[:hello_bytes]
            if theirs == self._challenge:
                raise AuthenticationError("the peer sent our own challenge back")
            opener, accepter = (theirs, self._challenge) if self._accepts else (self._challenge, theirs)
            both = opener + accepter
            mine, other = (b"accepter", b"opener") if self._accepts else (b"opener", b"accepter")
            self._send_key = hmac.digest(self._secret, mine + both, "sha256")
            self._receive_key = hmac.digest(self._secret, other + both, "sha256")
            self._proof_expected = hmac.digest(self._receive_key, b"proof", "sha256")
            self._emit(hmac.digest(self._send_key, b"proof", "sha256"))
        if len(self._incoming) < _MAC_BYTES:
            return False
        proof = bytes(self._incoming[:_MAC_BYTES])
        del self._incoming[:_MAC_BYTES]
        if not hmac.compare_digest(proof, self._proof_expected):
            raise AuthenticationError("the peer does not hold the secret of this job: is it a worker of another job?")
        self.established = True
        return True


def _mac(key: bytes, number: int, message: bytes | bytearray | memoryview) -> bytes:
    if len(message) < _SHORT_BYTES:
        # For short messages hmac.digest() takes a third of the time of hmac.new().
        return hmac.digest(key, _LENGTH.pack(number) + message, "sha256")
    signature = hmac.new(key, _LENGTH.pack(number), "sha256")
    signature.update(message)
    return signature.digest()
