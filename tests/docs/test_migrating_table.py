"""The guide for migrating lists every old path and every name, as the table that serves them has it.

When the table has changed: ``python tests/docs/test_migrating_table.py`` writes it to the guide.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from hvd_cluster.estimators.keras.params import KERAS_ROWS
from hvd_cluster.estimators.lightning.params import LIGHTNING_ROWS
from hvd_cluster.estimators.params import ESTIMATOR_ROWS, TORCH_ROWS
from hvd_cluster.oldpaths.absent import AbsentFeatureError
from hvd_cluster.oldpaths.forwarder import Forwarder
from hvd_cluster.oldpaths.table import TABLE, Row, row_of

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
HEAD = "| `horovod.` | now |\n|---|---|\n"


def expected(table: Mapping[str, Row]) -> str:
    return HEAD + "".join(f"| `{path or '(itself)'}` | {served(row)} |\n" for path, row in table.items())


def served(row: Row) -> str:
    """Where a row's names live, in words."""
    parts = [f"`{row.module}`"] if row.module else []
    pairs = [(target.partition(":")[0], name, target.partition(":")[2]) for name, target in row.names.items()]
    for module, named in itertools.groupby(pairs, key=lambda pair: pair[0]):
        names = ", ".join(f"`{old}`" if old == new else f"`{old}` (as `{new}`)" for _, old, new in named)
        parts.append(f"{names} in `{module}`")
    if row.absent:
        parts.append("not available: " + ", ".join(f"`{name}`" for name in row.absent))
    return "; ".join(parts)


def test_the_guide_has_the_whole_table() -> None:
    assert expected(TABLE) in PAGE.read_text(), "run python tests/docs/test_migrating_table.py"


def missing_names() -> list[str]:
    """The names below ``horovod`` of the table of what is not here, in the first column, braces expanded."""
    table = PAGE.read_text().partition("| missing | instead |\n|---|---|\n")[2].partition("\n\n")[0]
    names = []
    for quoted in re.findall(r"`horovod\.([^`]+)`", "\n".join(row.split("|")[1] for row in table.splitlines())):
        parts = [part.split(",") for part in re.split(r"[{}]", quoted)]
        names += ["".join(choice) for choice in itertools.product(*parts)]
    return names


@pytest.mark.long
@pytest.mark.parametrize("name", missing_names())
def test_what_the_guide_calls_missing_explains_itself(name: str) -> None:
    parent, _, last = name.rpartition(".")
    row = row_of(parent)
    assert row_of(name) is None
    assert row is not None
    with pytest.raises(AbsentFeatureError, match=r"hvd_cluster does not have horovod\."):
        getattr(Forwarder(f"horovod.{parent}", parent, row), last)()


def test_there_are_missing_names() -> None:
    assert {"runner.gloo_run.gloo_run", "spark.keras.remote.RemoteTrainer"} <= set(missing_names())


def test_params_without_effect_are_listed() -> None:
    listed = re.findall(r"^\| `(\w+)` of (?:estimators|`LightningEstimator`) \|", PAGE.read_text(), re.MULTILINE)
    rows = (*ESTIMATOR_ROWS, *TORCH_ROWS, *KERAS_ROWS, *LIGHTNING_ROWS)
    assert sorted(listed) == sorted(row.name for row in rows if row.doc.startswith("no effect"))


if __name__ == "__main__":
    page = PAGE.read_text()
    old = re.search(re.escape(HEAD) + r"(?:\|.*\n)+", page)
    assert old is not None
    PAGE.write_text(page.replace(old[0], expected(TABLE)))
