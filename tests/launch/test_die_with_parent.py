from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil

from hvd_cluster.launch import die_with_parent

PROGRAM = [sys.executable, "-I", "-S", str(die_with_parent.__file__)]


def test_a_program_dies_with_the_process_that_forked_it() -> None:
    code = f"""
import os, signal, subprocess, sys
child = subprocess.Popen([*{PROGRAM!r}, str(os.getpid()), "bash", "-c", "echo up >&2; exec sleep 300"],
                         stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
child.stderr.readline()
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    child = int(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False).stdout)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not psutil.pid_exists(child)


def test_a_program_whose_parent_has_gone_already_does_not_start() -> None:
    result = subprocess.run([*PROGRAM, str(os.getpid() + 1), "echo", "started"], capture_output=True, check=False)
    assert (result.returncode, result.stdout) == (-signal.SIGKILL, b"")


def test_a_program_that_cannot_be_started_gives_the_exit_code_of_shells() -> None:
    result = subprocess.run([*PROGRAM, str(os.getpid()), "/no/such"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (127, "cannot start /no/such: No such file or directory\n")
    result = subprocess.run([*PROGRAM, str(os.getpid()), "/etc/passwd"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (126, "cannot start /etc/passwd: Permission denied\n")


def test_a_program_starts_without_signals_blocked() -> None:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        command = [*PROGRAM, str(os.getpid()), "grep", "SigBlk", "/proc/self/status"]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert int(result.stdout.split()[1], 16) == 0
