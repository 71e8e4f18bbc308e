"""What a Ray Train run's own settings mean in its workers; test_train.py has whole runs."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

NAME = "HOROVOD_GLOO_TIMEOUT_SECONDS"


@pytest.mark.parametrize(
    ("given", "environ", "said"),
    [
        ({}, {}, {NAME: "300"}),
        ({}, {NAME: "45"}, {}),  # a runtime_env has said it
        ({"timeout_s": 60}, {NAME: "45"}, {NAME: "60"}),
    ],
)
def test_the_timeout_of_the_config_beats_the_environment_which_beats_the_default(
    given: dict[str, float], environ: dict[str, str], said: dict[str, str]
) -> None:
    from hvd_cluster.ray.train import HorovodConfig

    assert HorovodConfig(**given).timeout(environ) == said
