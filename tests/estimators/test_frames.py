from __future__ import annotations

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd_cluster.errors import DataError
from hvd_cluster.estimators.frames import Frame, column_names, kind_of


def test_each_kind_of_data_is_recognised_and_its_columns_are_listed(tmp_path):
    table = pa.table({"a": [1, 2], "b": [3.0, 4.0]})
    pq.write_table(table, tmp_path / "part.parquet")
    for data, kind in ((table, Frame.ARROW), (table.to_pandas(), Frame.PANDAS), (str(tmp_path), Frame.PARQUET)):
        assert kind_of(data) is kind
        assert column_names(data) == ["a", "b"]


def test_a_subclass_of_a_dataframe_is_recognised():
    class Mine(pd.DataFrame): ...

    assert kind_of(Mine({"a": [1]})) is Frame.PANDAS


def test_a_dataframe_of_pandas_on_spark_is_not_taken_for_one_of_spark():
    frame = type("DataFrame", (), {"__module__": "pyspark.pandas.frame"})
    with pytest.raises(DataError, match=r"pyspark\.pandas\.frame\.DataFrame is not supported: give a Spark DataFrame"):
        kind_of(frame())
    assert kind_of(type("DataFrame", (), {"__module__": "pyspark.sql.classic.dataframe"})()) is Frame.SPARK


def test_other_data_is_rejected_with_the_supported_kinds():
    with pytest.raises(DataError, match=r"builtins\.list is not supported: give a Spark DataFrame, a pandas"):
        kind_of([1, 2])


def test_a_path_without_parquet_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no Parquet can be read at '.*nothing': there is no such file or folder"):
        column_names(str(tmp_path / "nothing"))
    with pytest.raises(DataError, match=r"\*\.parquet'.*give the folder instead of a pattern"):
        column_names(str(tmp_path / "*.parquet"))
    with pytest.raises(DataError, match="no Parquet can be read at .*: the folder holds no Parquet files"):
        column_names(str(tmp_path))
