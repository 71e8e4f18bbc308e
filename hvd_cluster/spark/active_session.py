"""The Spark session of this process, classic or Connect."""

from __future__ import annotations

from typing import Any

from hvd_cluster.data.optional import load_extra
from hvd_cluster.data.spark_jobs import classic_session, connect_session, is_connect
from hvd_cluster.errors import LaunchError
from hvd_cluster.spark.classic import ClassicSession
from hvd_cluster.spark.connect import ConnectSession
from hvd_cluster.spark.session import Session

NO_SESSION_TEXT = "Could not find an active SparkContext, are you running in a PySpark session?"


def active(spark: Any = None) -> Session:
    """The session to run on: the given one, else this process's active session.

    It may be a classic or a Connect session.

    Raises:
        LaunchError: there is no session.
        MissingExtraError: pyspark is not installed.
    """
    load_extra("pyspark", "spark", "to run workers on Spark")
    spark = spark or connect_session() or classic_session()
    if spark is None:
        raise LaunchError(f"{NO_SESSION_TEXT} Start one with SparkSession.builder.getOrCreate(), or pass spark=.")
    kind = ConnectSession if is_connect(spark) else ClassicSession
    return kind(spark)


def spark_url(path: str) -> str:
    """A path or URL with scheme and host, as the classic session resolves it.

    Unchanged if this process has no such session.
    """
    try:
        spark = None if connect_session() is not None else classic_session()
    except ImportError:  # no pyspark, or one that is a client of Connect servers alone
        return path
    return path if spark is None else ClassicSession(spark).url_of(path)
