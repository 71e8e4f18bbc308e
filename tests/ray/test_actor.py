from __future__ import annotations

import pytest

from hvd_cluster.ray.actor import _fate

DIED = "The actor died unexpectedly.\n\tpid: 5\nThe actor is dead because its worker process has died. "


@pytest.mark.parametrize(
    ("kind", "text", "fate"),
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
def test_rays_words_about_a_death_become_the_end_of_a_sentence(kind: str, text: str, fate: str) -> None:
    assert fate in _fate(kind, text)
