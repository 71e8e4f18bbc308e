from __future__ import annotations

import pytest

from hvd_cluster.launch.cli.knobs import KEPT_ANYWAY, OBSOLETE, knob_environment
from hvd_cluster.launch.cli.main import parse_args
from hvd_cluster.version import __version__


def test_everything_after_the_program_belongs_to_the_program() -> None:
    parsed = parse_args(["-np", "2", "--verbose", "python", "train.py", "-np", "3", "--epochs=4", "--", "x"])
    assert (parsed.num_proc, parsed.verbose) == (2, True)
    assert parsed.command == ["python", "train.py", "-np", "3", "--epochs=4", "--", "x"]
    assert parse_args(["--num-proc=2", "--", "-odd-name"]).command == ["-odd-name"]


def test_only_the_knobs_that_were_given_reach_the_workers_even_at_their_defaults() -> None:
    parsed = parse_args(
        ["-np", "1", "--fusion-threshold-mb", "128", "--cycle-time-ms=2.5", "--timeline-filename", "t.json", "true"]
    )
    assert knob_environment(parsed) == {
        "HOROVOD_FUSION_THRESHOLD": "134217728",
        "HOROVOD_CYCLE_TIME": "2.5",
        "HOROVOD_TIMELINE": "t.json",
    }


def test_switches_say_on_and_off() -> None:
    on = parse_args(["--autotune", "--no-stall-check", "--timeline-mark-cycles", "--log-without-timestamp", "x"])
    assert knob_environment(on) == {
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_LOG_HIDE_TIME": "1",
    }
    off = parse_args(["--no-autotune", "--stall-check", "--no-hierarchical-allreduce", "--log-with-timestamp", "x"])
    assert knob_environment(off) == {
        "HOROVOD_AUTOTUNE": "0",
        "HOROVOD_STALL_CHECK_DISABLE": "0",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "0",
        "HOROVOD_LOG_HIDE_TIME": "0",
    }


def test_every_flag_of_horovodrun_is_understood_under_its_parsed_name() -> None:
    given = parse_args(
        [
            *("-np", "4", "--start-timeout", "9", "--network-interfaces", "eth0,eth1", "--output-filename", "out"),
            *("--verbose", "--config-file", "c.yaml", "-p", "22", "-i", "key", "--fusion-threshold-mb", "1"),
            *("--cycle-time-ms", "2", "--cache-capacity", "3", "--hierarchical-allreduce", "--hierarchical-allgather"),
            *("--autotune", "--autotune-log-file", "a", "--autotune-warmup-samples", "4"),
            *("--autotune-steps-per-sample", "5", "--autotune-bayes-opt-max-samples", "6"),
            *("--autotune-gaussian-process-noise", "0.7", "--min-np", "2", "--max-np", "8", "--slots-per-host", "3"),
            *("--elastic-timeout", "60", "--reset-limit", "5", "--blacklist-cooldown-range", "1", "10"),
            *("--timeline-filename", "t", "--timeline-mark-cycles", "--stall-check-warning-time-seconds", "7"),
            *("--stall-check-shutdown-time-seconds", "8", "--gloo-timeout-seconds", "9", "--log-level", "DEBUG"),
            *("-prefix-timestamp", "-hostfile", "hosts", "--gloo", "--disable-cache", "train"),
        ]
    )
    expected = {
        "num_proc": 4,
        "start_timeout": 9.0,
        "nics": ["eth0", "eth1"],
        "output_filename": "out",
        "verbose": True,
        "config_file": "c.yaml",
        "ssh_port": 22,
        "ssh_identity_file": "key",
        "fusion_threshold_mb": 1,
        "cycle_time_ms": 2.0,
        "cache_capacity": 3,
        "hierarchical_allreduce": True,
        "autotune": True,
        "autotune_log_file": "a",
        "autotune_warmup_samples": 4,
        "autotune_steps_per_sample": 5,
        "autotune_bayes_opt_max_samples": 6,
        "autotune_gaussian_process_noise": 0.7,
        "min_num_proc": 2,
        "max_num_proc": 8,
        "slots": 3,
        "elastic_timeout": 60.0,
        "reset_limit": 5,
        "cooldown_range": [1.0, 10.0],
        "timeline_filename": "t",
        "timeline_mark_cycles": True,
        "stall_check_warning_time_seconds": 7.0,
        "stall_check_shutdown_time_seconds": 8.0,
        "gloo_timeout_seconds": 9.0,
        "log_level": "debug",
        "prefix_output_with_timestamp": True,
        "hostfile": "hosts",
        "command": ["train"],
        "notes": [f"--hierarchical-allgather has no effect: {OBSOLETE['--hierarchical-allgather'][1]}"],
    }
    assert {name: getattr(given, name) for name in expected} == expected


