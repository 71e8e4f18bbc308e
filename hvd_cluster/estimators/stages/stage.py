# ruff: noqa: N802 - the spelling is that of pyspark.ml
"""The base of estimators and models: construction by keyword params, persistence."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from hvd_cluster.estimators.stages.param_row import Row, check
from hvd_cluster.estimators.stages.persistence import StageReader, StageWriter
from hvd_cluster.estimators.stages.spark_ml import MLReadable, MLReader, MLWritable, MLWriter, Params
from hvd_cluster.estimators.view import params_text


class PipelineStage(Params, MLWritable, MLReadable):
    """Base of estimators and models, with the params of ``param_rows``."""

    #: The params by the keyword of the constructor; set by ``with_params``.
    param_rows: ClassVar[Mapping[str, Row]] = {}
    #: Name of the Param -> keyword.
    param_keywords: ClassVar[Mapping[str, str]] = {}
    #: Spark ML's name for the same -> keyword. Subclasses may define Params of these names.
    param_aliases: ClassVar[Mapping[str, str]] = {}
    #: Name of an alias's accessor -> function.
    alias_accessors: ClassVar[Mapping[str, Callable[..., Any]]] = {}

    def __getattr__(self, name: str) -> Any:
        """The accessors of aliases, if no class defines a method of that name."""
        accessor = type(self).alias_accessors.get(name)
        if accessor is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return functools.partial(accessor, self)

    def __init__(self, **given: Any) -> None:
        super().__init__()
        given = self._by_keyword(given)
        check(self.param_rows, given, type(self).__name__)
        self._setDefault(**{name: row.default for name, row in self.param_rows.items()})
        self._set(**given)

    def __repr__(self) -> str:
        """The class with the params that were set, without values that may hold secrets."""
        shown = ", ".join(f"{name}={text}" for name, text in params_text.given(self).items())
        return f"{type(self).__name__}({shown})"

    def _repr_html_(self) -> str:
        return params_text.html(self)

    def setParams(self, **given: Any) -> Any:
        """Set several params, and report all problems at once. Returns self."""
        given = self._by_keyword(given)
        check(self.param_rows, given, type(self).__name__)
        return self._set(**given)

    def _set(self, **kwargs: Any) -> Any:
        given = self._by_keyword(kwargs)
        for name, value in list(given.items()):
            row = self.param_rows.get(name)
            if value is None and row is not None and not row.optional:  # as if not set
                self.clear(getattr(self, row.key))
                del given[name]
        return super()._set(**self._by_key(given))

    def _setDefault(self, **kwargs: Any) -> Any:
        return super()._setDefault(**self._by_key(self._by_keyword(kwargs)))

    def getParam(self, paramName: str) -> Any:
        """The Param of that name, even if its attribute has another name.

        Raises:
            AttributeError, ValueError: there is none.
        """
        return super().getParam(self._attribute_of(paramName))

    def hasParam(self, paramName: str) -> bool:
        """Whether :meth:`getParam` finds one."""
        return bool(super().hasParam(self._attribute_of(paramName)))

    def _attribute_of(self, name: str) -> str:
        row = self.param_rows.get(self.param_keywords.get(name, name))
        return name if row is None else row.key

    def _by_keyword(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The same values by keyword, for keywords, names of Params and aliases."""

        def keyword(name: str) -> str:
            if name in self.param_keywords:
                return self.param_keywords[name]
            return name if self.hasParam(name) else self.param_aliases.get(name, name)

        return {keyword(name): value for name, value in given.items()}

    def _by_key(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The same values by the attribute of the Param, as pyspark expects."""
        return {self._attribute_of(name): value for name, value in given.items()}

    def _value(self, name: str) -> Any:
        return self.getOrDefault(self.param_rows[name].key)

    def _as_saved(self, name: str, value: Any) -> Any:
        """A param's value as a saved stage keeps it, in a form that ``_set`` accepts."""
        return value

    def write(self) -> MLWriter:
        """A writer like Spark ML's: ``stage.write().overwrite().save(path)``."""
        return StageWriter(self)

    @classmethod
    def read(cls) -> MLReader:
        """A reader like Spark ML's: ``cls.read().load(path)``."""
        return StageReader(cls)
