"""Which files of an Iceberg table a filter rules out by their partitions.

pyiceberg projects the filter onto the transforms. Source: "Iceberg Table Spec", sections "Partition Transforms" and
"Scan Planning".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from hvd_cluster.data.comparison import floor
from hvd_cluster.data.filters import Condition, RowFilter
from hvd_cluster.data.optional import load_extra, load_pyarrow

#: Whether a file with these partition values may have rows that match.
MayMatch = Callable[[Any], bool]

_NAMES = {
    "==": "EqualTo",
    "!=": "NotEqualTo",
    "<": "LessThan",
    "<=": "LessThanOrEqual",
    ">": "GreaterThan",
    ">=": "GreaterThanOrEqual",
    "in": "In",
    "not in": "NotIn",
    "is null": "IsNull",
    "is valid": "NotNull",
}


def may_match_by_spec(
    row_filter: RowFilter, arrow_schema: Any, schema: str, specs: Mapping[int, str]
) -> dict[int, MayMatch]:
    """What decides about files of each partition spec, by its id.

    Args:
        row_filter: the wanted rows.
        arrow_schema: ``pyarrow.Schema`` of the table.
        schema: the same as a ``pyiceberg.schema.Schema``, in JSON.
        specs: id -> the ``pyiceberg.partitioning.PartitionSpec``, in JSON.
    """
    kinds = load_extra("pyiceberg.partitioning", "iceberg", "to read Iceberg tables")
    parsed = load_extra("pyiceberg.schema", "iceberg", "to read Iceberg tables").Schema.model_validate_json(schema)
    return {
        number: _may_match(row_filter, arrow_schema, parsed, kinds.PartitionSpec.model_validate_json(spec))
        for number, spec in specs.items()
    }


def _may_match(row_filter: RowFilter, arrow_schema: Any, schema: Any, spec: Any) -> MayMatch:
    if all(str(one.transform) == "void" for one in spec.fields):
        return lambda _: True
    visitors = load_extra("pyiceberg.expressions.visitors", "iceberg", "to read Iceberg tables")
    expressions = load_extra("pyiceberg.expressions", "iceberg", "to read Iceberg tables")
    fields = load_extra("pyiceberg.schema", "iceberg", "to read Iceberg tables").Schema(
        *spec.partition_type(schema).fields
    )
    project = visitors.inclusive_projection(schema, spec)

    def wanted(condition: Condition) -> Any:
        """What the partition values must meet; everything where pyiceberg cannot say."""
        try:
            found = project(_expression(expressions, condition, arrow_schema.field(condition[0]).type))
            visitors.bind(fields, found, case_sensitive=True)
        except Exception:  # noqa: BLE001 - a value or a transform that pyiceberg does not take: the rows decide
            return expressions.AlwaysTrue()
        return found

    groups = [functools.reduce(expressions.And, map(wanted, group)) for group in row_filter.any_of]
    decide: MayMatch = visitors.expression_evaluator(
        fields, functools.reduce(expressions.Or, groups), case_sensitive=True
    )
    return decide


def _expression(expressions: Any, condition: Condition, arrow_type: Any) -> Any:
    """A condition for pyiceberg, met by all rows that meet it here or by more."""
    types = load_pyarrow("pyarrow.types")
    name, op, value = condition
    make = getattr(expressions, _NAMES[op])
    if op in {"is null", "is valid"}:
        return make(name)
    if types.is_floating(arrow_type):  # NaNs and zeros compare otherwise
        return expressions.AlwaysTrue()
    found = [floor(one, arrow_type) for one in (value if op in {"in", "not in"} else [value])]
    points = [point.decode() if types.is_string(arrow_type) else point for point, is_exact in found if is_exact]
    if not points and op not in {"in", "not in"}:
        if op in {"==", "!="} or found[0][0] is None:
            return expressions.AlwaysTrue()
        points, make = [found[0][0]], getattr(expressions, _NAMES["<=" if op[0] == "<" else ">"])
    # Before 1970, early writers rounded the transforms of times towards zero.
    if types.is_temporal(arrow_type) and any(point <= 0 for point in points):
        return expressions.AlwaysTrue()
    return make(name, points if op in {"in", "not in"} else points[0])