def test_a_repeated_interface_adds_to_the_list() -> None:
    assert parse_args(["--network-interface", "a", "--network-interface", "b,c", "x"]).nics == ["a", "b", "c"]


@pytest.mark.parametrize(
    "flag", ["--fusion-threshold-mb", "--cycle-time-ms", "--cache-capacity", "--stall-check-warning-time-seconds"]
)
def test_a_negative_number_is_refused_by_the_name_of_its_flag(flag: str) -> None:
    with pytest.raises(ValueError, match=rf"{flag}=-1(\.0)? must be >= 0"):
        knob_environment(parse_args(["-np", "1", f"{flag}=-1", "true"]))


def test_noise_is_a_share() -> None:
    with pytest.raises(ValueError, match="--autotune-gaussian-process-noise=1.5 must be <= 1"):
        knob_environment(parse_args(["--autotune-gaussian-process-noise=1.5", "true"]))


def test_what_a_setting_refuses_is_told_by_the_name_of_its_flag() -> None:
    with pytest.raises(ValueError, match=r"cannot use these flags: --gloo-timeout-seconds='0.0': must be > 0"):
        knob_environment(parse_args(["--gloo-timeout-seconds=0", "true"]))


@pytest.mark.parametrize(("flag", "num_values"), [(flag, number) for flag, (number, _) in OBSOLETE.items()])
def test_a_flag_that_makes_no_sense_any_more_costs_one_line(flag: str, num_values: int) -> None:
    parsed = parse_args(["-np", "2", flag, *["1"] * num_values, "true"])
    assert parsed.command == ["true"]
    assert parsed.notes == [f"{flag} has no effect: {OBSOLETE[flag][1]}"]


def test_a_flag_that_asks_for_what_holds_anyway_is_accepted() -> None:
    assert parse_args(["-np", "1", *KEPT_ANYWAY, "true"]).command == ["true"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-np", "2"], "the command to run is missing"),
        (["-np", "two", "true"], "invalid int value: 'two'"),
        (["-np", "2", "--no-such-flag", "true"], "unrecognized arguments: --no-such-flag"),
        (
            ["-np", "2", "-x", "LR=1", "python", "train.py"],
            "unrecognized arguments: -x; hvdrun passes its environment to the workers: write NAME=value in front of",
        ),
        (["--nnodes=2", "--nproc-per-node=4", "true"], "--nproc-per-node=4; -np N is the number of workers, on all"),
        (["-np", "2", "-m", "train"], "unrecognized arguments: -m; hvdrun runs any program: write python -m MODULE"),
        (["-np", "2", "-bind-to", "none", "true"], "-bind-to; hvdrun does not use MPI: leave MPI's flags out"),
        (["-H", "a:1", "--hostfile", "f", "true"], "not allowed with argument"),
    ],
)
def test_what_cannot_be_understood_is_told(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_args(arguments)
    assert text in capsys.readouterr().err


def test_horovodrun_gives_the_version_that_programs_compare(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse_args(["--version"], prog="horovodrun")
    assert capsys.readouterr().out == "0.28.1\n"
    with pytest.raises(SystemExit, match="0"):
        parse_args(["-v"])
    assert capsys.readouterr().out == f"{__version__}\n"
