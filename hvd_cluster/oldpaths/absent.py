"""Names of Horovod that import, and explain themselves when they are used: what stands behind them is not here."""

from __future__ import annotations

import functools
from abc import ABCMeta
from typing import Any, NoReturn


class AbsentFeatureError(NotImplementedError, AttributeError):
    """A program used a part of Horovod that hvd_cluster does not have; the text says what to use instead."""


class Absent(ABCMeta):
    """The class of the placeholders: calling one, or asking for an attribute, raises; subclassing one does not.

    Each placeholder is a class itself, so that a program can name it as a base, in ``isinstance`` and in annotations.
    """

    _hvd_old_name: str
    _hvd_instead: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise AbsentFeatureError(cls._hvd_text())

    def __getattr__(cls, name: str) -> NoReturn:
        # Dunders are questions of Python's own, such as inspect's for __wrapped__.
        text = f"{cls.__name__} has no attribute {name}" if name.startswith("__") else cls._hvd_text()
        raise AbsentFeatureError(text)

    def __setattr__(cls, name: str, value: Any) -> None:
        if name == "__code__" or (cls.__bases__ == (object,) and not name.startswith("_")):
            raise AbsentFeatureError(cls._hvd_text())
        super().__setattr__(name, value)

    def _hvd_text(cls) -> str:
        return f"hvd_cluster does not have {cls._hvd_old_name}, {cls._hvd_instead}"


@functools.cache
def absent(module: str, name: str, instead: str) -> Absent:
    """The placeholder of a name; the same one each time, as pickle asks.

    Args:
        module: the old module.
        name: the name in it.
        instead: what it belonged to in Horovod, and what to use now, as the end of a sentence.
    """
    old_name = f"horovod.{module.partition('.')[2]}.{name}"  # also where it is asked for below our own name
    about = {"__module__": module, "__qualname__": name, "_hvd_old_name": old_name, "_hvd_instead": instead}
    return Absent(name, (), about)
