"""A driver of its own, for tests that interrupt or kill it: ``driver.py KIND FOLDER``.

Its two workers write their ids to FOLDER/<rank>.pid and then do nothing for long. After an interrupt it writes
FOLDER/interrupted, and what a second run returned to FOLDER/again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins"))

from spark_sessions import session

import hvd_cluster.spark


def idle(folder: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    part = Path(folder, os.environ["HOROVOD_RANK"] + ".part")
    part.write_text(f"{os.getpid()} {child.pid}")
    part.rename(part.with_suffix(".pid"))
    time.sleep(600)


if __name__ == "__main__":
    kind, folder = sys.argv[1:]
    with session(kind, Path(folder, "spark")):
        try:
            hvd_cluster.spark.run(idle, (folder,), num_proc=2)
        except KeyboardInterrupt:
            Path(folder, "interrupted").touch()
        again = hvd_cluster.spark.run(lambda: os.environ["HOROVOD_RANK"], num_proc=2)
        Path(folder, "again").write_text(" ".join(again))
