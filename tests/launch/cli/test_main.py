from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

HVDRUN = [sys.executable, "-m", "hvd_cluster"]


def hvdrun(*arguments: str, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*HVDRUN, *arguments], capture_output=True, text=True, timeout=60, check=False, **more)  # type: ignore[call-overload, no-any-return]


def test_a_command_finds_its_place_and_its_output_has_the_rank_in_front() -> None:
    result = hvdrun("-np", "2", "bash", "-c", "echo $HOROVOD_RANK of $HOROVOD_SIZE; echo $LOCAL_RANK >&2")
    assert result.returncode == 0
    assert sorted(result.stdout.splitlines()) == ["[0]<stdout>:0 of 2", "[1]<stdout>:1 of 2"]
    assert sorted(result.stderr.splitlines()) == ["[0]<stderr>:0", "[1]<stderr>:1"]


def test_at_level_info_each_rank_says_where_it_is_and_how_its_tensors_move() -> None:
    code = "import hvd_cluster.torch as hvd; hvd.init(); hvd.shutdown()"
    result = hvdrun("-np", "2", "--log-level", "INFO", sys.executable, "-c", code)
    for rank in range(2):
        assert f"rank {rank} of 2 on 127.0.0.1: tensors on CPUs use SHM" in result.stderr
    assert "tensors on CPUs" not in hvdrun("-np", "2", sys.executable, "-c", code).stderr


def test_the_first_failing_rank_ends_the_others_and_speaks_last(tmp_path: Path) -> None:
    script = 'echo "$$ $BASHPID" > pid.$RANK; if [ $RANK = 1 ]; then echo "what went wrong"; exit 7; fi; sleep 300'
    began = time.monotonic()
    result = hvdrun("-np", "3", "bash", "-c", script, cwd=tmp_path)
    assert time.monotonic() - began < 20
    assert result.returncode == 7
    assert "Process 1 exit with status code 7.\nTerminating remaining workers after failure of Process 1." in (
        result.stderr
    )
    assert "one or more processes exited with non-zero status" in result.stderr
    assert "Rank 1 on host 127.0.0.1 exited with code 7." in result.stderr
    assert result.stderr.endswith("Last output of rank 1:\n  what went wrong\n")
    assert not any(psutil.pid_exists(int(f.read_text().split()[0])) for f in tmp_path.glob("pid.*"))


