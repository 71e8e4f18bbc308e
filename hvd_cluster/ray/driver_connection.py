"""A worker's end of its connection to the driver, for output, progress, and the news that a call is over."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading

from hvd_cluster.errors import AuthenticationError
from hvd_cluster.launch.output import OutputReader, flush_prints
from hvd_cluster.launch.wire.listener import listen_for_handshakes
from hvd_cluster.ray.messages import Message, OutputLines
from hvd_cluster.rendezvous.channel import Channel

#: Seconds after which a driver that takes no more output is given up.
_STALLED_S = 60.0
#: Ray writes such lines for its own log reader.
_OF_RAYS_OWN = (":actor_name:", ":task_name:", ":job_id:")
_STREAMS = {"stdout": 1, "stderr": 2}


class DriverConnection:
    """Waits for the driver's call. From then on, what this process writes to stdout and stderr goes to the driver.

    Args:
        secret: the job's secret; who does not hold it is not let in.
        address: that of this node, where the driver calls.
    """

    def __init__(self, secret: bytes, address: str) -> None:
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._ray_files: dict[str, int] = {}
        self._reader: OutputReader | None = None
        self._listener = listen_for_handshakes(secret, self._let_in, [address], unread_s=_STALLED_S)
        #: Where the driver calls.
        self.port = self._listener.port

    def tell(self, message: Message) -> None:
        """Send ``message``; where there is no driver, lines go to Ray's own log, anything else nowhere."""
        channel = self._channel
        if channel is not None:
            try:
                channel.send(pickle.dumps(message))
                return
            except (OSError, AuthenticationError):
                with self._lock:
                    if self._channel is channel:  # else the driver has called again
                        self._channel = None
                channel.close()
        if isinstance(message, OutputLines) and message.stream in self._ray_files:
            with contextlib.suppress(OSError):
                os.write(self._ray_files[message.stream], "".join(f"{text}\n" for text in message.texts).encode())

    def catch_up(self) -> None:
        """Return when everything that this process has written by now was sent."""
        flush_prints()
        if self._reader is not None:
            self._reader.catch_up()()

    def _let_in(self, _hello: object, channel: Channel) -> bool:
        """The driver has called, for the first time or because its connection broke."""
        channel.settimeout(_STALLED_S)
        with self._lock:
            before, self._channel = self._channel, channel
        if before is not None:
            before.close()
        if self._reader is None:
            self._capture()
        # To the driver: this is the line that it wants, and from here on nothing is lost.
        self.tell(OutputLines("stdout", []))
        return True

    def _capture(self) -> None:
        """Put pipes in place of Ray's log files; native code and child processes write to them too."""
        flush_prints()
        pipes = {}
        for stream, descriptor in _STREAMS.items():
            self._ray_files[stream] = os.dup(descriptor)
            pipes[stream], writer = os.pipe()
            os.dup2(writer, descriptor)
            os.close(writer)
        self._reader = OutputReader(pipes, self._pass_on, "hvd-output")

    def _pass_on(self, stream: str, texts: list[str]) -> None:
        texts = [text for text in texts if not text.startswith(_OF_RAYS_OWN)]
        if texts:
            self.tell(OutputLines(stream, texts))
