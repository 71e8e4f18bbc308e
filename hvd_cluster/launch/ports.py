"""Reserves a port for a server that another process starts: torch.distributed's own rendezvous on rank 0."""

from __future__ import annotations

import socket


class ReservedPort:
    """A free port of this host that the system gives to no other process that asks for *any* port, until it is closed.

    It is a bound socket that does not listen, with SO_REUSEADDR. Linux lets a server with SO_REUSEADDR (such as torch's
    TCPStore) bind the same port and listen, and no other socket.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Release the port."""
        self._socket.close()

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
