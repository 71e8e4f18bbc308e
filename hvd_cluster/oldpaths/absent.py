"""Placeholders for names of Horovod that hvd_cluster does not have.

Using one raises an error with an alternative.
"""

from __future__ import annotations

import functools
from abc import ABCMeta
from typing import Any, NoReturn


class AbsentFeatureError(NotImplementedError, AttributeError):
    """A program used a part of Horovod that hvd_cluster does not have.

    The text says what to use instead.
    """


class Absent(ABCMeta):
    """The class of the placeholders: calling one or reading an attribute raises.

    Subclassing one does not. Each placeholder is a class, so that a program can use it as a base class, in
    ``isinstance`` and in annotations.
    """

    _hvd_old_name: str
    _hvd_instead: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise AbsentFeatureError(cls._hvd_text())

    def __getattr__(cls, name: str) -> NoReturn:
        # Python itself looks up dunders, for example __wrapped__ in inspect.
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
    """The placeholder of a name; always the same object, which pickle requires.

    Args:
        module: the old module.
        name: the name in it.
        instead: what it belonged to in Horovod, and what to use now, as the end of a sentence.
    """
    old_name = f"horovod.{module.partition('.')[2]}.{name}"  # also if it is imported below hvd_cluster
    about = {"__module__": module, "__qualname__": name, "_hvd_old_name": old_name, "_hvd_instead": instead}
    return Absent(name, (), about)
