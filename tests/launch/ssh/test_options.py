from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

import hvd_cluster
from hvd_cluster.launch.ssh.options import SshOptions, exit_reason, is_temporary


@pytest.mark.processes
def test_ssh_never_asks_and_gives_up_on_a_dead_network() -> None:
    line = SshOptions(port=2222, identity_file="key", connect_timeout_s=7).arguments("me@host", ["echo", "a b"])
    text = shlex.join(line)
    assert line[0] == "ssh"
    for option in ("BatchMode=yes", "ConnectTimeout=7", "ServerAliveInterval=5", "-p 2222", "-i key"):
        assert option in text
    assert line[-2:] == ["me@host", "echo 'a b'"]


@pytest.mark.processes
@pytest.mark.parametrize(("host", "told"), [("me@[fe80::1]", "me@fe80::1"), ("[2001:db8::7]", "2001:db8::7")])
def test_ssh_gets_an_address_without_brackets(host: str, told: str) -> None:
    assert SshOptions().arguments(host, ["true"])[-2:] == [told, "true"]
    assert f"(try: ssh {told} true)" in exit_reason(host, 255, "", "/x")


def test_the_agent_starts_with_what_it_is_given_and_nothing_secret() -> None:
    command = SshOptions(python="/opt/python").agent_command({"PYTHONPATH": "/a b:/c"})
    assert command[:-1] == ["exec", "env", "PYTHONPATH=/a b:/c", "/opt/python", "-c"]


def test_what_lies_in_the_home_folder_does_not_get_into_the_agent(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('the home folder was imported from')\n")
    path = {"PYTHONPATH": str(Path(hvd_cluster.__file__).parents[1])}
    for more in ({}, {"PYTHONSAFEPATH": "1"}):
        line = shlex.join(SshOptions().agent_command({**path, **more}))
        done = subprocess.run(["sh", "-c", line], cwd=tmp_path, input="", capture_output=True, text=True, check=False)
        assert done.stderr == "hvd_cluster's agent: the launcher ended before it sent its bootstrap message\n"


@pytest.mark.parametrize(
    ("exit_code", "output", "passes"),
    [
        (255, "ssh: connect to host a port 22: Connection refused", True),
        (255, "ssh: Could not resolve hostname a: Name or service not known", True),
        (255, "me@a: Permission denied (publickey).", False),
        (255, "Host key verification failed.", False),
        (127, "env: '/x/python': No such file or directory", False),
    ],
)
def test_a_host_that_is_not_up_yet_is_told_from_one_that_refuses(exit_code: int, output: str, passes: bool) -> None:
    assert is_temporary(exit_code, output) is passes


def test_an_ending_names_the_host_and_the_remedy() -> None:
    text = exit_reason("a", 255, "Permission denied", "/x")
    assert "must be able to log in without a password (try: ssh a true)" in text
    assert "/x/python does not exist there; all hosts need the same" in exit_reason("a", 127, "", "/x/python")
    assert exit_reason("a", 1, "Traceback", "/x").endswith("agent ended with code 1\n    Traceback")
