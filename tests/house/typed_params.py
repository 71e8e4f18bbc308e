"""Prints the typed constructors of estimators and models, from their tables; ``--write`` updates the module."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvd_cluster.estimators.keras.params import KERAS_MODEL_ROWS, KERAS_ROWS
from hvd_cluster.estimators.lightning.params import LIGHTNING_ROWS
from hvd_cluster.estimators.params import ESTIMATOR_ROWS, MODEL_ROWS, TORCH_MODEL_ROWS, TORCH_ROWS
from hvd_cluster.estimators.stages.param_row import Row

TARGET = Path(__file__).parents[2] / "hvd_cluster" / "estimators" / "typed_params.py"

CLASSES = {
    "TorchEstimator": (ESTIMATOR_ROWS, TORCH_ROWS),
    "LightningEstimator": (ESTIMATOR_ROWS, LIGHTNING_ROWS),
    "KerasEstimator": (ESTIMATOR_ROWS, KERAS_ROWS),
    "TorchModel": (MODEL_ROWS, TORCH_MODEL_ROWS),
    "KerasModel": (MODEL_ROWS, KERAS_MODEL_ROWS),
}

#: Name of a rule -> the type of what it takes.
TYPES = {
    "_deprecated": "Any",
    "_whole": "int",
    "anything": "Any",
    "arguments": "Mapping[str, Any]",
    "callables": "Sequence[Callback | Sequence[Callback]]",
    "communication": "Literal['every_step'] | PowerSGD | LocalSGD | DiLoCo",
    "class_weights": "Literal['balanced'] | Mapping[float, float]",
    "column_names": "Columns",
    "flag": "bool",
    "function": "Callback",
    "functions": "Callback | Sequence[Callback]",
    "gpus": "int",
    "items": "Sequence[Any]",
    "metrics": "Sequence[Callback | Sequence[Callback]] | Mapping[str, Callback | Sequence[Callback]]",
    "named": "Mapping[str, Any]",
    "numbers": "Sequence[float]",
    "output_kinds": "str | Sequence[str]",
    "positive": "float",
    "queue_size": "float",
    "shapes": "Sequence[Sequence[int]]",
    "sharding": "Literal['none', 'zero1', 'fsdp2'] | FSDP2",
    "share_or_column": "float | str",
    "stopping": "EarlyStopping | int",
    "text": "str",
    "tracking": "bool | str",
}
#: Params whose rule takes anything, but of which more is known.
KNOWN = {"backend": "Backend | str", "store": "Store | str | os.PathLike[str]"}
KNOWN |= {"history": "Sequence[Mapping[str, Any]]", "_metadata": "Mapping[str, Any]"}

HEADER = '''# ruff: noqa: B006 - the defaults are shown to people and never used
"""The constructors of estimators and models; nothing here runs.

For editors and type checkers. Generated from the tables of params by tests/house/typed_params.py, and checked against
them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from hvd_cluster.data.store import Store
    from hvd_cluster.estimators.backend import Backend
    from hvd_cluster.estimators.run.early_stopping import EarlyStopping
    from hvd_cluster.estimators.torch.strategies.communication import DiLoCo, LocalSGD, PowerSGD
    from hvd_cluster.estimators.torch.strategies.fsdp2 import FSDP2

    class Index(Protocol):
        """An index or array of pandas or NumPy."""

        def tolist(self) -> Any: ...

    Callback = Callable[..., Any]
    Columns = str | Sequence[str] | Index

'''


def type_of(row: Row) -> str:
    rule = getattr(row.rule, "func", row.rule).__name__
    if rule == "_one_of":
        (choices,) = row.rule.args  # type: ignore[attr-defined]
        found = f"Literal[{', '.join(map(repr, choices))}]"
    else:
        found = KNOWN.get(row.name, TYPES[rule])
    return found if found == "Any" else f"{found} | None"


def constructor(tables: Any) -> Iterator[str]:
    rows = {row.name: row for table in tables for row in table}
    for row in rows.values():
        yield f"{row.name}: {type_of(row)} = {row.default!r},"
    # The other names of params, which have no default of their own.
    for row in rows.values():
        for name in (*([row.param] if row.param else []), *([row.alias] if row.alias else [])):
            yield f"{name}: {type_of(row)} = ...,"


def lines() -> Iterator[str]:
    yield HEADER
    for name, tables in CLASSES.items():
        yield f'\nclass {name}Params:\n    """The constructor of :class:`{name}`."""\n\n    if TYPE_CHECKING:\n'
        yield "        def __init__(\n            self,\n            *,"
        for line in constructor(tables):
            yield f"            {line}"
        yield "        ) -> None: ...\n"


def main(arguments: list[str]) -> None:
    text = "\n".join(lines())
    if arguments != ["--write"]:
        print(text)
        return
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(TARGET), "-"]
    TARGET.write_text(subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=True).stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
