"""Log a model to MLflow in its framework's flavour and as a pyfunc over columns."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from hvd_cluster.data.optional import load_extra
from hvd_cluster.estimators.logged_model import columns_model
from hvd_cluster.estimators.logged_model.columns_model import ColumnsScoring
from hvd_cluster.estimators.logged_model.requirements import Requirements, requirements_of
from hvd_cluster.estimators.logged_model.signature import Columns, example_frame
from hvd_cluster.estimators.logged_model.sources import scoring_modules, write_code

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

_CODE = "code"
_NO_SIGNATURE_TEXT = (
    "the model is logged without a signature, because it does not know the types of its columns: no fit has made it"
)


@dataclass(frozen=True, kw_only=True)
class Flavour:
    """The form in which MLflow keeps the models of a framework."""

    #: Its name in MLflow.
    name: str
    #: fn(folder, mlflow_model, **{"pip_requirements": ..., "input_example": ...}) writes the model's files.
    save: Callable[..., None]
    #: fn(folder of the MLflow model) -> the model; it can be pickled.
    load: Callable[[str], Any]
    #: What must be importable to load and call the model, and further modules.
    parts: Sequence[Any]
    modules: Sequence[str] = ()
    #: Modules of which the model's pickle has the functions that it needs.
    travelling: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class LoggedModel:
    """What is logged; MLflow calls :meth:`save_model` like that of its own flavours."""

    flavour: Flavour
    scoring: ColumnsScoring
    columns: Columns
    #: Rows of the training data; None if there are none.
    example: pa.Table | None

    @property
    def needs(self) -> Requirements:
        """What loads and calls the model."""
        scorer, flavour = self.scoring.scorer, self.flavour
        functions = [scorer.preprocess, scorer.transformation_fn, scorer.framework.predict, self.scoring.predict_fn]
        travelling = {"hvd_cluster", *scoring_modules(), *flavour.travelling}
        return requirements_of([*flavour.parts, *functions], flavour.modules, travelling)

    def save_model(self, path: str, mlflow_model: Any, **_: Any) -> None:
        """Write the model's folder.

        Args:
            path: the folder.
            mlflow_model: the ``mlflow.models.Model`` that describes it.
        """
        from mlflow import pyfunc

        needs, folder = self.needs, Path(path)
        example = None if self.example is None else example_frame(self.example)
        given = {} if example is None else {"input_example": example}
        self.flavour.save(path, mlflow_model, pip_requirements=list(needs.pip), **given)
        loader = write_code(folder / _CODE, needs.local)
        (folder / columns_model.FILE).write_bytes(cloudpickle.dumps(self.scoring))
        mlflow_model.signature = self.columns.signature()
        mlflow_model.flavors[self.flavour.name][_CODE] = _CODE
        pyfunc.add_to_model(
            mlflow_model, loader_module=loader, code=_CODE, conda_env="conda.yaml", python_env="python_env.yaml"
        )
        mlflow_model.save(str(folder / "MLmodel"))
        for cache in folder.rglob("__pycache__"):
            shutil.rmtree(cache, ignore_errors=True)


def log(
    flavour: Flavour,
    scoring: ColumnsScoring,
    columns: Columns,
    example: pa.Table | None,
    *,
    name: str,
    registered_model_name: str | None,
    alias: str | None,
) -> Any:
    """Log to the active run, or none where MLflow can; see ``FittedModel.log_model``."""
    if alias is not None and not registered_model_name:
        raise ValueError(f"alias={alias!r} needs registered_model_name: aliases belong to registered models")
    mlflow = load_extra("mlflow", "mlflow", "to log a model")
    from mlflow.models import Model

    if columns.inputs is None:
        logger.warning("%s", _NO_SIGNATURE_TEXT)
    preprocess = scoring.scorer.preprocess
    if preprocess is not None and preprocess.on_error == "skip":  # a pyfunc returns a row for each row
        preprocess = dataclasses.replace(preprocess, on_error="null")
        scoring = dataclasses.replace(scoring, scorer=dataclasses.replace(scoring.scorer, preprocess=preprocess))
    # Before MLflow 3, it is the path among the run's artifacts.
    named: Mapping[str, Any] = {"artifact_path": name}
    if "name" in inspect.signature(Model.log).parameters:
        named = {"artifact_path": None, "name": name}
    info = Model.log(
        **named,
        flavor=LoggedModel(flavour=flavour, scoring=scoring, columns=columns, example=example),
        registered_model_name=registered_model_name,
        metadata=columns.metadata(),
        # It would load the model in this process, and leave a folder that is deleted in sys.path.
        validate_serving_input=False,
    )
    if alias is not None and registered_model_name:
        client = mlflow.MlflowClient()
        client.set_registered_model_alias(registered_model_name, alias, info.registered_model_version)
    return info
