"""``horovod.runner.elastic.{constants,driver,registration}``: their constants."""

from __future__ import annotations

#: Seconds that an elastic job waits for enough slots by default.
ELASTIC_TIMEOUT_SECS = 600
#: Seconds between two discoveries of the hosts.
DISCOVER_HOSTS_FREQUENCY_SECS = 1.0
RESET_LIMIT_EXCEEDED_MESSAGE = "Horovod was shutdown because number of resets during elastic job exceeded limit: {}"
READY, SUCCESS, FAILURE = "READY", "SUCCESS", "FAILURE"
