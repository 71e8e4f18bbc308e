"""The line that the launcher writes to an agent's standard input. It contains secrets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields


@dataclass(frozen=True, kw_only=True)
class BootstrapMessage:
    """Where the launcher is, and what the agent needs to connect to it."""

    #: The name that the launcher uses for the agent's host.
    name: str
    #: The launcher's addresses; the agent uses the first one that it can reach.
    addresses: Sequence[str]
    #: The launcher's port.
    port: int
    #: The job's secret, in hexadecimal digits.
    secret: str = field(repr=False)
    #: The working directory of the workers.
    cwd: str
    #: The driver's ``sys.path``.
    sys_path: Sequence[str]
    #: Names, or prefixes of names, of the network interfaces to use; if empty, a probe decides.
    interfaces: Sequence[str] = field(default_factory=list)
    #: Variables for the workers; None removes a variable. They may contain passwords and keys.
    env: Mapping[str, str | None] = field(default_factory=dict, repr=False)

    def to_line(self) -> bytes:
        """This message as one line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> BootstrapMessage:
        """The inverse of :meth:`to_line`.

        Raises:
            ValueError: the line is not such a message.
        """
        values = json.loads(line)
        if not isinstance(values, dict):
            raise ValueError("the launcher's bootstrap message is not a JSON object")
        known = {one.name for one in fields(cls)}
        # A launcher of another version may send more. It reports the difference once this agent has connected.
        return cls(**{name: value for name, value in values.items() if name in known})
