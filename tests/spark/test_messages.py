"""What travels between driver and tasks: signed outcomes, versions that must agree, a secret that stays hidden."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hvd_cluster.errors import AuthenticationError
from hvd_cluster.launch.outcome import Outcome
from hvd_cluster.spark.messages import TaskPlan, Versions, disagreements, sign, verify

DRIVER = Versions(python="3.11.7", torch="2.13.0", hvd_cluster="0.1.0")


def test_an_outcome_comes_back_only_with_the_jobs_secret_and_for_its_own_slot() -> None:
    outcome = Outcome(1, "a", value=b"x" * 1000)
    signed = sign(outcome, 3, b"secret")
    assert verify(signed, 3, b"secret") == outcome
    with pytest.raises(AuthenticationError):
        verify(signed, 3, b"another secret")
    with pytest.raises(AuthenticationError):
        verify(signed, 4, b"secret")
    with pytest.raises(AuthenticationError):
        verify(signed[:-1] + b"?", 3, b"secret")
    with pytest.raises(AuthenticationError):
        verify(b"", 3, b"secret")


def test_the_secret_is_not_shown() -> None:
    plan = TaskPlan(
        workers_per_task=1,
        job_id="j",
        secret=b"\x07" * 32,
        driver_addresses=(),
        env={},
        executable=None,
        as_horovod=False,
        versions=DRIVER,
    )
    assert "x07" not in repr(plan)
    assert "secret" not in repr(plan)


def test_equal_versions_and_patch_releases_agree() -> None:
    assert disagreements(DRIVER, {"a": DRIVER, "b": replace(DRIVER, python="3.11.9", torch="2.13.1+cu128")}) == ([], [])


def test_another_python_or_another_release_of_ours_is_an_error_that_names_the_host() -> None:
    errors, _ = disagreements(DRIVER, {"a": DRIVER, "b": replace(DRIVER, python="3.12.1", hvd_cluster="0.2.0")})
    assert len(errors) == 2
    assert "Python is 3.11.7 on the driver, but 3.12.1 on b" in errors[0]
    assert "PYSPARK_PYTHON" in errors[0]
    assert "hvd-cluster is 0.1.0 on the driver, but 0.2.0 on b" in errors[1]


def test_another_torch_on_all_workers_is_a_warning_but_among_workers_an_error() -> None:
    older = replace(DRIVER, torch="2.4.1")
    errors, warnings = disagreements(DRIVER, {"a": older, "b": older})
    assert errors == []
    assert warnings == [
        "torch is 2.13.0 on the driver, but 2.4.1 on a",
        "torch is 2.13.0 on the driver, but 2.4.1 on b",
    ]
    errors, _ = disagreements(DRIVER, {"a": DRIVER, "b": older})
    assert any(
        "the workers have different versions of torch" in error and "2.13 on a, 2.4 on b" in error for error in errors
    )


def test_a_driver_without_torch_is_fine() -> None:
    assert disagreements(replace(DRIVER, torch=""), {"a": DRIVER}) == ([], [])
