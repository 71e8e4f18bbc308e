# ruff: noqa: N802 - the spelling is that of pyspark.ml
"""TorchModel: what TorchEstimator returns. Scores DataFrames, and keeps how it came about."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch

from hvd_cluster.data.pandas_table import to_table
from hvd_cluster.data.schema import Kind, missing_columns_text
from hvd_cluster.estimators import history
from hvd_cluster.estimators.frames import Frame, column_names, kind_of
from hvd_cluster.estimators.params import MODEL_ROWS, TORCH_MODEL_ROWS, with_params
from hvd_cluster.estimators.scoring import VECTOR, Scorer, ShippedModel, content_key, score_batches
from hvd_cluster.estimators.spec import Inputs, TrainSpec
from hvd_cluster.estimators.stage import Model, Stage


@dataclass(frozen=True)
class Metadata:
    """What scoring must know of the training: everything here is plain data."""

    feature_cols: tuple[str, ...]
    label_cols: tuple[str, ...]
    #: dtype of each feature at the model's edge, by torch's name.
    feature_dtypes: tuple[str, ...]
    #: Type of each output column: a scalar's numpy name, or "vector".
    output_types: tuple[str, ...]
    #: Shape of one row of each output.
    output_shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, spec: TrainSpec) -> Metadata:
        columns = [spec.dataset.schema[name] for name in spec.inputs.label_cols]
        return cls(
            feature_cols=spec.inputs.feature_cols,
            label_cols=spec.inputs.label_cols,
            feature_dtypes=spec.inputs.feature_dtypes,
            output_types=tuple(
                output_type(column.kind, column.dtype, shape)
                for column, shape in zip(columns, spec.output_shapes, strict=False)
            ),
            output_shapes=spec.output_shapes,
        )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def output_type(kind: Kind, dtype: str, shape: Sequence[int]) -> str:
    """The type of an output column: the label's own for one number a row (integers are rounded), else a vector."""
    if math.prod(shape) != 1 or kind in {Kind.LIST, Kind.VECTOR}:
        return VECTOR
    return dtype if kind in {Kind.NUMERIC, Kind.BOOL} and dtype != "float16" else "float64"


