"""What training code uses of ``hvd_cluster.torch``."""

from __future__ import annotations

import inspect
import os
from types import SimpleNamespace

import pytest

import hvd_cluster.torch as hvd
from hvd_cluster.engine import current
from hvd_cluster.estimators.run.world import Collectives, initialized
from hvd_cluster.monitor.step_clock import step_clock


def test_the_torch_api_has_all_that_training_code_uses() -> None:
    methods = {name: value for name, value in vars(Collectives).items() if not name.startswith("_") and callable(value)}
    assert {"rank", "allreduce", "broadcast_object"} <= methods.keys()
    for name, method in methods.items():
        used = inspect.signature(method).parameters.keys() - {"self"}
        assert used <= inspect.signature(getattr(hvd, name)).parameters.keys(), name
    assert all(hasattr(hvd, name) for name in Collectives.__annotations__)


@pytest.mark.parametrize(("monitor", "reports"), [(None, True), ("0", False), ("1", True)])
def test_a_fit_reports_its_steps_unless_the_monitor_is_off(monkeypatch, capfd, monitor, reports):
    if monitor is not None:
        monkeypatch.setenv("HOROVOD_MONITOR", monitor)
    before = dict(os.environ)
    with initialized(SimpleNamespace(mp_start_method=None, torch_backend=None)):
        assert dict(os.environ) == before
        assert (current.engine().job_monitor is not None) == reports
        for _ in range(3):
            step_clock.end_step()
    assert ("[monitor]" in capfd.readouterr().err) == (monitor == "1")
