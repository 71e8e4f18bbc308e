"""A trained module as a file for other runtimes: ONNX, or an exported program.

The exported program is torch's own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvd_cluster.data.columns.pandas_table import to_table
from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError, MissingExtraError
from hvd_cluster.estimators.frames import Frame, kind_of
from hvd_cluster.estimators.scoring.scorer import Scorer
from hvd_cluster.estimators.spec import Inputs, called
from hvd_cluster.estimators.torch.objective import as_outputs

logger = logging.getLogger(__name__)

FORMATS = ("onnx", "torch")
#: Rows that the module is traced with, and other rows that the file is compared with the module on.
_TRACED_ROWS, _COMPARED_ROWS = 3, 2
_TOLERANCE = 1e-5


class NamedModule(torch.nn.Module):
    """A module whose arguments and outputs are a dict of tensors each.

    Args:
        model: the module.
        by_keyword: it gets its arguments by name; otherwise in their order.
        names: of the outputs.
        output_fn: takes what counts of the outputs.
        order: of the outputs, if these are the names that the model gives them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        by_keyword: bool,
        names: Sequence[str],
        output_fn: Callable[[Any], Any] | None = None,
        order: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.model = model
        self._by_keyword = by_keyword
        self._names = tuple(names)
        self._output_fn = output_fn
        self._order = tuple(order)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The outputs by name, each of shape (rows, ...)."""
        raw = called(self.model, inputs if self._by_keyword else list(inputs.values()))
        return dict(zip(self._names, as_outputs(raw, self._output_fn, self._order), strict=True))


def example_arguments(scorer: Scorer, model: Any, rows: Any) -> tuple[Inputs, dict[str, Tensor]]:
    """The inputs of a model, and what it gets of some rows, by name.

    Args:
        scorer: calls the model.
        model: the model, in evaluation mode.
        rows: a pandas DataFrame or pyarrow Table with the feature columns; None if there is none.

    Raises:
        ValueError: there are no rows.
    """
    if rows is None:
        raise ValueError("example is required: give a few rows of the feature columns, to try the exported file on")
    columns = list(dict.fromkeys(scorer.inputs.feature_cols))
    if kind_of(rows) is Frame.PANDAS:
        rows = to_table(rows, columns)
    found = scorer.arguments_of(model, rows.select(columns))
    found.inputs.require_whole(found.tensors)
    values = found.inputs.tensors(found.tensors, torch.device("cpu"))
    return found.inputs, dict(zip(found.inputs.arguments, values, strict=True))


def export(module: NamedModule, inputs: Mapping[str, Tensor], path: str | os.PathLike[str], format: str) -> None:
    """Write a module to a file, once the file has been compared with the module.

    Args:
        module: in evaluation mode, on the CPU.
        inputs: name -> tensor of shape (rows, ...), for some rows. The number of rows may be another one later, and so
            may every other size that the module does not fix.
        path: where to write, a path or URL.
        format: "onnx" or "torch".

    Raises:
        DataError: the module cannot be exported, or the file gives other outputs.
        MissingExtraError: ONNX's packages are not installed.
    """
    traced, compared = _rows(inputs, 0, _TRACED_ROWS), compared_rows(inputs)
    auto = torch.export.Dim.AUTO
    sizes = {"inputs": {name: dict.fromkeys(range(value.dim()), auto) for name, value in traced.items()}}
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model")
        try:
            program = torch.export.export(module, (traced,), dynamic_shapes=sizes, strict=False)
            names = list(module(traced))
            if format == "onnx":
                found = _write_onnx(program, file, names, compared)
            else:
                found = _write_torch(program, file, compared)
        except (MissingExtraError, DataError):
            raise
        except Exception as error:  # tracing runs the user's model, and exporters raise what they like
            raise DataError(f"the model cannot be exported as {format!r}: {type(error).__name__}: {error}") from error
        require_equal(found, module(compared))
        if fixed := _fixed_sizes(program, module, traced):
            logger.warning(
                "the exported model takes only one size in %s, while the model takes others: code that depends on the "
                "size of its input, such as a loop over it, was traced for the example rows",
                ", ".join(fixed),
            )
        write_file(path, file)


def write_file(path: str | os.PathLike[str], file: Path) -> None:
    """Copy a local file to a path or URL."""
    folder, _, _ = os.fspath(path).rpartition("/")
    Store.create(folder or ".").write(os.fspath(path), file.read_bytes())


def require_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Check that a file gives the outputs of the model.

    Raises:
        DataError: it does not; the text names the output.
    """
    for name, value in expected.items():
        if difference := _difference(found[name], value):
            raise DataError(
                f"the exported model gives other values than the model in output {name!r}, {difference}: something in "
                "it may depend on the rows that it was traced with"
            )