def test_one_mistake_of_several_ranks_gives_one_traceback_before_everything_else(tmp_path: Path) -> None:
    script = tmp_path / "bad.py"
    script.write_text(
        "import os, time\n"
        "rank = os.environ['RANK']\n"
        "print('begins', flush=True)\n"
        "open(f'up.{rank}', 'w').close()\n"
        "while not all(os.path.exists(f'up.{other}') for other in range(3)): time.sleep(0.02)\n"
        "time.sleep(0.3 * (rank == '2'))\n"
        "if rank != '1': raise ValueError('wrong shape')\n"
        "time.sleep(300)\n"
    )
    result = hvdrun("-np", "3", sys.executable, str(script), cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith("[Rank 0, 2]:\nTraceback (most recent call last):\n")
    assert result.stderr.count("ValueError: wrong shape") == 1
    assert sorted(result.stdout.splitlines()) == [f"[{rank}]<stdout>:begins" for rank in range(3)]
    assert result.stderr.index("exited with code 1") < result.stderr.index("Horovod detected that one or more")


def test_a_traceback_that_a_program_survives_is_output_like_any_other() -> None:
    code = "import sys, traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()\n"
    code += "print('on', file=sys.stderr)"
    result = hvdrun("-np", "1", sys.executable, "-c", code)
    lines = result.stderr.splitlines()
    assert result.returncode == 0
    assert all(line.startswith("[0]<stderr>:") for line in lines)
    assert lines[0].endswith("Traceback (most recent call last):")
    assert lines[-1] == "[0]<stderr>:on"


def test_a_signal_becomes_the_exit_code_that_a_shell_would_give() -> None:
    result = hvdrun("-np", "1", "bash", "-c", "kill -9 $$")
    assert result.returncode == 128 + 9
    assert "killed by signal 9 (SIGKILL: killed, perhaps out of memory)" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_process_survives_the_launcher(number: int, tmp_path: Path) -> None:
    script = "sleep 300 & echo $$ $! > tmp.$RANK; mv tmp.$RANK pids.$RANK; wait"
    launcher = subprocess.Popen(
        [*HVDRUN, "-np", "2", "bash", "-c", script], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    try:
        files = [tmp_path / "pids.0", tmp_path / "pids.1"]
        deadline = time.monotonic() + 60
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        family = [psutil.Process(int(pid)) for file in files for pid in file.read_text().split()]
        launcher.send_signal(number)
        _, errors = launcher.communicate(timeout=30)
    finally:
        launcher.kill()
        launcher.wait()
    if number != signal.SIGKILL:
        assert launcher.returncode == 128 + number
        assert errors == f"hvdrun: ended by {signal.Signals(number).name}; all workers are stopped\n"
    assert psutil.wait_procs(family, timeout=10)[1] == []


def test_under_nohup_a_closed_terminal_does_not_end_the_job(tmp_path: Path) -> None:
    script = "touch up; while [ ! -e stop ]; do sleep 0.05; done"
    launcher = subprocess.Popen(["nohup", *HVDRUN, "-np", "1", "bash", "-c", script], cwd=tmp_path)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "up").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        launcher.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        (tmp_path / "stop").touch()
        assert launcher.wait(30) == 0
    finally:
        launcher.kill()
        launcher.wait()


def test_a_program_that_never_calls_init_is_named_with_its_process_and_writes_its_stack(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, time\n"
        "def load_data():\n"
        "    time.sleep(60)\n"
        "if os.environ['HOROVOD_RANK'] == '1':\n"
        "    load_data()\n"
        "import hvd_cluster.torch as hvd\n"
        "hvd.init()\n"
    )
    env = {**os.environ, "HOROVOD_GLOO_TIMEOUT_SECONDS": "1"}
    result = hvdrun("-np", "2", sys.executable, str(script), env=env)
    assert "Missing: 1; " in result.stderr
    named = r"still runs 1 s after the first failure: rank 1 \(process \d+ on 127\.0\.0\.1\)$"
    assert re.search(named, result.stderr, re.M)
    assert f'[1]<stderr>:  File "{script}", line 3 in load_data\n' in result.stderr


def test_a_rank_that_merely_noticed_the_end_of_another_is_not_blamed() -> None:
    script = """if [ $RANK = 0 ]; then echo 'hvd_cluster.errors.HorovodInternalError: rank 1 left' >&2; exit 1; fi
    sleep 0.5; echo 'ValueError: the cause' >&2; exit 1"""
    result = hvdrun("-np", "2", "bash", "-c", script)
    assert result.returncode == 1
    assert "Process 1 exit with status code 1." in result.stderr
    assert result.stderr.endswith("Last output of rank 1:\n  ValueError: the cause\n")


def test_the_traceback_of_a_rank_that_hangs_after_it_is_shown_before_its_consequences() -> None:
    script = """echo 'Traceback (most recent call last):' >&2
    if [ $RANK = 1 ]; then echo 'ValueError: the cause' >&2; sleep 300; fi
    sleep 0.5; echo 'hvd_cluster.errors.HorovodInternalError: rank 1 left' >&2; exit 1"""
    result = hvdrun("-np", "3", "bash", "-c", script)
    assert result.returncode == 1
    assert result.stderr.count("ValueError: the cause") == 1
    assert result.stderr.index("ValueError: the cause") < result.stderr.index("HorovodInternalError")


def test_a_dry_run_runs_nothing_and_obsolete_flags_cost_a_line(tmp_path: Path) -> None:
    result = hvdrun("-np", "2", "--dry-run", "--mpi", "--tcp", "touch", str(tmp_path / "file"))
    assert result.returncode == 0
    assert [line.partition(":")[0] for line in result.stdout.splitlines()] == ["[0] localhost", "[1] localhost"]
    assert [line.split()[1] for line in result.stderr.splitlines()] == ["--mpi", "--tcp"]
    assert not (tmp_path / "file").exists()


def test_output_files_hold_what_the_console_shows(tmp_path: Path) -> None:
    result = hvdrun("-np", "2", "--output-filename", str(tmp_path / "logs"), "bash", "-c", "echo $RANK; echo e >&2")
    assert sorted(result.stdout.splitlines()) == ["[0]<stdout>:0", "[1]<stdout>:1"]
    assert (tmp_path / "logs/rank.1/stdout").read_text() == "1\n"
    assert (tmp_path / "logs/rank.0/stderr").read_text() == "e\n"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = hvdrun("-np", "1", "--output-filename", str(tmp_path / "file"), "true")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "--output-filename" in result.stderr


def test_lines_can_carry_the_time() -> None:
    result = hvdrun("-np", "1", "-prefix-timestamp", "echo", "x")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[0\]<stdout>:x\n", result.stdout)


def test_variables_may_come_before_the_program() -> None:
    result = hvdrun("-np", "2", "LR=a b", "NAME.WITH.DOT=1", "bash", "-c", 'echo "$LR"; env | grep NAME.WITH.DOT')
    assert sorted(result.stdout.splitlines()) == sorted(
        f"[{rank}]<stdout>:{line}" for rank in range(2) for line in ("a b", "NAME.WITH.DOT=1")
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-np", "3", "-H", "localhost:2", "true"], "Requested more processes (3) than there are available slots (2)"),
        (["-np", "1", "-H", "localhost", "true"], "Invalid host input"),
        (["-np", "1", "no-such-program"], "the program 'no-such-program' does not exist on this host"),
        (
            ["--min-np", "1", "-H", "localhost:1,elsewhere:1", "no-such"],
            "the program 'no-such' does not exist on this host",
        ),
        (["-np", "1", "A=1", "no-such-program"], "the program 'no-such-program' does not exist on this host"),
        (
            ["-np", "2", "-H", "localhost:1", "localhost:1", "true"],
            "-H ends with 'localhost:1', and the command begins with 'localhost:1': write the hosts without spaces",
        ),
        (
            ["-np", "1", "-H", "a:1,", "b:1", "true"],
            "-H ends with 'a:1,', and the command begins with 'b:1': write the",
        ),
        (
            ["-np", "1", "-H", "a:1", ",b:1", "true"],
            "-H ends with 'a:1', and the command begins with ',b:1': write the",
        ),
        (["-np", "0", "true"], "-np=0 must be a whole number of at least 1"),
        (["true"], "the number of workers is missing: -np N"),
        (["-np", "1", "--start-timeout", "0", "true"], "--start-timeout=0 must be > 0"),
        (["-np", "2", "--min-np", "1", "-H", "localhost:2", "true"], "Cannot run in fault tolerance mode with fewer"),
        (["-np", "1", "--cycle-time-ms=-1", "true"], "--cycle-time-ms=-1.0 must be >= 0"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(arguments: list[str], text: str) -> None:
    result = hvdrun(*arguments)
    assert result.returncode == 2
    assert result.stderr.startswith(f"hvdrun: {text}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.py", "hvdrun: 'train.py' is a Python script, not a program: write python train.py\n"),
        ("train", "chmod +x"),
    ],
)
def test_a_script_without_what_runs_it_is_refused_with_what_to_write(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text("print('here')\n")
    result = hvdrun("-np", "2", name, cwd=tmp_path)
    assert result.returncode == 2
    assert text in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_setting_that_no_worker_could_read_is_refused_before_they_start() -> None:
    result = hvdrun("-np", "1", "true", env={**os.environ, "HOROVOD_CYCLE_TIME": "soon"})
    assert result.returncode == 2
    assert "HOROVOD_CYCLE_TIME='soon'" in result.stderr


def test_a_reader_that_goes_away_does_not_hang_the_job() -> None:
    pipe = f"{' '.join(HVDRUN)} -np 1 seq 100000 | head -n 1"
    assert subprocess.check_output(["bash", "-c", pipe], text=True, timeout=60) == "[0]<stdout>:1\n"


def test_scripts_that_import_horovod_run_when_asked_to() -> None:
    script = "import horovod; print(horovod.__version__)"
    result = hvdrun("-np", "1", "--as-horovod", sys.executable, "-c", script)
    assert (result.returncode, result.stdout) == (0, "[0]<stdout>:0.28.1\n")
    result = hvdrun("-np", "1", sys.executable, "-c", script)
    assert "No module named 'horovod'\n\nRank 0 on " in result.stderr
    assert "\nhvd_cluster serves `import horovod` in programs that horovodrun or " in result.stderr


def test_programs_get_the_signals_that_shells_expect() -> None:
    result = hvdrun("-np", "1", "bash", "-o", "pipefail", "-c", "yes | head -n 1; echo ${PIPESTATUS[0]}")
    assert result.stdout.splitlines()[-1] == f"[0]<stdout>:{128 + signal.SIGPIPE}"


def test_the_command_starts_without_torch() -> None:
    code = "import sys, hvd_cluster.launch.cli.main; print({'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
