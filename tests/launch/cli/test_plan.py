from __future__ import annotations

from pathlib import Path

import pytest

from hvd_cluster.launch.cli.main import parse_args
from hvd_cluster.launch.cli.plan import LaunchPlan, describe, make_plan
from hvd_cluster.launch.hosts import Host
from hvd_cluster.launch.spec import ElasticSpec

SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
LSF = {"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "a03 2 a07 3"}


def plan(*arguments: str, environ: dict[str, str] | None = None) -> LaunchPlan:
    return make_plan(parse_args([*arguments, "train", "--lr", "a b"]), environ or {}, as_horovod=False)


def test_without_hosts_all_workers_are_on_this_one() -> None:
    made = make_plan(parse_args(["-np", "3", "true"]), {}, as_horovod=False)
    assert made.spec.hosts == (Host("localhost", 3),)
    assert made.notes == ()


def test_hosts_are_filled_in_order(tmp_path: Path) -> None:
    assert plan("-np", "3", "-H", "a:2,b:2").spec.hosts == (Host("a", 2), Host("b", 1))
    (tmp_path / "hosts").write_text("a slots=1\nb slots=4\n")
    assert plan("-np", "3", "--hostfile", str(tmp_path / "hosts")).spec.hosts == (Host("a", 1), Host("b", 2))


@pytest.mark.parametrize(
    ("environ", "hosts", "size"),
    [(SLURM, (Host("n1", 2), Host("n2", 2)), 4), (LSF, (Host("a03", 2), Host("a07", 3)), 5)],
)
def test_a_batch_system_names_the_hosts_and_their_number(
    environ: dict[str, str], hosts: tuple[Host, ...], size: int
) -> None:
    made = plan(environ=environ)
    assert (made.spec.hosts, made.spec.num_proc) == (hosts, size)
    assert "gave this job" in made.notes[0]
    assert "-np was not given" in made.notes[1]
    assert plan("-np", "1", "-H", "other:1", environ=environ).spec.hosts == (Host("other", 1),)


@pytest.mark.processes
def test_a_dry_run_shows_the_way_to_each_host_and_no_secret() -> None:
    made = plan("-np", "3", "-H", "a:2,me@b:2", "-p", "2222", "-i", "key", "--cycle-time-ms", "2")
    lines = describe(made.spec).splitlines()
    assert lines[0] == "# HOROVOD_CYCLE_TIME=2.0"
    assert lines[1].startswith("# a: ssh -T -x -o BatchMode=yes")
    assert " -p 2222 -i key " in lines[2]
    assert " me@b " in lines[2]
    assert "hvd_cluster.launch.agent" in lines[2]
    assert lines[3:] == [
        f"[{rank}] {host}: HOROVOD_RANK={rank} HOROVOD_SIZE=3 HOROVOD_LOCAL_RANK={local} HOROVOD_LOCAL_SIZE={here} "
        f"HOROVOD_CROSS_RANK={cross} HOROVOD_CROSS_SIZE={hosts} train --lr 'a b'"
        for rank, host, local, here, cross, hosts in [
            (0, "a", 0, 2, 0, 2),
            (1, "a", 1, 2, 0, 1),
            (2, "me@b", 0, 1, 1, 2),
        ]
    ]
    assert "SECRET" not in describe(made.spec)


def test_a_discovery_script_or_a_least_number_makes_the_job_elastic() -> None:
    spec = plan("--min-np", "2", "--max-np", "4", "--host-discovery-script", "./find.sh", "--reset-limit", "3").spec
    assert isinstance(spec, ElasticSpec)
    assert (spec.num_proc, spec.min_num_proc, spec.max_num_proc, spec.reset_limit) == (2, 2, 4, 3)
    assert isinstance(plan("-np", "2", "--min-np", "1", "-H", "a:1,b:1").spec, ElasticSpec)
    assert "elastic: 2 to 4 workers, 2 at the start, on the hosts that ./find.sh prints" in describe(spec)


@pytest.mark.parametrize(
    "flag",
    [
        *(["--max-np", "8"], ["--reset-limit", "3"], ["--elastic-timeout", "60"], ["--slots", "2"]),
        ["--blacklist-cooldown-range", "10", "60"],
    ],
    ids=lambda flag: flag[0],
)
def test_a_flag_of_elastic_jobs_costs_a_line_where_the_job_is_none(flag: list[str]) -> None:
    (note,) = plan("-np", "4", "-H", "a:4", *flag).notes
    assert note.startswith(f"{flag[0]} has no effect without --")
    assert "--host-discovery-script" in note
    assert plan("-np", "4", "--host-discovery-script", "./find.sh", *flag).notes == ()


def test_interfaces_cost_a_line_where_no_worker_is_on_another_host() -> None:
    def notes(*arguments: str, name: str = "lo") -> tuple[str, ...]:
        return make_plan(parse_args([*arguments, "--network-interfaces", name, "true"]), {}, as_horovod=False).notes

    (note,) = notes("-np", "2")
    assert note.startswith("--network-interfaces has no effect: all workers are on this host")
    assert note.endswith("loopback interface")
    (note,) = notes("-np", "2", name="lo,nosuch0")
    assert ". This host has no interface 'nosuch0'; it has lo" in note
    assert notes("-np", "2", "-H", "localhost:1,elsewhere:1") == ()
    assert notes("-np", "2", "--host-discovery-script", "./find.sh") == ()  # nobody knows yet where they will be


def test_a_path_before_the_command_says_where_its_program_is(tmp_path: Path) -> None:
    (tmp_path / "mytool").touch(mode=0o755)

    def made(*command: str) -> LaunchPlan:
        return make_plan(parse_args(["-np", "1", *command]), {}, as_horovod=False)

    assert made("A=1", f"PATH={tmp_path}", "mytool").spec.task.command == ("env", "A=1", f"PATH={tmp_path}", "mytool")
    assert made(f"PATH={tmp_path}").spec.task.command == ("env", f"PATH={tmp_path}")  # prints the variables
    with pytest.raises(ValueError, match="the program 'true' does not exist on this host"):
        made(f"PATH={tmp_path}", "true")
    with pytest.raises(ValueError, match="the program 'mytool' does not exist on this host"):
        made("mytool", f"PATH={tmp_path}")


def test_slots_are_those_of_a_host_for_which_the_hostfile_states_none(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\nb slots=1\n")
    made = plan("-np", "4", "--slots", "3", "--hostfile", str(tmp_path / "hosts"))
    assert made.spec.hosts == (Host("a", 3), Host("b", 1))
    assert made.notes == ()
    with pytest.raises(ValueError, match="--slots=0 must be a whole number of at least 1"):
        plan("-np", "4", "--slots", "0", "--hostfile", str(tmp_path / "hosts"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-np", "2", "--min-np", "3"], "--min-np=3 is more than -np=2"),
        (["-np", "4", "--max-np", "3"], "--max-np=3 is less than -np=4"),
        (["-np", "2", "--reset-limit", "-1"], "--reset-limit=-1 must be a whole number of at least 0"),
        (["-np", "2", "--blacklist-cooldown-range", "5", "2"], "--blacklist-cooldown-range 5 2 must be two increasing"),
        (["-np", "2", "--blacklist-cooldown-range", "0.5", "2"], "1 to 3600"),
        (["-np", "2", "--slots", "0"], "--slots=0 must be a whole number of at least 1"),
    ],
)
def test_an_elastic_job_that_makes_no_sense_is_refused(arguments: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        plan(*arguments, "--host-discovery-script", "./find.sh")


def test_fault_tolerance_needs_two_hosts_where_they_are_fixed() -> None:
    with pytest.raises(ValueError, match="Cannot run in fault tolerance mode with fewer than 2 hosts"):
        plan("-np", "2", "--min-np", "1", "-H", "a:2")
    with pytest.raises(ValueError, match="an elastic job needs hosts"):
        plan("-np", "2", "--min-np", "1")
    with pytest.raises(ValueError, match=r"Requested more processes \(3\) than there are available slots \(2\)"):
        plan("-np", "3", "--min-np", "1", "-H", "a:1,b:1")
