"""A door at which those call who know the job's secret: agents of the launcher; the driver, of an actor on Ray."""

from __future__ import annotations

import logging
import pickle
import socket
from collections.abc import Callable, Sequence
from typing import Any

from hvd_cluster.errors import AuthenticationError
from hvd_cluster.launch.reception import Reception
from hvd_cluster.rendezvous.channel import Channel
from hvd_cluster.rendezvous.listening import ANY, listen
from hvd_cluster.rendezvous.tcp_keepalive import DEAD_HOST_S, detect_dead_host

logger = logging.getLogger(__name__)

_CALL_BACK_TIMEOUT_S = 10.0
#: Connections that may prove themselves at the same time; a burst of agents does so at once.
_MOST_STRANGERS = 256


class Door:
    """Lets in those who prove that they know the secret, and say who they are.

    Args:
        secret: the job's secret.
        let_in: called, from another thread, with what a caller says (any object) and its connection; False closes it
            again.
        host: the address to listen on, or several.
        unread_s: see :func:`hvd_cluster.rendezvous.tcp_keepalive.detect_dead_host`.

    Raises:
        OSError: no port can be opened.
    """

    def __init__(
        self,
        secret: bytes,
        let_in: Callable[[Any, Channel], bool],
        host: str | Sequence[str] = ANY,
        unread_s: float = DEAD_HOST_S,
    ) -> None:
        self._secret = secret
        self._let_in = let_in
        self._unread_s = unread_s
        listeners = listen([host] if isinstance(host, str) else host)
        #: Where it listens.
        self.port: int = listeners[0].getsockname()[1]
        # Strangers get a thread each until they have failed to prove themselves.
        self._reception = Reception(listeners, answer=self._welcome, most=_MOST_STRANGERS, name="hvd-agents")

    def shut(self) -> None:
        """Let nobody in any more; who is being asked may take the time that he has."""
        self._reception.close(0.0)

    def close(self) -> None:
        """Let nobody in any more, and wait until everybody has been answered."""
        self._reception.close(_CALL_BACK_TIMEOUT_S)

    def _welcome(self, sock: socket.socket) -> None:
        try:
            detect_dead_host(sock, self._unread_s)
            channel = Channel.accept(sock, self._secret, _CALL_BACK_TIMEOUT_S)
            channel.settimeout(_CALL_BACK_TIMEOUT_S)
            hello = pickle.loads(channel.recv())
            channel.settimeout(None)
        except (OSError, EOFError, AuthenticationError) as error:
            logger.info("a connection that does not belong to the job was dropped: %s", error)
            sock.close()
        except Exception:  # of any kind, from unpickling
            logger.exception("what a caller says who knows the secret cannot be understood: another hvd_cluster's?")
            sock.close()
        else:
            if not self._let_in(hello, channel):
                channel.close()
