"""The key-value table without sockets: how much work an answer takes."""

from __future__ import annotations

import pytest

from hvd_cluster.rendezvous.protocol import Command
from hvd_cluster.rendezvous.table import KeyValueTable


class _Counted:
    """A client that counts how often it is compared."""

    num_comparisons = 0

    def __eq__(self, other: object) -> bool:
        type(self).num_comparisons += 1
        return self is other

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("ends", ["set", "close"])
def test_waiters_that_are_answered_together_are_not_compared_with_each_other(ends: str) -> None:
    table: KeyValueTable[_Counted] = KeyValueTable()
    clients = [_Counted() for _ in range(300)]
    for client in clients:
        table.apply(client, [Command.WAIT, b"1000", b"key"], 0.0)
    answers = table.apply(_Counted(), [Command.SET, b"key", b"value"], 0.0) if ends == "set" else table.close(b"key")
    assert len(answers) >= len(clients)
    assert table.next_deadline_s is None
    assert _Counted.num_comparisons == 0
