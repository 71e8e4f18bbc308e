"""A port for a server that somebody else will start: torch.distributed's own rendezvous on rank 0."""

from __future__ import annotations

import socket


class ReservedPort:
    """A free port of this host, kept from everybody who asks the system for *any* port, until it is closed.

    A bound socket that does not listen, with SO_REUSEADDR: Linux lets a server that sets SO_REUSEADDR too (torch's
    TCPStore does) bind the same port and listen, but gives it to nobody else.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