def _difference(found: Tensor, expected: Tensor) -> str:
    """How an output of the file differs from the model's; empty if it does not.

    NaN is equal to NaN.
    """
    if found.shape != expected.shape:
        return f"of shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    wide = torch.promote_types(expected.dtype, torch.float64)
    found, expected = found.to(wide), expected.to(wide)
    largest = expected.abs().nan_to_num(0.0, 0.0, 0.0).max().item() if expected.numel() else 0.0
    if torch.allclose(found, expected, rtol=0.0, atol=_TOLERANCE * max(1.0, largest), equal_nan=True):
        return ""
    return f"apart by {(found - expected).abs().max().item():g}"


def _fixed_sizes(program: Any, module: NamedModule, traced: dict[str, Tensor]) -> list[str]:
    """Input dimensions that the program takes in one size, and the module in others."""
    nodes = {node.name: node for node in program.graph.nodes}
    dimensions: dict[int, list[tuple[str, int]]] = {}
    for name, placeholder in zip(traced, program.graph_signature.user_inputs, strict=True):
        for dimension, size in enumerate(nodes[placeholder].meta["val"].shape):
            if str(size).isdigit():  # an open one has a name, such as s12
                dimensions.setdefault(int(size), []).append((name, dimension))
    found = []
    for size, places in dimensions.items():  # what has one size may have to keep one, such as ids and their mask
        larger = dict(traced)
        for name, dimension in places:
            value = larger[name]
            larger[name] = torch.cat([value, value.narrow(dimension, 0, 1)], dimension)
        with contextlib.suppress(Exception):  # the user's model, which may refuse another size with anything
            module(larger)
            found += [f"dimension {dimension} of {name!r} ({size})" for name, dimension in places]
    return found


def compared_rows(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The rows on which a file is compared with the model."""
    return _rows(inputs, 1, _COMPARED_ROWS)


def _rows(inputs: Mapping[str, Tensor], first: int, count: int) -> dict[str, Tensor]:
    return {name: value[torch.arange(first, first + count) % len(value)] for name, value in inputs.items()}


def _write_torch(program: Any, file: Path, compared: dict[str, Tensor]) -> dict[str, Tensor]:
    with file.open("wb") as stream:
        torch.export.save(program, stream)
    with file.open("rb") as stream:
        found: dict[str, Tensor] = torch.export.load(stream).module()(compared)
    return found


def _write_onnx(program: Any, file: Path, names: list[str], compared: dict[str, Tensor]) -> dict[str, Tensor]:
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("onnxruntime and onnxscript", "onnx", "to export a model as ONNX") from error
    with _quiet():
        made = torch.onnx.export(program, input_names=list(compared), output_names=names, verbose=False)
    assert made is not None
    made.save(file)
    return run_onnx(file, names, compared)


def run_onnx(file: Path, names: Sequence[str], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of an ONNX file by name."""
    import onnxruntime

    session = onnxruntime.InferenceSession(file.read_bytes())
    values = session.run(list(names), {name: value.numpy() for name, value in inputs.items()})
    return {name: torch.from_numpy(value) for name, value in zip(names, values, strict=True)}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide torch's warnings of its own deprecated calls and of missing packages.

    The latter concern operations of packages that are not installed.
    """
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        logger.setLevel(before)
