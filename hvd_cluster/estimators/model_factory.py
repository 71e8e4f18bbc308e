"""Functions that make models, where an estimator takes a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ModelFactory:
    """A function that makes a model, with its arguments.

    For example, ``model=ModelFactory(make, "/models/base", rank=8)``. The driver and each worker call it, so only the
    function and the arguments are sent. Any other function without parameters can be given as ``model=`` in the same
    way; this class shows its arguments in messages and logs.

    Args:
        fn: returns the model. A function of a script or notebook is pickled by value, an importable one by name.
        args: its positional arguments, which must be picklable.
        kwargs: its named arguments, likewise.
    """

    def __init__(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        if not callable(fn):
            raise TypeError(f"ModelFactory takes a function that makes a model, not {type(fn).__name__}")
        self.fn = fn
        self.args = args
        self.kwargs = kwargs

    def __call__(self) -> Any:
        """A new model."""
        return self.fn(*self.args, **self.kwargs)

    def __repr__(self) -> str:
        named = (f"{name}={value!r}" for name, value in self.kwargs.items())
        return f"ModelFactory({', '.join([name_of(self.fn), *map(repr, self.args), *named])})"


def name_of(factory: Any) -> str:
    """A factory in messages: a function's name, and the arguments where known."""
    if isinstance(factory, ModelFactory):
        return repr(factory)
    return str(getattr(factory, "__qualname__", None) or type(factory).__name__).rpartition("<locals>.")[2]
