"""What a worker's standard error shows of the library's messages, in programs that say nothing or something of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

IN_A_WORLD = "import hvd_cluster.engine.basics as hvd\nhvd.init(); hvd.shutdown(); hvd.init()"
#: What init() does for the log, without the rest.
TWICE = (
    "from hvd_cluster.engine.log_output import configure_logging\n"
    "from hvd_cluster.settings import Settings\n"
    "configure_logging(Settings.from_env()); configure_logging(Settings.from_env())"
)
SAY = (
    "logger = logging.getLogger('hvd_cluster.part')\n"
    "logger.debug('a detail'); logger.info('news'); logger.warning('a warning')\n"
)


def said(program: str = TWICE, **variables: str) -> list[str]:
    """The lines about the part on the standard error of a worker whose program begins so."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD")}
    command = [sys.executable, "-c", f"import logging\n{program}\n{SAY}"]
    done = subprocess.run(command, env={**env, **variables}, capture_output=True, text=True, timeout=120, check=True)
    return [line for line in done.stderr.splitlines() if re.search("a detail|news|a warning", line)]


def test_a_worker_logs_at_the_level_that_it_was_given() -> None:
    lines = said(IN_A_WORLD, HOROVOD_LOG_LEVEL="info")
    assert [line.split()[-2:] for line in lines] == [["hvd_cluster.part:", "news"], ["a", "warning"]]


def test_without_a_level_python_s_own_default_holds() -> None:
    assert said() == ["a warning"]


@pytest.mark.parametrize(
    ("level", "heard"),
    [("DEBUG", ["DEBUG", "INFO", "WARNING"]), ("info", ["INFO", "WARNING"]), ("error", [])],
)
def test_a_level_says_which_messages_are_seen(level: str, heard: list[str]) -> None:
    lines = said(HOROVOD_LOG_LEVEL=level)
    assert [re.sub(r"^[-\d]+ [:,\d]+ (\w+) hvd_cluster\.part: .*", r"\1", line) for line in lines] == heard


def test_the_time_may_be_left_out_and_the_program_s_own_handler_is_the_only_one() -> None:
    own = f"{TWICE}\nlogging.basicConfig(format='mine: %(message)s')"
    assert said(HOROVOD_LOG_LEVEL="info", HOROVOD_LOG_HIDE_TIME="1")[0] == "INFO hvd_cluster.part: news"
    assert said(own, HOROVOD_LOG_LEVEL="info") == ["mine: news", "mine: a warning"]
    assert said(own) == ["mine: a warning"]
