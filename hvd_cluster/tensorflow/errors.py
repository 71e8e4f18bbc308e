"""The errors of TensorFlow's own classes that eager operations raise.

Each is an error of this package's tree too, so that either spelling of an ``except`` catches it. Inside a graph an
error crosses TensorFlow's runtime, which knows ValueError (InvalidArgumentError) and makes UnknownError of anything
else; its text is whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvd_cluster import errors
from hvd_cluster.errors import HorovodInternalError, NotInitializedError


class InvalidRequestError(tf.errors.InvalidArgumentError, ValueError):
    """The arguments, or the type or the name of a tensor, cannot be used."""


class RequestFailedError(tf.errors.FailedPreconditionError, HorovodInternalError):
    """The operation cannot be carried out now, e.g. before ``hvd.init()``."""


class RanksDisagreeError(tf.errors.FailedPreconditionError, errors.RanksDisagreeError):
    """The ranks asked for different things under one name."""


class JoinUnsupportedError(tf.errors.FailedPreconditionError, errors.JoinUnsupportedError):
    """A rank has joined, and the operation needs data of every rank."""


class UninitializedError(tf.errors.FailedPreconditionError, NotInitializedError):
    """A question after rank or size before ``hvd.init()``."""


class WorldEndedError(tf.errors.UnknownError, errors.WorldEndedError):
    """The job has ended: a rank died or shut down."""


_KINDS: dict[type[HorovodInternalError], Any] = {
    errors.WorldEndedError: WorldEndedError,
    errors.RanksDisagreeError: RanksDisagreeError,
    errors.JoinUnsupportedError: JoinUnsupportedError,
}


@contextmanager
def as_tensorflow_errors() -> Iterator[None]:
    """Raise what is raised inside as TensorFlow would."""
    kind: Any
    try:
        yield
    except tf.errors.OpError:
        raise
    except HorovodInternalError as error:
        kind = next((theirs for ours, theirs in _KINDS.items() if isinstance(error, ours)), RequestFailedError)
        raise kind(None, None, str(error)) from error
    except NotImplementedError:
        raise
    except NotInitializedError as error:
        kind = UninitializedError
        raise kind(None, None, str(error)) from error
    except ValueError as error:
        raise InvalidRequestError(None, None, str(error)) from error
