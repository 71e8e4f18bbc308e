"""A quiet local Spark session for the benchmarks that need one."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def session(cores: int) -> Iterator[Any]:
    """A session on ``local[cores]``."""
    from pyspark.sql import SparkSession

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    with tempfile.TemporaryDirectory() as folder:
        builder = SparkSession.builder.master(f"local[{cores}]").config("spark.ui.enabled", False)
        builder = builder.config("spark.ui.showConsoleProgress", False).config("spark.local.dir", folder)
        spark = builder.config("spark.sql.warehouse.dir", f"{folder}/warehouse").getOrCreate()
        spark.sparkContext.setLogLevel("ERROR")
        try:
            yield spark
        finally:
            spark.stop()
