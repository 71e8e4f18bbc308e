from __future__ import annotations

import subprocess
import sys

from hvd_cluster.rendezvous.addresses import host_key, interface_addresses, interface_names


def test_two_processes_of_one_machine_have_one_key() -> None:
    code = "from hvd_cluster.rendezvous.addresses import host_key; print(host_key())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other == host_key()


def test_interfaces_are_one_text_or_several_with_spaces_or_without() -> None:
    assert interface_names("eth0, eth1,") == interface_names(["eth0", " eth1"]) == ("eth0", "eth1")
    assert interface_addresses("none, lo") == interface_addresses(["lo"]) == ["127.0.0.1"]
    assert interface_addresses(",") == []
