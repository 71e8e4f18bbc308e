# ruff: noqa: N802, N815 - the spelling is that of pyspark.ml
"""A param's names, default and rule; and the check of constructor arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from hvd_cluster.estimators.values import Rule, anything
from hvd_cluster.launch.run_options import near_miss


@dataclass(frozen=True)
class Row:
    """One param."""

    #: Keyword of the constructor, and of ``_set``.
    name: str
    default: Any
    doc: str
    #: Turns a value into its final form, or raises ValueError.
    rule: Rule = anything
    #: What follows "set" and "get", if not the name in camel case; several entries are several spellings.
    accessors: tuple[str, ...] = ()
    #: The same for "set" alone.
    setters: tuple[str, ...] = ()
    #: Spark ML's name for the same, as keyword and in accessors; they also take and return a single column's name.
    alias: str = ""
    #: Spark ML's name of the Param, if not the keyword, which then is a second name of its attribute.
    param: str = ""
    #: Attribute that holds the Param, if the Param's name has another use.
    attribute: str = ""
    #: Whether a saved stage keeps the value; not a live connection or a running session.
    saved: bool = True

    @property
    def optional(self) -> bool:
        """Whether None is a value of the param. If not, None stands for the default."""
        return self.default is None or isinstance(self.default, list)

    @property
    def param_name(self) -> str:
        """The name of the Param in ``getParam``, ``_setDefault`` and saved stages."""
        return self.param or self.name

    @property
    def key(self) -> str:
        """The attribute that holds the Param."""
        return self.attribute or self.param_name

    def convert(self, value: Any) -> Any:
        """``value`` in its final form.

        Raises:
            ValueError: the param cannot hold it.
        """
        if value is None:
            if self.optional:
                return None
            raise ValueError(f"{self.name}=None: the default is {self.default!r}")
        try:
            return self.rule(value)
        except ValueError as error:
            raise ValueError(f"{self.name}={_short(value)} {error}") from None


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


class HasParams(Protocol):
    """The part of a stage that is needed to show or save its params."""

    uid: Any
    param_rows: ClassVar[Mapping[str, Row]]
    _paramMap: Any
    _defaultParamMap: Any

    def isSet(self, param: Any) -> bool: ...
    def _value(self, name: str) -> Any: ...
    def _as_saved(self, name: str, value: Any) -> Any: ...


def check(rows: Mapping[str, Row], given: Mapping[str, Any], owner: str) -> None:
    """Check the keywords of a constructor, and report all problems at once.

    Raises:
        TypeError: some names are not params; the text has similar names.
        ValueError: some params cannot hold their values.
    """
    unknown = [name for name in given if name not in rows]
    if unknown:
        raise TypeError(
            f"{owner} has no param " + "; no param ".join(f"{name!r}{near_miss(name, rows)}" for name in unknown)
        )
    wrong = []
    for name, value in given.items():
        try:
            if value is not None:
                rows[name].convert(value)
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError("; ".join(wrong))
