"""The pairs of ``horovod.spark.conf``: Spark knows their names, and they mean what theirs say."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_cluster.spark import conf


def test_every_pair_is_a_name_that_has_a_default_and_a_text() -> None:
    pairs = {name: pair for name, pair in vars(conf).items() if isinstance(pair, tuple)}
    assert len(pairs) == 15
    for name, value in pairs.values():
        assert name in conf.SPARK_CONF_DEFAULT_VALUES
        assert isinstance(value, str)


def test_opposites_are_about_one_setting() -> None:
    pairs = {name: pair for name, pair in vars(conf).items() if isinstance(pair, tuple)}
    for name, (setting, value) in pairs.items():
        for word, other in (("_REUSE_", "_DONT_REUSE_"), ("_ALWAYS_", "_ONCE_"), ("_DISABLED", "_ENABLED")):
            opposite = pairs.get(name.replace(word, other)) if word in name and "DONT" not in name else None
            if opposite is not None and opposite != (setting, value):
                assert opposite[0] == setting
                assert opposite[1] != value


@pytest.mark.spark("local")
def test_spark_has_these_defaults(spark: Any) -> None:
    entries = spark.sparkContext._jvm.org.apache.spark.internal.config.ConfigEntry
    found = {name: entries.findEntry(name) for name in conf.SPARK_CONF_DEFAULT_VALUES}
    # Spark has no default of its own for the switch that the others hang on.
    told = {name: str(entry.defaultValueString()) for name, entry in found.items() if not name.endswith("enabled")}
    assert told == {name: value for name, value in conf.SPARK_CONF_DEFAULT_VALUES.items() if name in told}
    assert len(told) == 7
