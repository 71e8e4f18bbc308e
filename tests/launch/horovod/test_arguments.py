"""``horovod.runner.launch._run``: a launch that an object describes runs through our launcher."""

from __future__ import annotations

import sys

import pytest

from hvd_cluster.errors import WorkerFailedError
from hvd_cluster.launch.cli.main import parse_args
from hvd_cluster.launch.horovod.arguments import _HorovodArgs, _run
from hvd_cluster.launch.horovod.variables import get_env_rank_and_size


@pytest.mark.processes
def test_a_function_runs_on_each_worker() -> None:
    args = _HorovodArgs()
    args.num_proc, args.run_func, args.use_gloo = 2, get_env_rank_and_size, True
    assert _run(args) == [(0, 2), (1, 2)]


@pytest.mark.processes
@pytest.mark.parametrize("verbose", [None, False, 0, 2])
def test_what_a_function_prints_is_shown_however_verbose_the_launcher_is(
    verbose: int | None, capfd: pytest.CaptureFixture[str]
) -> None:
    _run(_HorovodArgs(num_proc=1, run_func=lambda: print("hello"), verbose=verbose))
    assert capfd.readouterr().out == "[0]<stdout>:hello\n"


@pytest.mark.processes
def test_a_command_runs_on_each_worker(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import os; print('rank', os.environ['HOROVOD_RANK'], 'of', os.environ['HOROVOD_SIZE'])"
    assert _run(_HorovodArgs(num_proc=2, hosts="localhost:2", command=[sys.executable, "-c", code])) is None
    assert sorted(capfd.readouterr().out.splitlines()) == [f"[{rank}]<stdout>:rank {rank} of 2" for rank in (0, 1)]


@pytest.mark.processes
def test_what_parse_args_returns_runs_too_and_its_failure_is_raised() -> None:
    with pytest.raises(WorkerFailedError, match=r"exited with non-zero status \(3\)") as caught:
        _run(parse_args(["-np", "1", sys.executable, "-c", "raise SystemExit(3)"]))
    assert caught.value.exit_code == 3


def test_nothing_to_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"args\.command is empty"):
        _run(_HorovodArgs(num_proc=1))
