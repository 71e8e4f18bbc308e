"""A trained Keras model as a file for other runtimes; calling this needs Keras."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvd_cluster.errors import DataError
from hvd_cluster.estimators.keras.framework import predict
from hvd_cluster.estimators.keras.structure import as_tensor, flat, inputs_of, keys_of, output_keys, structured
from hvd_cluster.estimators.torch import export as torch_export
from hvd_cluster.estimators.torch.export import NamedModule, compared_rows, require_equal, run_onnx, write_file

#: Format -> the backends that write it.
_BACKENDS = {"onnx": ("torch", "tensorflow", "jax"), "torch": ("torch",), "tf_saved_model": ("tensorflow", "jax")}
#: What Keras needs to write a format, if it is another package than the backend's.
_NEEDED = {("tensorflow", "onnx"): "tf2onnx", ("jax", "onnx"): "jax2onnx"}


def require_format(backend: str, format: str) -> None:
    """Check that a model on a backend of Keras can be written in a format.

    Raises:
        ValueError: it cannot; the text says what can.
    """
    backends = _BACKENDS.get(format)
    if backends is None:
        raise ValueError(f"format={format!r} is not one of {', '.join(map(repr, _BACKENDS))}")
    if backend not in backends:
        others = [repr(name) for name, can in _BACKENDS.items() if backend in can]
        raise ValueError(
            f"format={format!r} is not available for a model on Keras's backend {backend!r}: use "
            f"{' or '.join(others)}, or fit the model with KERAS_BACKEND={backends[0]}"
        )
    needed = _NEEDED.get((backend, format), "tensorflow" if format == "tf_saved_model" else "torch")
    if find_spec(needed) is None:
        raise ValueError(
            f"format={format!r} needs {needed} for a model on Keras's backend {backend!r}: pip install {needed}"
            + (", or use 'tf_saved_model', or fit the model with KERAS_BACKEND=torch" if format == "onnx" else "")
        )


def export(
    model: Any,
    inputs: Mapping[str, Tensor],
    names: Sequence[str],
    order: Sequence[str],
    path: str | os.PathLike[str],
    format: str,
) -> None:
    """Write a model to a file or folder, once that has given the scores of the model.

    Args:
        model: with weights.
        inputs: name -> tensor of shape (rows, ...), in the order of the model's inputs, for some rows.
        names: of the outputs.
        order: of the outputs, if the model returns a dict with these names.
        path: where to write, a path or URL; for "tf_saved_model" a local folder.
        format: one that :func:`require_format` accepts.

    Raises:
        DataError: the model cannot be exported, or the file gives other values than the model.
        MissingExtraError: ONNX's packages are not installed.
    """
    import keras

    compared = compared_rows(inputs)
    expected = dict(zip(names, predict(model, list(compared.values()), order), strict=True))  # builds the model, too
    if keras.config.backend() == "torch":
        module = NamedModule(_Positional(model, order), False, names)
        with torch.no_grad():
            require_equal(module(compared), expected)
        torch_export.export(module, inputs, path, format)
        return
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "model")
        if len({re.sub(r"\W", "_", name).lower() for name in inputs}) < len(inputs) or any(
            " " in one for one in inputs
        ):
            raise DataError(
                f"the model cannot be exported as {format!r} with the columns {', '.join(map(repr, inputs))}: their "
                "names become those of arguments, without spaces, and must differ in more than case and punctuation"
            )
        try:
            named = _named(model, inputs, names, order)
            named({name: value.numpy() for name, value in compared.items()})  # Keras refuses one that was never called
            named.export(str(target), format=format, verbose=False)
        except Exception as error:  # tracing runs the user's model, and exporters raise what they like
            raise DataError(f"the model cannot be exported as {format!r}: {type(error).__name__}: {error}") from error
        require_equal(run_onnx(target, names, compared) if format == "onnx" else _served(target, compared), expected)
        if format == "onnx":
            write_file(path, target)
        else:
            if "://" in str(path):
                raise DataError(f"{format!r} is a folder, which is written to a local path, not to {path!r}")
            shutil.copytree(target, path, dirs_exist_ok=True)


class _Positional(torch.nn.Module):
    """A model on Keras's torch backend, with an argument per input, outputs in order."""

    def __init__(self, model: Any, order: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self._order = order

    def forward(self, *features: Tensor) -> tuple[Any, ...]:
        return tuple(_outputs(self.model, features, self._order))


def _outputs(model: Any, features: Sequence[Any], order: Sequence[str]) -> list[Any]:
    raw = model(structured(features, keys_of(inputs_of(model))), training=False)
    return flat(raw, output_keys(raw, model, order))


def _named(model: Any, inputs: Mapping[str, Tensor], names: Sequence[str], order: Sequence[str]) -> Any:
    """A Keras model around ``model`` with dicts in and out, for any number of rows."""
    import keras

    known = inputs_of(model)
    shapes = [value.shape[1:] for value in inputs.values()] if known is None else [one.shape[1:] for one in flat(known)]
    given = {
        name: keras.Input(tuple(shape), name=name, dtype=str(value.dtype).removeprefix("torch."))
        for (name, value), shape in zip(inputs.items(), shapes, strict=True)
    }
    return keras.Model(given, dict(zip(names, _outputs(model, list(given.values()), order), strict=True)))


def _served(folder: Path, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of a SavedModel by name."""
    from hvd_cluster.keras.saved_model import serve

    found = serve(folder, {name: value.numpy() for name, value in inputs.items()})
    return {name: as_tensor(value) for name, value in found.items()}
