"""Settings of a Spark session that decide what happens to failing tasks.

They are ``(name, value)`` pairs.

Use them with ``SparkConf().setAll([...])`` or ``SparkSession.builder.config(*pair)`` before the session starts. They
matter to :func:`hvd_cluster.spark.run_elastic`. An executor or node that has failed too often is *excluded*, or
*blacklisted* in the names of these pairs.
"""

from __future__ import annotations

_MAX = str(2**31 - 1)
_NAME = "spark.excludeOnFailure"
_PER_APPLICATION = f"{_NAME}.application"
_PER_STAGE = f"{_NAME}.stage"
_PER_TASK = f"{_NAME}.task"

#: Failures of workers never end the job.
SPARK_CONF_ALWAYS_RESTART_FAILED_TASK = ("spark.task.maxFailures", _MAX)

#: Executors and nodes that have failed are used again.
SPARK_CONF_BLACKLIST_DISABLED = (f"{_NAME}.enabled", "false")
#: Executors and nodes that have failed are excluded as the pairs below say.
SPARK_CONF_BLACKLIST_ENABLED = (f"{_NAME}.enabled", "true")

#: An executor on which a task has failed gets further tasks of the same stage; or not.
SPARK_CONF_REUSE_FAILED_EXECUTOR = (f"{_PER_STAGE}.maxFailedTasksPerExecutor", _MAX)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR = (f"{_PER_STAGE}.maxFailedTasksPerExecutor", "1")
#: A node with a failed executor gets further tasks of the same stage; or not.
SPARK_CONF_REUSE_FAILING_NODE = (f"{_PER_STAGE}.maxFailedExecutorsPerNode", _MAX)
SPARK_CONF_DONT_REUSE_FAILING_NODE = (f"{_PER_STAGE}.maxFailedExecutorsPerNode", "1")

#: The same for all stages of the application.
SPARK_CONF_REUSE_FAILED_EXECUTOR_IN_APP = (f"{_PER_APPLICATION}.maxFailedTasksPerExecutor", _MAX)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR_IN_APP = (f"{_PER_APPLICATION}.maxFailedTasksPerExecutor", "1")
SPARK_CONF_REUSE_FAILING_NODE_IN_APP = (f"{_PER_APPLICATION}.maxFailedExecutorsPerNode", _MAX)
SPARK_CONF_DONT_REUSE_FAILING_NODE_IN_APP = (f"{_PER_APPLICATION}.maxFailedExecutorsPerNode", "1")

#: A failed task may return to the executor, or the node, on which it failed, without limit; or never.
SPARK_CONF_REUSE_EXECUTOR_ALWAYS_FOR_SAME_TASK = (f"{_PER_TASK}.maxTaskAttemptsPerExecutor", _MAX)
SPARK_CONF_REUSE_EXECUTOR_ONCE_FOR_SAME_TASK = (f"{_PER_TASK}.maxTaskAttemptsPerExecutor", "1")
SPARK_CONF_REUSE_NODE_ALWAYS_FOR_SAME_TASK = (f"{_PER_TASK}.maxTaskAttemptsPerNode", _MAX)
SPARK_CONF_REUSE_NODE_ONCE_FOR_SAME_TASK = (f"{_PER_TASK}.maxTaskAttemptsPerNode", "1")

#: Spark's defaults.
SPARK_CONF_DEFAULT_VALUES = {
    "spark.task.maxFailures": "4",
    f"{_NAME}.enabled": "false",
    f"{_PER_TASK}.maxTaskAttemptsPerExecutor": "1",
    f"{_PER_TASK}.maxTaskAttemptsPerNode": "2",
    f"{_PER_STAGE}.maxFailedTasksPerExecutor": "2",
    f"{_PER_STAGE}.maxFailedExecutorsPerNode": "2",
    f"{_PER_APPLICATION}.maxFailedTasksPerExecutor": "2",
    f"{_PER_APPLICATION}.maxFailedExecutorsPerNode": "2",
}
