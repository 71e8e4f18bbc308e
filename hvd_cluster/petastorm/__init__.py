"""petastorm data sets, read and written without petastorm.

The names that petastorm's own front page has are served here, each imported when it is asked for; the rest is in the
modules: :mod:`~hvd_cluster.petastorm.unischema`, ``.codecs``, ``.metadata``, ``.writer``, ``.factories``,
``.predicates``, ``.selectors``, ``.transform``, ``.pytorch``, ``.tf_utils``, ``.spark``. ``import hvd_cluster.compat``
makes ``import petastorm...`` lead to them where petastorm itself is not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_cluster.lazy import lazy

if TYPE_CHECKING:
    from hvd_cluster.petastorm.errors import NoDataAvailableError
    from hvd_cluster.petastorm.factories import make_batch_reader, make_reader
    from hvd_cluster.petastorm.transform import TransformSpec
    from hvd_cluster.petastorm.writer import write_dataset

#: The release whose formats and behaviour are answered for.
PETASTORM_VERSION = "0.13.1"

_PLACES = {
    "make_reader": "factories",
    "make_batch_reader": "factories",
    "TransformSpec": "transform",
    "NoDataAvailableError": "errors",
    "write_dataset": "writer",
}

__all__ = [
    "PETASTORM_VERSION",
    "NoDataAvailableError",
    "TransformSpec",
    "make_batch_reader",
    "make_reader",
    "write_dataset",
]

__getattr__, __dir__ = lazy(__name__, _PLACES, "PETASTORM_VERSION")
