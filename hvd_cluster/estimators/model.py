# ruff: noqa: N802 - the spelling is that of pyspark.ml
"""What models of all frameworks share: scoring DataFrames, the history of a fit."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hvd_cluster.data.columns.pandas_table import table_of
from hvd_cluster.data.optional import load_pyarrow
from hvd_cluster.data.preprocessing import Preprocess
from hvd_cluster.data.schema import Schema, missing_columns_text
from hvd_cluster.engine.objects import dumps
from hvd_cluster.estimators.frames import Frame, column_names, kind_of
from hvd_cluster.estimators.params import ModelParams
from hvd_cluster.estimators.run.row_transform import RowTransform
from hvd_cluster.estimators.scoring import output_columns
from hvd_cluster.estimators.scoring.output_columns import ARRAY, VECTOR
from hvd_cluster.estimators.scoring.predictor import predictor_of, with_outputs
from hvd_cluster.estimators.scoring.scorer import Arguments, Framework, Scorer, types_of
from hvd_cluster.estimators.scoring.shipped_model import Scoring, ShippedModel, content_key, score_batches
from hvd_cluster.estimators.spec import Inputs
from hvd_cluster.estimators.stages.spark_ml import Model
from hvd_cluster.estimators.view import history

if TYPE_CHECKING:
    import pyarrow as pa

    from hvd_cluster.estimators.logged_model.log import Flavour

logger = logging.getLogger(__name__)

#: Rows of an input example.
EXAMPLE_ROWS = 5


class FittedModel(ModelParams, Model):
    """Base of the models; frameworks define ``framework`` and the abstract methods.

    Raises (from transform):
        ValueError: an output column exists already, or a feature column does not.
        DataError: a feature column holds nulls, or the model cannot take it.
    """

    #: How models of this class are called.
    framework: ClassVar[Framework]
    _has_warned_of_rounding = False
    _has_warned_of_untransformed = False
    #: Rows of the training data, as an Arrow table; a loaded model has none.
    _example: pa.Table | None = None

    @abstractmethod
    def _wrong_model(self) -> str:
        """What is wrong with the ``model`` param, with the remedy; empty if nothing is."""

    @abstractmethod
    def _portable_model(self) -> Any:
        """The model on the CPU, as it is sent to tasks."""

    def _pickled_model(self) -> bytes:
        """The model, pickled for cluster tasks; ``framework`` calls the unpickled one."""
        return dumps(self._portable_model())

    def _pickled_scoring(self, scorer: Scorer) -> bytes:
        """The model and how it scores, pickled for the tasks of a cluster."""
        return Scoring.pickled(scorer, self._own_predict_fn(), self._pickled_model())

    def _input_shapes(self) -> Any:
        """Shape of each feature's batch, -1 for the rows; None: as stored."""
        return self._value("input_shapes") if "input_shapes" in self.param_rows else None

    def keep_rows(self, rows: pa.Table, nullable: Collection[str] = (), trained: pa.Schema | None = None) -> None:
        """Keep training rows for :meth:`log_model`; a saved model has their types only.

        Args:
            rows: as the user gave them.
            nullable: columns of which other rows may hold nulls.
            trained: the types in which the rows were read in training, and in which ``transform`` reads its rows; None
                for those of ``rows``.
        """
        fields = [
            field.with_nullable(field.name in nullable or rows.column(field.name).null_count > 0)
            for field in rows.schema
        ]
        schema = load_pyarrow().schema(fields)
        schemas = {"feature_schema": schema, "trained_schema": rows.schema if trained is None else trained}
        self._set(_metadata={**(self._get_metadata() or {}), **schemas})
        self._example = rows.take(list(range(min(EXAMPLE_ROWS, len(rows)))))

    @abstractmethod
    def _flavour(self) -> Flavour:
        """The form in which MLflow keeps the model."""

    def _default_dtype(self) -> str:
        """torch's name of the features' dtype, for models that were not made by a fit."""
        return "float32"

    @property
    def history(self) -> Any:
        """A pandas DataFrame with a row per epoch; ``getHistory()`` returns the records."""
        return history.frame(self._records())

    def log_model(self, name: str = "model", registered_model_name: str | None = None, alias: str | None = None) -> Any:
        """Log to MLflow's active run: the framework's flavour and a pyfunc over columns.

        ``mlflow.pyfunc.load_model(info.model_uri).predict(frame)`` returns a pandas DataFrame of the output columns, as
        ``transform`` adds them to a pandas DataFrame. It has a row for each row: where ``preprocess`` fails,
        ``on_error="skip"`` gives nulls. It loads where hvd_cluster is not installed.

        Args:
            name: name of the logged model; before MLflow 3, its path among the run's artifacts.
            registered_model_name: makes a version of this registered model.
            alias: alias that the version gets.

        Returns:
            MLflow's ``ModelInfo``.

        Raises:
            MissingExtraError: MLflow is not installed.
            ValueError: params are missing, or ``alias`` is given without ``registered_model_name``.
        """
        from hvd_cluster.estimators.logged_model.columns_model import ColumnsScoring
        from hvd_cluster.estimators.logged_model.log import log
        from hvd_cluster.estimators.logged_model.signature import Columns

        metadata = self._get_metadata() or {}
        scorer = self._checked_scorer(list(self._value("feature_columns") or []), on_spark=False)
        flavour = self._flavour()
        return log(
            flavour,
            ColumnsScoring(
                scorer=scorer,
                load=flavour.load,
                predict_fn=self._own_predict_fn(),
            ),
            Columns(
                inputs=metadata.get("feature_schema"),
                outputs=scorer.columns,
                output_shapes=tuple(metadata.get("output_shapes") or ()),
            ),
            self._example,
            name=name,
            registered_model_name=registered_model_name,
            alias=alias,
        )

    def predictor(self) -> type[Any]:
        """A class that loads the model once and scores batches, for Ray Data and Serve.

        ``dataset.map_batches(model.predictor(), concurrency=2)`` keeps the model in two actors, and
        ``serve.deployment(model.predictor())`` is a deployment whose handle takes batches. A batch is a pandas
        DataFrame, a pyarrow Table, or a dict of NumPy arrays; what comes back is of the same type, with the output
        columns added.

        Raises:
            ValueError: the model cannot be scored; all problems at once.
        """
        scorer = self._checked_scorer(list(self._value("feature_columns") or []), on_spark=False)
        return predictor_of(self._pickled_scoring(scorer))

    @abstractmethod
    def export(self, path: str, format: str = "onnx", example: Any = None) -> None:
        """Write the model to a file for other runtimes; see the subclasses."""

    def plot_history(self, ax: Any = None) -> Any:
        """Draw the loss over the epochs.

        Args:
            ax: matplotlib axes to draw on; None for new ones.

        Returns:
            The axes.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        return history.plot(self._records(), ax)

    def _repr_html_(self) -> str:
        return history.card(type(self).__name__, self._value("run_id"), self._records())

    def getOutputCols(self) -> list[str]:
        """The output names; kind "columns" appends ``_0``, ``_1``, ... for its columns."""
        given: list[str] | None = self._value("output_cols")
        return given or self._output_names()

    def _output_names(self) -> list[str]:
        """The names of the model's own outputs, whatever columns are made of them."""
        given: list[str] | None = self._value("output_cols")
        names = self._value("label_columns") or []
        metadata = self._get_metadata() or {}
        if len(metadata.get("output_shapes") or names) != len(names):
            names = metadata["output_names"]
        return given if given and self._value("output_kinds") is None else [f"{name}__output" for name in names]

    def get_prediction_fn(self) -> Callable[[Any, Any], Any]:
        """A function ``(model, row)`` -> the prediction, or a list with one per output.

        If a subclass overrides this, its function scores row by row; otherwise Arrow batches are scored.
        """
        scorer = self._scorer(on_spark=False)

        def predict_fn(model: Any, row: Any) -> Any:
            with scorer.framework.mode(model):
                found = scorer.outputs(model, _arguments_of_row(scorer, model, row))
            return found[0] if len(found) == 1 else list(found)

        return predict_fn

    def _records(self) -> list[dict[str, Any]]:
        return self._value("history") or []

    def _get_metadata(self) -> Any:
        return self._value("_metadata")

    def _transform(self, dataset: Any) -> Any:
        kind = kind_of(dataset)
        if kind is Frame.PARQUET:
            raise ValueError("transform takes a DataFrame or a Table: read the Parquet first, for example with pandas")
        scorer = self._checked_scorer(column_names(dataset), on_spark=kind is Frame.SPARK)
        self._warn_of_rounding(scorer)
        if kind is Frame.SPARK:
            return self._transform_spark(dataset, scorer)
        if kind is Frame.RAY:
            from hvd_cluster.estimators.ray import data as ray_data

            return ray_data.transform(dataset, self._pickled_scoring(scorer))
        return with_outputs(Scoring(scorer, self._own_predict_fn(), self._portable_model()), dataset)

    def _warn_of_rounding(self, scorer: Scorer) -> None:
        """Warn once if outputs are rounded to the whole numbers of their label."""
        rounded = [
            column.name
            for column in scorer.columns
            if column.kind == "plain" and column.type not in (VECTOR, ARRAY) and column.type[0] in "iub"
        ]
        if rounded and self._predicts_by_batch() and not self._has_warned_of_rounding:
            self._has_warned_of_rounding = True
            logger.warning(
                "%s of transform: rounded to whole numbers, like the label. Thresholds and metrics such as AUC "
                "need the unrounded numbers: setOutputKinds(['array']), or ['probability'] for a logit",
                ", ".join(rounded),
            )

    def _warn_of_untransformed(self) -> None:
        """Warn once if the function that changed the training rows is not applied here."""
        is_transformed = (self._get_metadata() or {}).get("is_transformed")
        if is_transformed and self._value("transformation_fn") is None and not self._has_warned_of_untransformed:
            self._has_warned_of_untransformed = True
            logger.warning(
                "the model was trained on rows that transformation_fn had changed; transform, log_model, predictor() "
                "and export take the columns as they are in the data: model.setTransformationFn(fn) applies it there "
                "too (in export to the example rows only), and preprocess=fn instead of it is applied in training and "
                "in scoring"
            )

    def _checked_scorer(self, names: list[str], on_spark: bool) -> Scorer:
        """The scorer for these columns; warns once if it leaves out what training did.

        Raises:
            ValueError: they cannot be scored; all problems at once.
        """
        wrong = [text for text in [self._wrong_model()] if text]
        wrong += [f"{name} is required" for name in ("feature_columns", "label_columns") if not self._value(name)]
        if self._predicts_by_batch() and (lost := [n for n in self._value("feature_columns") or [] if n not in names]):
            needed = ", ".join(map(repr, self._value("feature_columns")))
            text = missing_columns_text(lost, names, "the data's columns")
            wrong.append(f"the data lacks columns that the model needs: its feature columns are {needed}\n{text}")
        scorer = None
        if not wrong:
            try:
                scorer = self._scorer(on_spark)
            except ValueError as error:
                wrong.append(str(error))
        wrong += [
            f"output column {name!r} exists already in the data: choose another with setOutputCols"
            for name in ([column.name for column in scorer.columns] if scorer is not None else self.getOutputCols())
            if name in names
        ]
        if wrong or scorer is None:
            raise ValueError("\n".join(wrong))
        self._warn_of_untransformed()
        return scorer

    def _predicts_by_batch(self) -> bool:
        """Whether no subclass overrides ``get_prediction_fn``."""
        return type(self).get_prediction_fn.__module__.startswith("hvd_cluster.")

    def _own_predict_fn(self) -> Callable[[Any, Any], Any] | None:
        """The function for one row of a subclass; None if batches are scored."""
        return None if self._predicts_by_batch() else self.get_prediction_fn()

    def _scorer(self, on_spark: bool) -> Scorer:
        metadata = self._get_metadata() or {}
        features = tuple(self._value("feature_columns"))
        labels = self._value("label_columns")
        shapes = self._input_shapes()
        shapes_of_outputs = metadata.get("output_shapes")
        preprocess = self._preprocess(features)
        return Scorer(
            framework=self._framework(),
            inputs=Inputs(
                feature_cols=features,
                label_cols=(),
                input_shapes=None if shapes is None else tuple(tuple(shape) for shape in shapes),
                feature_dtypes=tuple(metadata.get("feature_dtypes") or (self._default_dtype(),) * len(features)),
                made=None if preprocess is None else preprocess.made,
                by_keyword=bool(metadata.get("by_keyword")),
            ),
            columns=output_columns.plan(
                self.getOutputCols(),
                len(shapes_of_outputs or labels),
                # A model that was not made by a fit has no shapes: a vector holds any of them.
                tuple(metadata.get("output_types") or (VECTOR,) * len(labels)),
                shapes_of_outputs,
                self._value("output_kinds"),
                on_spark,
                tuple(metadata.get("output_scales") or ()),
            ),
            feature_units=tuple(metadata.get("feature_units") or ()),
            spark_vectors=on_spark,
            batch_size=self._value("batch_size"),
            types=types_of(metadata.get("trained_schema") or metadata.get("feature_schema") or ()),
            preprocess=preprocess,
            transformation_fn=self._transformation(metadata),
        )

    def _transformation(self, metadata: Mapping[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
        """The params' function, and what follows it in training: dtypes and shapes."""
        fn = self._value("transformation_fn")
        if fn is None and metadata.get("is_transformed"):  # they are of its fields
            return None
        return RowTransform.of(fn, metadata.get("edit_fields"), metadata.get("removed_fields"))

    def _preprocess(self, columns: tuple[str, ...]) -> Preprocess | None:
        if self._value("preprocess") is None:
            return None
        return Preprocess(
            fn=self._value("preprocess"),
            columns=columns,
            batch_format=self._value("batch_format"),
            on_error=self._value("on_error"),
            made=(self._get_metadata() or {}).get("made"),
        )

    def _framework(self) -> Framework:
        """How the model is called, given the params of this stage."""
        return self.framework

    def _transform_spark(self, dataset: Any, scorer: Scorer) -> Any:
        from pyspark.sql.types import StructField, StructType

        from hvd_cluster.data import schema_spark
        from hvd_cluster.data.spark_jobs import cast, map_batches
        from hvd_cluster.estimators.spark.rows import spark_type
        from hvd_cluster.spark.active_session import active
        from hvd_cluster.spark.task_function import MODULE_REMEDY

        # Now, rather than in a task of the job that reads the result.
        if self._predicts_by_batch() and scorer.preprocess is None and scorer.transformation_fn is None:
            schema_spark.infer(dataset.schema, scorer.inputs.feature_cols).require_tensors()
        texts = schema_spark.texts(dataset.schema)
        dataset = cast(dataset, dict.fromkeys(texts, "string"))
        blob = self._pickled_scoring(scorer)
        # Never freed here: the result is lazy, and may be computed at any time.
        source = active(dataset.sparkSession).keep(blob)
        fields = [StructField(column.name, spark_type(column.type), nullable=True) for column in scorer.columns]
        score = functools.partial(score_batches, ShippedModel(content_key(blob), source, remedy=MODULE_REMEDY))
        return cast(map_batches(dataset, score, StructType([*dataset.schema.fields, *fields])), texts)


def _arguments_of_row(scorer: Scorer, model: Any, row: Any) -> Arguments:
    """A model's arguments for a row: numbers as is, other values as if in a column."""
    values = {name: row[name] for name in scorer.inputs.feature_cols}
    tensors: dict[str, torch.Tensor] = {}
    if scorer.preprocess is None and scorer.transformation_fn is None:
        for name, value in values.items():
            with contextlib.suppress(TypeError, ValueError, RuntimeError):
                tensors[name] = _as_tensor(value).unsqueeze(0)
        if len(tensors) == len(values):
            return Arguments(scorer.inputs, tensors, Schema(()))
    others = {name: value for name, value in values.items() if name not in tensors}
    found = scorer.arguments_of(model, table_of(others))
    return dataclasses.replace(found, tensors={**tensors, **found.tensors})


def _as_tensor(value: Any) -> torch.Tensor:
    """A number, array, tensor or list of numbers, with all digits of Python's floats."""
    value = value.toArray() if hasattr(value, "toArray") else value
    found = torch.as_tensor(value)
    widens = found.is_floating_point() and not hasattr(value, "dtype")
    return torch.as_tensor(value, dtype=torch.float64) if widens else found
