"""TransformSpec: a user's function over rows, and how it changes the schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hvd_cluster.errors import DataError
from hvd_cluster.petastorm.unischema import Unischema
from hvd_cluster.petastorm.unischema_field import UnischemaField


def edit_field(
    name: str, numpy_dtype: Any, shape: tuple[int | None, ...], nullable: bool = False
) -> tuple[str, Any, tuple[int | None, ...], bool]:
    """Describe a new or changed field for ``TransformSpec(edit_fields=...)``.

    Args:
        name, numpy_dtype, shape, nullable: as in :class:`~hvd_cluster.petastorm.unischema.UnischemaField`.
    """
    return name, numpy_dtype, shape, nullable


class TransformSpec:
    """A function run in the reader's threads, and the fields that it changes.

    Args:
        func: with ``make_reader``, row as a dict -> row as a dict; with ``make_batch_reader``, pandas DataFrame of a
            row group -> DataFrame. None to pick fields only.
        edit_fields: fields that the function makes or changes: UnischemaFields or what :func:`edit_field` returns.
        removed_fields: names of fields to leave out.
        selected_fields: names of the fields to keep, in that order; not together with ``removed_fields``.

    Raises:
        DataError: both lists of names are given.
    """

    def __init__(
        self,
        func: Callable[[Any], Any] | None = None,
        edit_fields: Iterable[Any] | None = None,
        removed_fields: Sequence[str] | None = None,
        selected_fields: Sequence[str] | None = None,
    ) -> None:
        if removed_fields and selected_fields is not None:
            raise DataError("removed_fields and selected_fields contradict each other: give one of them")
        self.func = func
        self.edit_fields = list(edit_fields or [])
        self.removed_fields = list(removed_fields or [])
        self.selected_fields = None if selected_fields is None else list(selected_fields)


def transform_schema(schema: Unischema, transform_spec: TransformSpec) -> Unischema:
    """The schema after ``transform_spec``, in the order of ``selected_fields``.

    It is without the removed fields and with the edited ones.

    Raises:
        DataError: a selected field is neither in the schema nor made by the transform.
    """
    fields = {name: field for name, field in schema.fields.items() if name not in transform_spec.removed_fields}
    for edited in transform_spec.edit_fields:
        name, dtype, shape, *rest = edited
        nullable = bool(rest[-1]) if rest else False  # a UnischemaField has its codec between
        fields[name] = UnischemaField(name, dtype, tuple(shape), None, nullable)
    if transform_spec.selected_fields is not None:
        unknown = [name for name in transform_spec.selected_fields if name not in fields]
        if unknown:
            raise DataError(f"selected_fields names {unknown}, but there are {list(fields)}")
        fields = {name: fields[name] for name in transform_spec.selected_fields}
    if not fields:
        raise DataError("the transform leaves no field")
    return Unischema(f"{schema._name}_transformed", fields.values())
