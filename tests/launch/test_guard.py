from __future__ import annotations

import subprocess
import sys
import time

import psutil


def test_there_is_one_guard_while_anything_is_held_and_none_afterwards() -> None:
    # In a process of its own: other tests' workers hold a guard in this one.
    code = """
import subprocess, psutil
from hvd_cluster.launch import guard

def guards():
    return sum("# guard of hvd_cluster" in " ".join(child.cmdline()) for child in psutil.Process().children())

one = subprocess.Popen(["sleep", "300"], start_new_session=True)
try:
    counts = []
    guard.hold(one.pid)
    guard.hold(10**8)
    counts.append(guards())
    guard.release(10**8)
    counts.append(guards())
    guard.release(one.pid)
    counts.append(guards())
    print(counts, one.poll())
finally:
    one.kill()
    one.wait()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("[1, 1, 0] None\n", "")


def test_a_group_that_was_released_outlives_the_launcher_and_one_that_is_held_does_not() -> None:
    code = """
import os, signal, subprocess, sys
from hvd_cluster.launch import guard
quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
held, free = (subprocess.Popen(["sleep", "300"], start_new_session=True, **quiet) for _ in "ab")
guard.hold(held.pid); guard.hold(free.pid); guard.release(free.pid)
print(held.pid, free.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    held, free = map(int, result.stdout.split())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(held) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not psutil.pid_exists(held)
    psutil.Process(free).kill()