@with_params(MODEL_ROWS, TORCH_MODEL_ROWS)
class TorchModel(Stage, Model):
    """A trained PyTorch model as a transformer.

    ``transform(data)`` keeps every column and adds one for each output, named ``<label>__output`` unless
    ``output_cols`` says otherwise. A pandas DataFrame gives a pandas DataFrame, a pyarrow Table a Table, a Spark
    DataFrame a Spark DataFrame. An output of one number a row has the type of its label column (integers are rounded);
    any other is a vector: Spark ML's on Spark, a list of float32 elsewhere.

    Raises (from transform):
        ValueError: an output column exists already, or a feature column does not.
        DataError: a feature column holds nulls or is none that the model takes.
    """

    @property
    def history(self) -> Any:
        """One row for each epoch, as a pandas DataFrame; ``getHistory()`` has it as it was recorded."""
        return history.frame(self._value("history") or [])

    def getOutputCols(self) -> list[str]:
        """The columns that transform adds."""
        given: list[str] | None = self._value("output_cols")
        return given or [f"{label}__output" for label in self._value("label_columns") or []]

    def get_prediction_fn(self) -> Callable[[torch.nn.Module, Any], Any]:
        """A function ``(model, row)`` -> the prediction for one row, or a list with one for each output.

        Where a subclass brings its own, scoring goes row by row through it; else by Arrow batches.
        """
        scorer = self._scorer(spark_vectors=False)

        def predict_fn(model: torch.nn.Module, row: Any) -> Any:
            batch = {name: torch.as_tensor(_plain(row[name])).unsqueeze(0) for name in scorer.inputs.feature_cols}
            with torch.no_grad():
                return model(*scorer.inputs.features(batch, torch.device("cpu")))

        return predict_fn

    def _get_metadata(self) -> Any:
        return self._value("_metadata")

    def _transform(self, dataset: Any) -> Any:
        kind = kind_of(dataset)
        if kind is Frame.PARQUET:
            raise ValueError("transform takes a DataFrame or a Table: read the Parquet first, for example with pandas")
        names = column_names(dataset)
        self._check(names)
        if kind is Frame.SPARK:
            return self._transform_spark(dataset)
        outputs = self._score(dataset)
        if kind is Frame.ARROW:
            for name, column in zip(self.getOutputCols(), outputs, strict=True):
                dataset = dataset.append_column(name, column)
            return dataset
        values = {name: column.to_pandas().array for name, column in zip(self.getOutputCols(), outputs, strict=True)}
        return dataset.assign(**values)

    def _check(self, names: list[str]) -> None:
        """Raise for everything that keeps these columns from being scored, all at once."""
        wrong = []
        if not isinstance(self._value("model"), torch.nn.Module):
            wrong.append("this TorchModel has no model: give model=, or setModel()")
        wrong += [f"{name} is required" for name in ("feature_columns", "label_columns") if not self._value(name)]
        outputs = self.getOutputCols()
        if len(outputs) != len(self._value("label_columns") or []):
            wrong.append(f"output_cols has {len(outputs)} names for {len(self._value('label_columns') or [])} outputs")
        wrong += [
            f"output column {name!r} exists already in the data: choose another with setOutputCols"
            for name in outputs
            if name in names
        ]
        if self._predicts_by_batch() and (lost := [n for n in self._value("feature_columns") or [] if n not in names]):
            wrong.append(missing_columns_text(lost, names))
        if wrong:
            raise ValueError("\n".join(wrong))

    def _predicts_by_batch(self) -> bool:
        return type(self).get_prediction_fn is TorchModel.get_prediction_fn

    def _scorer(self, spark_vectors: bool) -> Scorer:
        metadata = self._get_metadata() or {}
        features = tuple(self._value("feature_columns"))
        labels = self._value("label_columns")
        shapes = self._value("input_shapes")
        floating = next(
            (p.dtype for p in self._value("model").parameters() if p.dtype.is_floating_point), torch.float32
        )
        return Scorer(
            inputs=Inputs(
                feature_cols=features,
                label_cols=(),
                input_shapes=None if shapes is None else tuple(tuple(shape) for shape in shapes),
                feature_dtypes=tuple(
                    metadata.get("feature_dtypes") or (str(floating).removeprefix("torch."),) * len(features)
                ),
            ),
            output_cols=tuple(self.getOutputCols()),
            # A model that was put together by hand tells no shapes: a vector holds any of them.
            output_types=tuple(metadata.get("output_types") or (VECTOR,) * len(labels)),
            spark_vectors=spark_vectors,
            batch_size=self._value("batch_size"),
        )

    def _score(self, data: Any) -> list[Any]:
        """Score a pandas DataFrame or a pyarrow Table in this process."""
        scorer, model = self._scorer(spark_vectors=False), _on_cpu(self._value("model"))
        if not self._predicts_by_batch():
            records = data.to_pylist() if kind_of(data) is Frame.ARROW else data.to_dict("records")
            return scorer.score_rows(model, self.get_prediction_fn(), records)
        if kind_of(data) is Frame.PANDAS:
            data = to_table(data, list(scorer.inputs.feature_cols))
        return scorer.score(model, data.combine_chunks())

    def _transform_spark(self, dataset: Any) -> Any:
        from pyspark.sql.types import StructField, StructType

        from hvd_cluster.data.spark_batches import map_batches
        from hvd_cluster.estimators.spark_rows import spark_type
        from hvd_cluster.spark.session import active

        scorer = self._scorer(spark_vectors=True)
        blob = cloudpickle.dumps(_on_cpu(self._value("model")))
        # Never freed by us: the result is lazy, and may be asked for at any time.
        parcel, _ = active(dataset.sparkSession).ship(blob)
        fields = [
            StructField(name, spark_type(kind), nullable=True)
            for name, kind in zip(scorer.output_cols, scorer.output_types, strict=True)
        ]
        predict_fn = None if self._predicts_by_batch() else self.get_prediction_fn()
        score = functools.partial(score_batches, scorer, ShippedModel(content_key(blob), parcel), predict_fn)
        return map_batches(dataset, score, StructType([*dataset.schema.fields, *fields]))


def _on_cpu(model: torch.nn.Module) -> torch.nn.Module:
    if all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers())):
        return model
    return copy.deepcopy(model).cpu()


def _plain(value: Any) -> Any:
    return value.toArray() if hasattr(value, "toArray") else value
