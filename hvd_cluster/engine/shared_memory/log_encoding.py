"""Messages in a host's log: a word of length and kind, the payload, and padding."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable, Iterable, Iterator

from hvd_cluster.engine.messages import HostMessage, Recall, Run, VotesComplete

# The first word of a message is its length in bytes times 8, plus one of these.
RUN, PICKLED, PIECE, RECALL, READY = range(5)

#: Runs that are kept encoded or decoded: a training step asks for the same ones again.
_MAX_CACHED = 1000


def framed(kind: int, payload: bytes) -> bytes:
    """One message."""
    return (len(payload) << 3 | kind).to_bytes(8, "little") + payload + bytes(-len(payload) % 8)


def packed(words: Iterable[int]) -> bytes:
    """The payload of integers."""
    return array("q", words).tobytes()


class RunEncoder:
    """Encodes the buckets for requests that are ready together.

    Args:
        plan: returns the buckets.
    """

    def __init__(self, plan: Callable[[tuple[int, ...]], tuple[Run, ...]]) -> None:
        self._plan = plan
        self._payloads: dict[tuple[int, ...], bytes] = {}

    def encode(self, ids: tuple[int, ...]) -> bytes:
        """The payload: for each bucket its length and its ids."""
        payload = self._payloads.get(ids)
        if payload is None:
            words: list[int] = []
            for run in self._plan(ids):
                words += (len(run.ids), *run.ids)
            payload = packed(words)
            if len(self._payloads) > _MAX_CACHED:
                self._payloads.clear()
            self._payloads[ids] = payload
        return payload

    def forget(self) -> None:
        """The plans have changed, for example because of another fusion threshold."""
        self._payloads.clear()


class LogDecoder:
    """Decodes the bytes of the log, in any portions of whole messages."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._runs: dict[bytes, tuple[Run, ...]] = {}

    def decode(self, data: bytes) -> Iterator[HostMessage]:
        """The messages in ``data``."""
        start = 0
        while start < len(data):
            word = int.from_bytes(data[start : start + 8], "little")
            length, kind = word >> 3, word & 7
            payload = data[start + 8 : start + 8 + length]
            start += 8 + -(-length // 8) * 8
            if kind == RUN:
                yield self._decode_runs(payload)
            elif kind == PIECE:
                self._pieces.append(payload)
            elif kind == RECALL:
                (epoch,) = _unpacked(payload)
                yield Recall(epoch)
            elif kind == READY:
                yield VotesComplete(tuple(_unpacked(payload)))
            else:
                # Written by a rank of this job: no other process has the descriptor of the segment.
                message, self._pieces = b"".join((*self._pieces, payload)), []
                yield pickle.loads(message)

    def _decode_runs(self, payload: bytes) -> tuple[Run, ...]:
        runs = self._runs.get(payload)
        if runs is None:
            words = _unpacked(payload)
            found, start = [], 0
            while start < len(words):
                end = start + 1 + words[start]
                found.append(Run(tuple(words[start + 1 : end])))
                start = end
            if len(self._runs) > _MAX_CACHED:
                self._runs.clear()
            runs = self._runs[payload] = tuple(found)
        return runs


def _unpacked(payload: bytes) -> list[int]:
    return memoryview(payload).cast("q").tolist()
