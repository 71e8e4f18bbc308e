from __future__ import annotations

from typing import Any

import pytest

from hvd_cluster.launch.worker_group import Callbacks
from hvd_cluster.ray.actor import ActorWorker, _ending_text
from hvd_cluster.ray.session import ENDING_TEXT

DIED = "The actor died unexpectedly.\n\tpid: 5\nThe actor is dead because its worker process has died. "


@pytest.mark.parametrize(
    ("kind", "text", "ending_text"),
    [
        (
            "ActorDiedError",
            DIED + "Worker unexpectedly exits with a connection error code 2. End of file.",
            "was killed",
        ),
        ("ActorDiedError", "The actor died.\nThe actor died because its node has died.", "died with its node"),
        ("ActorDiedError", "The actor is dead because its node was terminated unexpectedly.", "died with its node"),
        ("ActorUnavailableError", "The actor 7 is unavailable: failed to connect.", "does not answer"),
        ("ActorUnschedulableError", "The actor is not schedulable: the node is gone", "could not be started"),
        ("ActorDiedError", "something new\nthat Ray says", "died: that Ray says"),
    ],
)
def test_rays_words_about_a_death_become_the_end_of_a_sentence(kind: str, text: str, ending_text: str) -> None:
    assert ending_text in _ending_text(kind, text)


class ShuttingDown:
    """A connection in the middle of ``ray.shutdown()``: the news of an actor's death comes as it ends."""

    def __init__(self, news: Exception) -> None:
        self.has_ended = False
        self._news = news

    def ray(self) -> Any:
        return self

    def get(self, ref: object, timeout: float) -> Any:
        del ref, timeout
        self.has_ended = True
        raise self._news


def test_an_actor_that_dies_of_rays_shutdown_has_ended_with_the_connection() -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    connection: Any = ShuttingDown(ray.exceptions.ActorDiedError())
    outcome = ActorWorker(connection, None, None, 0, lambda handshake: handshake, Callbacks()).wait()
    assert outcome is not None
    assert outcome.ending_text == ENDING_TEXT
