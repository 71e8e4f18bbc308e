"""The messages between the key-value store's client and server.

Each is a list of byte strings.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import Enum

_COUNT = struct.Struct(">I")
_LENGTH = struct.Struct(">Q")


class Command(bytes, Enum):
    """The first field of a request.

    Keys and values are bytes; numbers are written as decimal text.
    """

    SET = b"set"  # key, value -> OK
    GET = b"get"  # timeout in ms, keys... -> OK, values...; waits until all keys exist
    WAIT = b"wait"  # timeout in ms, keys... -> OK; waits until all keys exist
    ADD = b"add"  # key, amount -> OK, new number
    APPEND = b"append"  # key, value -> OK
    PUSH = b"push"  # box, value -> OK, its number in the box; sets "box/number", and counts in "box/posted"
    SWAP = b"swap"  # key, expected, desired -> OK, the value that is there now
    DELETE = b"delete"  # key -> OK, 1 or 0
    CHECK = b"check"  # keys... -> OK, 1 if all exist or 0
    COUNT = b"count"  # -> OK, number of keys


class Answer(bytes, Enum):
    """The first field of a reply."""

    OK = b"ok"
    TIMEOUT = b"timeout"  # the keys that are still missing follow
    REFUSED = b"refused"  # the reason follows
    CLOSED = b"closed"  # the key that belongs to a world that is over follows


def pack(fields: Iterable[bytes]) -> bytes:
    """One message from its fields."""
    parts = list(fields)
    packed = [_COUNT.pack(len(parts))]
    for part in parts:
        packed += (_LENGTH.pack(len(part)), part)
    return b"".join(packed)


def unpack(message: bytes) -> list[bytes]:
    """The fields of one message; raises ``struct.error`` if it is not in this format."""
    (count,) = _COUNT.unpack_from(message)
    position = _COUNT.size
    fields: list[bytes] = []
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(message, position)
        position += _LENGTH.size
        fields.append(message[position : position + length])
        position += length
    return fields
