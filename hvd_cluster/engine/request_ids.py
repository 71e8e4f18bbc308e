"""The short ids that the log gives to requests: a cache equal on every rank."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from hvd_cluster.engine.messages import Define
from hvd_cluster.engine.signature import Key, Signature


class RequestIds:
    """Definitions at a log position, equal on all ranks; a world never reuses an id."""

    def __init__(self) -> None:
        #: The id of the next definition.
        self.next_id = 0
        #: How many ids the log has forgotten so far.
        self.num_forgotten = 0
        #: Least recently used first.
        self._definitions: OrderedDict[int, tuple[Key, Signature]] = OrderedDict()
        self._ids: dict[Key, int] = {}
        self._forgotten: deque[tuple[int, int]] = deque()  # (log position, id)
        #: Definitions of forgotten ids that reports may still contain.
        self._readable: dict[int, tuple[Key, Signature]] = {}

    def __len__(self) -> int:
        return len(self._definitions)

    def __iter__(self) -> Iterator[int]:
        """The ids, least recently used first."""
        return iter(self._definitions)

    def __getitem__(self, id: int) -> tuple[Key, Signature]:
        return self._definitions[id]

    def read(self, id: int) -> tuple[Key, Signature]:
        """What an id in a report stands for, even if it is forgotten by now."""
        return self._definitions.get(id) or self._readable[id]

    def get(self, key: Key) -> int | None:
        """The id of requests with this key."""
        return self._ids.get(key)

    def find(self, key: Key, signature: Signature) -> int | None:
        """The id of this request, if its signature is the one of the definition."""
        id = self._ids.get(key)
        return id if id is not None and self._definitions[id][1] == signature else None

    def use(self, id: int) -> tuple[Key, Signature]:
        """What an id stands for; it is now the most recently used one."""
        self._definitions.move_to_end(id)
        return self._definitions[id]

    def define(self, entry: Define) -> None:
        """Apply an entry of the log."""
        self._definitions[entry.id] = (entry.key, entry.signature)
        self._ids[entry.key] = entry.id
        self.next_id = max(self.next_id, entry.id + 1)

    def forget(self, id: int, log_position: int) -> None:
        """Forget an id at ``log_position``; it is readable until :meth:`drop_readable`."""
        key, signature = self._definitions.pop(id)
        if self._ids.get(key) == id:
            del self._ids[key]
        self.num_forgotten += 1
        self._readable[id] = (key, signature)
        self._forgotten.append((log_position, id))

    @property
    def has_readable(self) -> bool:
        """Whether :meth:`drop_readable` may have something to drop."""
        return bool(self._forgotten)

    def drop_readable(self, log_position: int) -> None:
        """Drop ids forgotten up to ``log_position``, which all children have applied."""
        while self._forgotten and self._forgotten[0][0] <= log_position:
            del self._readable[self._forgotten.popleft()[1]]
