# ruff: noqa: N802 - the spelling is that of pyspark.ml
"""The base classes of ``pyspark.ml`` in plain Python, for use without pyspark.

Names, arguments and results are those of ``pyspark.ml.param`` and ``pyspark.ml.base``, so that programs written for
Spark ML stages run with these.
"""

from __future__ import annotations

import copy
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

P = TypeVar("P", bound="Params")
ParamMap = dict["Param", Any]


def _unchanged(value: Any) -> Any:
    return value


class Param:
    """A param with its documentation, owned by the stage whose uid is ``parent``."""

    def __init__(self, parent: Any, name: str, doc: str, typeConverter: Callable[[Any], Any] | None = None) -> None:
        self.parent = parent.uid
        self.name = name
        self.doc = doc
        self.typeConverter = typeConverter or _unchanged

    def owned_by(self, stage: Params) -> Param:
        mine = copy.copy(self)
        mine.parent = stage.uid
        return mine

    def __str__(self) -> str:
        return f"{self.parent}__{self.name}"

    def __repr__(self) -> str:
        return f"Param(parent={self.parent!r}, name={self.name!r}, doc={self.doc!r})"

    def __hash__(self) -> int:
        return hash(str(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Param) and (self.parent, self.name) == (other.parent, other.name)


class Params(ABC):  # noqa: B024 - as in pyspark.ml, where it is the root of abstract stages
    """An object with params: values set by the user, over defaults."""

    def __init__(self) -> None:
        self.uid = f"{type(self).__name__}_{uuid.uuid4().hex[-12:]}"
        self._paramMap: ParamMap = {}
        self._defaultParamMap: ParamMap = {}
        for name in dir(type(self)):
            if isinstance(param := getattr(type(self), name), Param):
                setattr(self, name, param.owned_by(self))

    @staticmethod
    def _dummy() -> Params:
        """The owner of a Param that is a class attribute."""
        dummy = Params()
        dummy.uid = "undefined"
        return dummy

    @property
    def params(self) -> list[Param]:
        """All params, by name."""
        return [value for _, value in sorted(vars(self).items()) if isinstance(value, Param)]

    def explainParam(self, param: str | Param) -> str:
        param = self._resolveParam(param)
        known = {"default": self._defaultParamMap, "current": self._paramMap}
        shown = [f"{kind}: {values[param]}" for kind, values in known.items() if param in values]
        return f"{param.name}: {param.doc} ({', '.join(shown) or 'undefined'})"

    def explainParams(self) -> str:
        return "\n".join(self.explainParam(param) for param in self.params)

    def getParam(self, paramName: str) -> Param:
        param = getattr(self, paramName)
        if not isinstance(param, Param):
            raise ValueError(f"Cannot find param with name {paramName}.")
        return param

    def hasParam(self, paramName: str) -> bool:
        return isinstance(getattr(self, paramName, None), Param)

    def isSet(self, param: str | Param) -> bool:
        return self._resolveParam(param) in self._paramMap

    def hasDefault(self, param: str | Param) -> bool:
        return self._resolveParam(param) in self._defaultParamMap

    def isDefined(self, param: str | Param) -> bool:
        return self.isSet(param) or self.hasDefault(param)

    def getOrDefault(self, param: str | Param) -> Any:
        param = self._resolveParam(param)
        return self._paramMap[param] if param in self._paramMap else self._defaultParamMap[param]

    def extractParamMap(self, extra: ParamMap | None = None) -> ParamMap:
        return {**self._defaultParamMap, **self._paramMap, **(extra or {})}

    def set(self, param: Param, value: Any) -> None:
        self._shouldOwn(param)
        self._paramMap[param] = param.typeConverter(value)

    def clear(self, param: Param) -> None:
        self._paramMap.pop(self._resolveParam(param), None)

    def copy(self: P, extra: ParamMap | None = None) -> P:
        """A copy with the same uid, and with the values of ``extra``."""
        that = copy.copy(self)
        that._paramMap = {}
        that._defaultParamMap = {}
        return self._copyValues(that, extra)

    def _set(self: P, **kwargs: Any) -> P:
        for name, value in kwargs.items():
            param = self.getParam(name)
            self._paramMap[param] = value if value is None else param.typeConverter(value)
        return self

    def _setDefault(self: P, **kwargs: Any) -> P:
        for name, value in kwargs.items():
            param = self.getParam(name)
            self._defaultParamMap[param] = value if value is None else param.typeConverter(value)
        return self

    def _copyValues(self, to: P, extra: ParamMap | None = None) -> P:
        values = {**self._paramMap, **(extra or {})}
        for param in self.params:
            if not to.hasParam(param.name):
                continue
            if param in self._defaultParamMap:
                to._defaultParamMap[to.getParam(param.name)] = self._defaultParamMap[param]
            if param in values:
                to._set(**{param.name: values[param]})
        return to

    def _resetUid(self: P, newUid: Any) -> P:
        """Give the stage another uid, such as the one that it was saved with."""
        old, defaults = self._paramMap, self._defaultParamMap
        self.uid, self._paramMap, self._defaultParamMap = str(newUid), {}, {}
        for attribute, param in list(vars(self).items()):
            if not isinstance(param, Param):
                continue
            mine = param.owned_by(self)
            if param in old:
                self._paramMap[mine] = old[param]
            if param in defaults:
                self._defaultParamMap[mine] = defaults[param]
            setattr(self, attribute, mine)
        return self

    def _shouldOwn(self, param: Param) -> None:
        if not (self.uid == param.parent and self.hasParam(param.name)):
            raise ValueError(f"Param {param!r} does not belong to {self!r}.")

    def _resolveParam(self, param: str | Param) -> Param:
        if isinstance(param, str):
            return self.getParam(param)
        self._shouldOwn(param)
        return param

    def __repr__(self) -> str:
        return self.uid


class Estimator(Params):
    """Fits models to data."""

    @abstractmethod
    def _fit(self, dataset: Any) -> Any: ...

    def fit(self, dataset: Any, params: ParamMap | Sequence[ParamMap] | None = None) -> Any:
        """The fitted model, or a list of models for a list of param maps."""
        if isinstance(params, (list, tuple)):
            return [model for _, model in self.fitMultiple(dataset, params)]
        if params is not None and not isinstance(params, dict):
            raise TypeError(f"Params must be either a param map or a list/tuple of param maps, but got {type(params)}.")
        return self.copy(params)._fit(dataset) if params else self._fit(dataset)

    def fitMultiple(self, dataset: Any, paramMaps: Sequence[ParamMap]) -> Iterator[tuple[int, Any]]:
        for index, params in enumerate(paramMaps):
            yield index, self.copy().fit(dataset, params)


class Transformer(Params):
    """Turns a dataset into another one."""

    @abstractmethod
    def _transform(self, dataset: Any) -> Any: ...

    def transform(self, dataset: Any, params: ParamMap | None = None) -> Any:
        if params is not None and not isinstance(params, dict):
            raise TypeError(f"Params must be a param map but got {type(params)}.")
        return self.copy(params)._transform(dataset) if params else self._transform(dataset)


class Model(Transformer):
    """A transformer made by an estimator."""


class MLWriter:
    """Saves a stage."""

    def __init__(self) -> None:
        self.shouldOverwrite = False

    def overwrite(self: Any) -> Any:
        self.shouldOverwrite = True
        return self

    def session(self: Any, sparkSession: Any) -> Any:
        return self

    def option(self: Any, key: str, value: Any) -> Any:
        return self

    def save(self, path: str) -> None:
        if self.shouldOverwrite:
            self._handleOverwrite(path)
        self.saveImpl(path)

    def _handleOverwrite(self, path: str) -> None:
        raise NotImplementedError

    def saveImpl(self, path: str) -> None:
        raise NotImplementedError


class MLReader:
    """Loads a stage."""

    def session(self: Any, sparkSession: Any) -> Any:
        return self

    def load(self, path: str) -> Any:
        raise NotImplementedError


class MLWritable:
    """A stage that can be saved."""

    def write(self) -> Any:
        raise NotImplementedError

    def save(self, path: str) -> None:
        self.write().save(path)


class MLReadable:
    """A stage that can be loaded."""

    @classmethod
    def read(cls) -> Any:
        raise NotImplementedError

    @classmethod
    def load(cls, path: str) -> Any:
        return cls.read().load(path)
