"""``horovod.runner.common.util.codec``: objects as base64 text."""

from __future__ import annotations

import base64
from typing import Any

import cloudpickle


def dumps_base64(obj: Any, to_ascii: bool = True) -> str | bytes:
    """The pickle of ``obj`` as base64, as text or (``to_ascii=False``) as bytes."""
    encoded = base64.b64encode(cloudpickle.dumps(obj))
    return encoded.decode("ascii") if to_ascii else encoded


def loads_base64(encoded: str | bytes) -> Any:
    """The object that was given to :func:`dumps_base64`.

    A pickle can run code: load only what you trust.
    """
    return cloudpickle.loads(base64.b64decode(encoded))
