from __future__ import annotations

import subprocess
import sys

from hvd_cluster.rendezvous.addresses import host_key


def test_two_processes_of_one_machine_have_one_key() -> None:
    code = "from hvd_cluster.rendezvous.addresses import host_key; print(host_key())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other == host_key()
