"""An ``ssh`` that leads back to this host, whatever host it is told: its agents are real, and so are their connections.

While a file ``hold`` is in the fixture's folder, nobody gets through.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_SCRIPT = """\
#!/bin/sh
for last; do :; done
case "$2" in -x) ;; *) exit 0 ;; esac
while [ -e {folder}/hold ]; do sleep 0.05; done
echo $$ >> {folder}/pids
exec sh -c "$last"
"""


@pytest.fixture
def loopback_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder: ``pids`` in it holds the process ids of the agents, one in a line."""
    folder = tmp_path / "ssh"
    folder.mkdir()
    program = folder / "ssh"
    program.write_text(_SCRIPT.format(folder=folder))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{Path(sys.executable).parent}:/usr/bin:/bin")
    return folder
