"""A listener that is crowded for a while."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from hvd_cluster.rendezvous.channel import Channel


@contextlib.contextmanager
def crowded_port(secret: bytes) -> Iterator[int]:
    """The port of a listener that hangs up on the first two callers, and lets the third prove itself."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                listener.accept()[0].close()
            Channel.accept(listener.accept()[0], secret).close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()
