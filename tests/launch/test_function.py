from __future__ import annotations

import logging
import os
import re
from typing import Any, NoReturn

import pytest

import hvd_cluster
from hvd_cluster.errors import LaunchError, WorkerFailedError
from hvd_cluster.launch.spec import JobSpec
from hvd_cluster.launch.ssh.fleet import SshFleet
from hvd_cluster.launch.worker_group import Callbacks


def test_horovods_names_of_the_arguments_work() -> None:
    def fn(a: int, b: int) -> tuple[int, str]:
        return a + b, os.environ["HOROVOD_RANK"]

    results = hvd_cluster.run(fn, (1,), {"b": 2}, num_proc=2, use_gloo=True, disable_cache=True)
    assert results == [(3, "0"), (3, "1")]
    with pytest.warns(DeprecationWarning, match="np is deprecated, use num_proc"):
        assert len(hvd_cluster.run(os.getpid, np=1)) == 1


@pytest.mark.parametrize(("verbose", "shown"), [(False, "[0]<stdout>:here\n"), (0, "")])
def test_horovods_verbose_false_does_not_hide_the_output(
    verbose: int, shown: str, capfd: pytest.CaptureFixture[str]
) -> None:
    hvd_cluster.run(print, ("here",), verbose=verbose)
    assert capfd.readouterr().out == shown


def test_variables_are_the_workers_and_not_the_callers(capfd: pytest.CaptureFixture[str]) -> None:
    def fn() -> tuple[str | None, bool]:
        print("here")
        return os.environ.get("MINE"), "HOME" in os.environ

    found = hvd_cluster.run(fn, num_proc=2, env={"MINE": "1", "HOME": None}, prefix_output_with_timestamp=True)
    assert found == [("1", False)] * 2
    assert "MINE" not in os.environ
    assert re.search(r"\d\d:\d\d:\d\d.*here", capfd.readouterr().out)


def test_the_interface_in_the_environment_counts_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[JobSpec] = []

    def no_job(spec: JobSpec, fleet: SshFleet, callbacks: Callbacks) -> NoReturn:
        jobs.append(spec)
        raise LaunchError("it ends here")

    monkeypatch.setattr("hvd_cluster.launch.function.run_job", no_job)
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "ib0,ib1")
    for named in (None, "eth0"):
        with pytest.raises(LaunchError, match="it ends here"):
            hvd_cluster.run(int, ("7",), network_interfaces=named)
    assert [job.interfaces for job in jobs] == [("ib0", "ib1"), ("eth0",)]


def test_a_failure_is_the_runtime_error_that_old_programs_catch() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError") as caught:
        hvd_cluster.run(lambda: 1 / 0, verbose=0)
    assert isinstance(caught.value, WorkerFailedError)


def test_the_hosts_of_a_batch_system_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ID": "7", "NODELIST": "n[1-2]"}.items():
        monkeypatch.setenv(f"SLURM_JOB_{name}", value)
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2(x2)")
    with pytest.raises(ValueError, match=r"Requested more processes \(5\) than there are available slots \(4\)"):
        hvd_cluster.run(print, num_proc=5, min_num_proc=2)


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ({"hosts": ["a:2", "b:2"]}, r"hosts=\['a:2', 'b:2'\] must be a string: hosts and slots such as 'a:2,b:4'"),
        ({"hosts": {"a": 2}}, r"hosts=\{'a': 2\} must be a string"),
        ({"hostfile": ["a slots=2"]}, r"hostfile=\['a slots=2'\] must be a string: a path"),
        ({"host_discovery_script": ["./hosts.sh"]}, "host_discovery_script=.* must be a string: a path"),
        ({"ssh_identity_file": 3}, "ssh_identity_file=3 must be a string: a path"),
        ({"ssh_port": "ssh"}, "ssh_port='ssh' must be the number of a port, 1 to 65535"),
        ({"ssh_port": 99999}, "ssh_port=99999 must be the number of a port"),
    ],
)
def test_an_argument_about_hosts_of_another_type_is_named(argument: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        hvd_cluster.run(print, num_proc=2, **argument)


def test_two_controllers_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="use_gloo and use_mpi exclude each other"):
        hvd_cluster.run(print, use_gloo=True, use_mpi=True)


def test_mpi_is_answered_with_one_line_of_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert hvd_cluster.run(int, ("7",), use_mpi=True) == [7]
    assert [record.message for record in caplog.records] == ["use_mpi=True has no effect: hvd_cluster does not use MPI"]


def test_an_argument_of_elastic_jobs_costs_a_line_where_the_job_is_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert hvd_cluster.run(
            int, ("7",), max_num_proc=4, reset_limit=3, cooldown_range=(10, 60), slots=2, elastic_timeout=9
        ) == [7]
    told = [record.message.partition(" has no effect without ")[0] for record in caplog.records]
    assert told == ["max_num_proc", "reset_limit", "cooldown_range", "elastic_timeout", "slots"]


@pytest.mark.parametrize("num_proc", [0, -1, "2", 1.5])
def test_fewer_than_one_worker_is_refused(num_proc: Any) -> None:
    with pytest.raises(ValueError, match=f"num_proc={num_proc!r} must be a whole number of at least 1"):
        hvd_cluster.run(print, num_proc=num_proc)
