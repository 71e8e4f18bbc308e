# ruff: noqa: N802 - the spelling is that of pyspark.ml
"""The base of estimators and models: constructed by keyword from the params of the class, saved and loaded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from hvd_cluster.estimators.stages.param_row import Row, check
from hvd_cluster.estimators.stages.persistence import StageReader, StageWriter
from hvd_cluster.estimators.stages.spark_ml import MLReadable, MLReader, MLWritable, MLWriter, Params
from hvd_cluster.estimators.view import params_text


class Stage(Params, MLWritable, MLReadable):
    """Keyword-only construction from the class's param rows, and persistence, for estimators and models alike."""

    #: Every param by the keyword of the constructor; set by ``with_params``.
    param_rows: ClassVar[Mapping[str, Row]] = {}
    #: Name of the Param -> the keyword.
    param_keywords: ClassVar[Mapping[str, str]] = {}
    #: Spark ML's name for the same -> the keyword. A program's own class may have Params of these names.
    param_aliases: ClassVar[Mapping[str, str]] = {}
    #: Name of an alias's accessor -> the function. A program's own class may have params of these names.
    alias_accessors: ClassVar[Mapping[str, Callable[..., Any]]] = {}

    def __getattr__(self, name: str) -> Any:
        """The accessors of aliases, where no class has a method of that name."""
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
        """The class with the params that were given; values that may hold secrets are left out."""
        shown = ", ".join(f"{name}={text}" for name, text in params_text.given(self).items())
        return f"{type(self).__name__}({shown})"

    def _repr_html_(self) -> str:
        return params_text.html(self)

    def setParams(self, **given: Any) -> Any:
        """Set several params at once; what is wrong is reported all at once. Returns self."""
        given = self._by_keyword(given)
        check(self.param_rows, given, type(self).__name__)
        return self._set(**given)

    def _set(self, **kwargs: Any) -> Any:
        given = self._by_keyword(kwargs)
        for name, value in list(given.items()):
            row = self.param_rows.get(name)
            if value is None and row is not None and not row.optional:  # as if not given
                self.clear(getattr(self, row.key))
                del given[name]
        return super()._set(**self._by_key(given))

    def _setDefault(self, **kwargs: Any) -> Any:
        return super()._setDefault(**self._by_key(self._by_keyword(kwargs)))

    def getParam(self, paramName: str) -> Any:
        """The Param of that name, also where its attribute is called otherwise.

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
        """The same values, with the names of Params and their aliases as the keywords that they stand for."""

        def keyword(name: str) -> str:
            if name in self.param_keywords:
                return self.param_keywords[name]
            return name if self.hasParam(name) else self.param_aliases.get(name, name)

        return {keyword(name): value for name, value in given.items()}

    def _by_key(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The same values under the attributes of the Params, which pyspark asks for by these keywords."""
        return {self._attribute_of(name): value for name, value in given.items()}

    def _value(self, name: str) -> Any:
        return self.getOrDefault(self.param_rows[name].key)

    def _as_saved(self, name: str, value: Any) -> Any:
        """The form in which a saved stage keeps the value of a param; ``_set`` takes it back."""
        return value

    def write(self) -> MLWriter:
        """A writer as Spark ML has them: ``stage.write().overwrite().save(path)``."""
        return StageWriter(self)

    @classmethod
    def read(cls) -> MLReader:
        """A reader as Spark ML has them: ``cls.read().load(path)``."""
        return StageReader(cls)
