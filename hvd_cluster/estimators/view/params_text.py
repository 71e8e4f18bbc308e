"""The params of a stage as text: for a notebook, MLflow and ``repr``."""

from __future__ import annotations

import ast
import contextlib
import functools
import html as markup
import inspect
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from hvd_cluster.data.store import Store
from hvd_cluster.estimators.model_factory import ModelFactory
from hvd_cluster.estimators.stages.param_row import HasParams

#: Params whose values may be secrets: environment variables, and arguments for loggers.
_MAY_HOLD_SECRETS = ("backend_env", "trainer_args")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
#: Characters of a value in a ``repr``.
_MAX_CHARS = 60


def given(stage: HasParams) -> dict[str, str]:
    """The params of ``stage`` that were set, each value as a short text."""
    texts = {}
    for name, row in stage.param_rows.items():
        if stage.isSet(row.key) and not name.startswith("_") and (value := stage._value(name)) is not None:
            text = f"{len(value)} epochs" if name == "history" else text_of(name, value, quoted=True)
            texts[name] = text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 3]}..."
    return texts


def html(stage: HasParams) -> str:
    """The same as a small table."""
    rows = "".join(
        f"<tr><td>{markup.escape(name)}</td><td>{markup.escape(text)}</td></tr>" for name, text in given(stage).items()
    )
    title = f"<b>{markup.escape(type(stage).__name__)}</b>"
    return f'<div style="font-family: sans-serif">{title}<table>{rows}</table></div>'


def text_of(name: str, value: Any, *, quoted: bool = False) -> str:
    """The value of param ``name`` without secrets; as Python source if ``quoted``."""
    if name == "model_factory":
        return str(value.name)
    if isinstance(value, ModelFactory):
        return repr(value)
    if name in ("model", "optimizer", "backend") and not hasattr(value, "__name__"):
        return type(value).__name__
    if name in _MAY_HOLD_SECRETS and isinstance(value, Mapping):
        return ", ".join(sorted(map(str, value)))
    if name == "store":
        value = _without_secrets(value.prefix if isinstance(value, Store) else str(value))
    return _shown(value, quoted=quoted)


def _shown(value: Any, *, quoted: bool) -> str:
    """A value without memory addresses: functions by name, source; objects by class."""
    if getattr(value, "__name__", "") == "<lambda>":
        return _source(value)
    if hasattr(value, "__name__"):
        return str(value.__name__)
    if isinstance(value, functools.partial):
        options = "".join(f", {name}={_shown(one, quoted=True)}" for name, one in value.keywords.items())
        return f"partial({', '.join(_shown(one, quoted=True) for one in (value.func, *value.args))}{options})"
    if type(value) in (list, tuple):
        shown = ", ".join(_shown(one, quoted=True) for one in value)
        return f"[{shown}]" if isinstance(value, list) else f"({shown}{',' * (len(value) == 1)})"
    if type(value) is dict:
        return "{" + ", ".join(f"{key!r}: {_shown(one, quoted=True)}" for key, one in value.items()) + "}"
    text = repr(value) if quoted else str(value)
    return type(value).__name__ if _ADDRESS.search(text) else text


def _source(function: Any) -> str:
    """The source of a lambda, or its whole line if that has several; else its place."""
    try:
        text = " ".join(inspect.getsource(function).split())
    except (OSError, TypeError):
        return f"lambda in line {function.__code__.co_firstlineno} of {function.__module__}"
    begin = text.find("lambda")
    if text.count("lambda") == 1:
        for end in range(len(text), begin, -1):
            with contextlib.suppress(SyntaxError):
                found = ast.parse(text[begin:end], mode="eval").body
                if isinstance(found, ast.Lambda):
                    return ast.get_source_segment(text[begin:end], found) or text
    return text


def _without_secrets(url: str) -> str:
    """A URL without user, password and query; other text unchanged."""
    parts = urlsplit(url)
    if not parts.netloc:
        return url
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=""))
