from __future__ import annotations

import re

import pytest

from hvd_cluster.launch.cli.main import parse_args
from hvd_cluster.launch.cli.parser import KEPT_ANYWAY, LATER, knob_environment


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


@pytest.mark.parametrize("flag", ["--fusion-threshold-mb", "--cycle-time-ms", "--cache-capacity", "--start-timeout"])
def test_a_negative_number_is_refused_by_the_name_of_its_flag(flag: str) -> None:
    with pytest.raises(ValueError, match=rf"{flag}=-1(\.0)? must be >= 0"):
        knob_environment(parse_args(["-np", "1", f"{flag}=-1", "true"]))


@pytest.mark.parametrize(("flag", "num_values"), LATER.items())
def test_a_flag_of_a_later_version_is_refused_in_one_line(
    flag: str, num_values: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_args(["-np", "2", flag, *["1"] * num_values, "true"])
    assert capsys.readouterr().err == f"hvdrun: {flag} is not available in this version\n"


def test_a_flag_that_asks_for_what_holds_anyway_is_accepted() -> None:
    assert parse_args(["-np", "1", *KEPT_ANYWAY, "true"]).command == ["true"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["true"], "the number of workers is missing: -np N"),
        (["-np", "2"], "the command to run is missing"),
        (["-np", "two", "true"], "invalid int value: 'two'"),
        (["-np", "2", "--no-such-flag", "true"], "unrecognized arguments: --no-such-flag"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_args(arguments)
    assert text in capsys.readouterr().err


def test_horovodrun_gives_the_version_that_programs_compare(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse_args(["--version"], prog="horovodrun")
    assert capsys.readouterr().out == "0.28.1\n"
    with pytest.raises(SystemExit, match="0"):
        parse_args(["-v"])
    assert re.fullmatch(r"0\.\d+\.\d+\S*\n", capsys.readouterr().out)
