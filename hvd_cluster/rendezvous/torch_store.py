"""The key-value store behind torch's interface, for process groups.

torch's own TCPStore does not authenticate its clients; a process group on this one connects only workers of the job.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from hvd_cluster.rendezvous.client import KeyValueClient


class AuthenticatedStore(Store):
    """A ``torch.distributed.Store`` over a :class:`KeyValueClient` of another owner.

    Keep a reference as long as a process group uses it: torch holds only the C++ half of the object, and without the
    Python half every call fails with "Not implemented".

    Args:
        prefix: put before every key, so that each process group has keys of its own.
    """

    #: torch's property, which its stubs lack.
    timeout: timedelta

    def __init__(self, client: KeyValueClient, prefix: str) -> None:
        super().__init__()
        self._client = client
        self._prefix = prefix
        #: Kept: torch holds only the C++ half of a store.
        self._clones: list[AuthenticatedStore] = []
        self.set_timeout(timedelta(seconds=client.timeout_s))  # init_process_group() sets that of the group

    def set(self, key: str, value: str | bytes) -> None:
        self._client.set(self._prefix + key, _bytes(value))

    def get(self, key: str) -> bytes:
        return self._client.get(self._prefix + key, self.timeout.total_seconds())

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._client.wait(self._prefixed(keys), (self.timeout if timeout is None else timeout).total_seconds())

    def add(self, key: str, amount: int) -> int:
        return self._client.add(self._prefix + key, amount)

    def append(self, key: str, value: str | bytes) -> None:
        self._client.append(self._prefix + key, _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._client.compare_set(self._prefix + key, _bytes(expected), _bytes(desired))

    def check(self, keys: list[str]) -> bool:
        return self._client.check(self._prefixed(keys))

    def delete_key(self, key: str) -> bool:
        return self._client.delete(self._prefix + key)

    def num_keys(self) -> int:
        return self._client.num_keys()

    # C++, as in a PrefixStore, looks for these names.
    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815

    def clone(self) -> AuthenticatedStore:
        """The same keys over a connection of its own."""
        client = self._client.clone()
        clone = AuthenticatedStore(client, self._prefix)
        weakref.finalize(clone, client.close)
        clone.set_timeout(self.timeout)
        self._clones.append(clone)
        return clone

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._client.get_many(self._prefixed(keys), self.timeout.total_seconds())

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def _prefixed(self, keys: list[str]) -> list[str]:
        return [self._prefix + key for key in keys]


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
