"""The key-value table and the requests that wait for its keys.

Pure: no sockets, and the time is an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from hvd_cluster.rendezvous.protocol import Answer, Command

Client = TypeVar("Client")


@dataclass
class _Waiting(Generic[Client]):
    client: Client
    keys: list[bytes]
    wants_values: bool
    deadline_s: float


class KeyValueTable(Generic[Client]):
    """A dictionary whose readers may wait for keys that do not exist yet.

    Methods that may answer requests return ``(client, reply)`` pairs. A waiting request is answered when its last key
    is set, or by :meth:`expire`.
    """

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._waiting: list[_Waiting[Client]] = []
        self._closed: tuple[bytes, ...] = ()

    @property
    def next_deadline_s(self) -> float | None:
        """The earliest time at which :meth:`expire` has something to do."""
        return min((waiting.deadline_s for waiting in self._waiting), default=None)

    def apply(self, client: Client, request: Sequence[bytes], now_s: float) -> list[tuple[Client, list[bytes]]]:
        """Handle one request of ``client``."""
        command, *fields = request
        if self._closed and (key := self._closed_key(_keys_of(command, fields))) is not None:
            return [(client, [Answer.CLOSED, key])]
        if command in (Command.GET, Command.WAIT):
            timeout_ms, *keys = fields
            waiting = _Waiting(client, keys, command == Command.GET, now_s + int(timeout_ms) / 1000)
            self._waiting.append(waiting)
            return self._answer_complete([waiting])
        reply, changed = self._now(command, fields)
        answers = [(client, reply)]
        if changed and self._waiting:
            answers += self._answer_complete([w for w in self._waiting if changed in w.keys])
        return answers

    def expire(self, now_s: float) -> list[tuple[Client, list[bytes]]]:
        """End the requests whose time is up; the replies list the missing keys."""
        late = [w for w in self._waiting if w.deadline_s <= now_s]
        self._waiting = [w for w in self._waiting if w.deadline_s > now_s]
        return [(w.client, [Answer.TIMEOUT, *(key for key in w.keys if key not in self._values)]) for w in late]

    def close(self, prefix: bytes) -> list[tuple[Client, list[bytes]]]:
        """Remove the keys with a prefix, and refuse waiting and later requests for them."""
        self._closed = (*self._closed, prefix)
        self._values = {key: value for key, value in self._values.items() if not key.startswith(prefix)}
        refused = [(w, key) for w in self._waiting if (key := self._closed_key(w.keys)) is not None]
        ended = {id(w) for w, _ in refused}
        self._waiting = [w for w in self._waiting if id(w) not in ended]
        return [(w.client, [Answer.CLOSED, key]) for w, key in refused]

    def _closed_key(self, keys: Sequence[bytes]) -> bytes | None:
        """One of ``keys`` that was closed."""
        return next((key for key in keys if key.startswith(self._closed)), None)

    def forget(self, client: Client) -> None:
        """Remove the waiting requests of ``client``, which has disconnected."""
        self._waiting = [w for w in self._waiting if w.client is not client]

    def _answer_complete(self, candidates: list[_Waiting[Client]]) -> list[tuple[Client, list[bytes]]]:
        complete = [w for w in candidates if all(key in self._values for key in w.keys)]
        if complete:
            answered = {id(w) for w in complete}  # by identity: equality is quadratic
            self._waiting = [w for w in self._waiting if id(w) not in answered]
        return [
            (w.client, [Answer.OK, *((self._values[key] for key in w.keys) if w.wants_values else ())])
            for w in complete
        ]

    def _now(self, command: bytes, fields: list[bytes]) -> tuple[list[bytes], bytes | None]:
        """The reply to a request that never waits, and the key that it set, if any."""
        values = self._values
        if command == Command.SET:
            key, value = fields
            values[key] = value
            return [Answer.OK], key
        if command == Command.ADD:
            key, amount = fields
            values[key] = str(int(values.get(key, b"0")) + int(amount)).encode()
            return [Answer.OK, values[key]], key
        if command == Command.APPEND:
            key, value = fields
            values[key] = values.get(key, b"") + value
            return [Answer.OK], key
        if command == Command.PUSH:
            # In one step, so that a client that dies meanwhile leaves no number without a message.
            box, value = fields
            number = values.get(box + b"/posted", b"0")
            values[box + b"/posted"] = str(int(number) + 1).encode()
            key = box + b"/" + number
            values[key] = value
            return [Answer.OK, number], key
        if command == Command.SWAP:
            # torch.distributed.Store: an absent key is set when nothing is expected, and left absent otherwise.
            key, expected, desired = fields
            if values.get(key, b"") == expected:
                values[key] = desired
                return [Answer.OK, desired], key
            return [Answer.OK, values.get(key, expected)], None
        if command == Command.DELETE:
            (key,) = fields
            return [Answer.OK, b"1" if values.pop(key, None) is not None else b"0"], None
        if command == Command.CHECK:
            return [Answer.OK, b"1" if all(key in values for key in fields) else b"0"], None
        if command == Command.COUNT:
            return [Answer.OK, str(len(values)).encode()], None
        return [Answer.REFUSED, b"unknown command " + command], None


def _keys_of(command: bytes, fields: Sequence[bytes]) -> Sequence[bytes]:
    """The fields of a request that are keys."""
    if command in (Command.GET, Command.WAIT):
        return fields[1:]
    return fields if command == Command.CHECK else fields[:1]
