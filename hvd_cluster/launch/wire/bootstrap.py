"""The one line that the launcher writes into an agent's standard input; it holds what may be secret."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields


@dataclass(frozen=True, kw_only=True)
class BootstrapMessage:
    """Where the launcher is, and who the agent is to it."""

    #: The agent's host as the launcher named it.
    name: str
    #: The launcher's addresses: the agent takes the first that leads to it.
    addresses: Sequence[str]
    #: The launcher's port.
    port: int
    #: The job's secret, in hexadecimal digits.
    secret: str = field(repr=False)
    #: The working directory of the workers.
    cwd: str
    #: The driver's ``sys.path``.
    sys_path: Sequence[str]
    #: Names, or beginnings of names, of the network interfaces to use; none leaves the choice to a probe.
    interfaces: Sequence[str] = field(default_factory=list)
    #: Variables for the workers; None removes one. Users keep passwords and keys there.
    env: Mapping[str, str | None] = field(default_factory=dict, repr=False)

    def to_line(self) -> bytes:
        """As one line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> BootstrapMessage:
        """The inverse; raises ``ValueError`` where the line is something else."""
        told = json.loads(line)
        if not isinstance(told, dict):
            raise ValueError("the launcher's bootstrap is no JSON object")
        known = {one.name for one in fields(cls)}
        # A launcher of another version may say more. It tells the user so once this agent has called back.
        return cls(**{name: value for name, value in told.items() if name in known})
