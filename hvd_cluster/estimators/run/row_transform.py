"""A ``transformation_fn`` and its changed fields, like petastorm's TransformSpec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class RowTransform:
    """A function from row to row; picklable if ``fn`` is."""

    #: The user's function, or None for none.
    fn: Callable[[dict[str, Any]], dict[str, Any]] | None
    #: Column -> new dtype and shape of its values; None for an unknown shape.
    fields: Mapping[str, tuple[Any, tuple[int, ...] | None]]
    removed: frozenset[str]

    @classmethod
    def of(
        cls, fn: Any, edit_fields: Sequence[Sequence[Any]] | None, removed_fields: Sequence[str] | None
    ) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
        """``fn`` itself if no fields are given.

        Args:
            edit_fields: (name, numpy dtype, shape, is nullable) of each column that is new or changed.
            removed_fields: names of columns.
        """
        if not edit_fields and not removed_fields:
            return fn  # type: ignore[no-any-return]
        fields = {name: (dtype, _known(shape)) for name, dtype, shape, *_ in edit_fields or []}
        return cls(fn, fields, frozenset(removed_fields or []))

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row that goes into a batch."""
        changed = dict(row if self.fn is None else self.fn(row))
        for name in self.removed:
            changed.pop(name, None)
        for name, (dtype, shape) in self.fields.items():
            if name in changed:
                value = np.asarray(changed[name]).astype(dtype)
                changed[name] = value if shape is None else value.reshape(shape)
        return changed


def _known(shape: Any) -> tuple[int, ...] | None:
    return None if shape is None or any(size is None for size in shape) else tuple(shape)
