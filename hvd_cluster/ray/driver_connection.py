"""A worker's connection to the driver: output, progress, ends of calls."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading

from hvd_cluster.errors import AuthenticationError
from hvd_cluster.launch.output import OutputReader, flush_prints
from hvd_cluster.launch.wire.listener import listen_for_handshakes
from hvd_cluster.launch.wire.messages import STALLED_S
from hvd_cluster.ray.messages import Message, OutputLines
from hvd_cluster.rendezvous.channel import Channel

#: The beginnings of lines that Ray writes for its own log reader; the last ones are its progress bars.
_RAY_LINE_PREFIXES = (":actor_name:", ":task_name:", ":job_id:", '{"__magic_token__": "__ray_tqdm_magic_token__"')
_STREAMS = {"stdout": 1, "stderr": 2}


class DriverConnection:
    """Waits for the driver to connect, then sends it this process's output.

    That is its stdout and stderr.
    """

    def __init__(self, secret: bytes, address: str) -> None:
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._ray_files: dict[str, int] = {}
        self._reader: OutputReader | None = None
        self._listener = listen_for_handshakes(secret, self._accept, [address], unread_s=STALLED_S)
        #: The port to which the driver connects.
        self.port = self._listener.port

    def send(self, message: Message) -> None:
        """Send a message to the driver.

        Without a driver, lines go to Ray's own log, and other messages are dropped.
        """
        channel = self._channel
        if channel is not None:
            try:
                channel.send(pickle.dumps(message))
                return
            except (OSError, AuthenticationError):
                with self._lock:
                    if self._channel is channel:  # otherwise the driver has reconnected
                        self._channel = None
                channel.close()
        if isinstance(message, OutputLines) and message.stream in self._ray_files:
            with contextlib.suppress(OSError):
                os.write(self._ray_files[message.stream], "".join(f"{text}\n" for text in message.texts).encode())

    def catch_up(self) -> None:
        """Return when everything that this process has written so far was sent."""
        flush_prints()
        if self._reader is not None:
            self._reader.catch_up()()

    def _accept(self, _handshake: object, channel: Channel) -> bool:
        """The driver has connected, for the first time or because its connection broke."""
        channel.settimeout(STALLED_S)
        with self._lock:
            before, self._channel = self._channel, channel
        if before is not None:
            before.close()
        if self._reader is None:
            self._capture()
        # Confirms the connection to the driver; from now on no line is lost.
        self.send(OutputLines("stdout", []))
        return True

    def _capture(self) -> None:
        """Replace Ray's log files by pipes.

        Native code and child processes write to them too.
        """
        flush_prints()
        pipes = {}
        for stream, descriptor in _STREAMS.items():
            self._ray_files[stream] = os.dup(descriptor)
            pipes[stream], writer = os.pipe()
            os.dup2(writer, descriptor)
            os.close(writer)
        self._reader = OutputReader(pipes, self._pass_on, "hvd-output")

    def _pass_on(self, stream: str, texts: list[str]) -> None:
        texts = [text for text in texts if not text.startswith(_RAY_LINE_PREFIXES)]
        if texts:
            self.send(OutputLines(stream, texts))
