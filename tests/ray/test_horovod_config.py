"""What a Ray Train run's own settings mean in its workers; test_train.py has whole runs."""

from __future__ import annotations

import importlib

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

NAME = "HOROVOD_GLOO_TIMEOUT_SECONDS"


@pytest.mark.long
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


def test_a_runtime_env_keeps_what_it_is_given_and_refuses_a_second_hook() -> None:
    from hvd_cluster.ray import runtime_env

    given = {"env_vars": {"A": "1"}}
    ours = runtime_env(given)
    assert {**ours, **given} == ours
    assert given == {"env_vars": {"A": "1"}}
    assert runtime_env(ours) == ours
    package, _, name = ours["worker_process_setup_hook"].rpartition(".")
    assert callable(getattr(importlib.import_module(package), name))
    with pytest.raises(
        ValueError, match=r"worker_process_setup_hook='a\.b' is set, and Ray accepts.*import hvd_cluster.compat"
    ):
        runtime_env({"worker_process_setup_hook": "a.b"})
