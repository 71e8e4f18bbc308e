"""Subclasses of TensorFlow's errors that eager operations raise.

Each also derives from this package's error of the same meaning, so either ``except`` catches it. Inside a graph,
TensorFlow's runtime converts ValueError to InvalidArgumentError and all other errors to UnknownError, with the same
text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvd_cluster import errors
from hvd_cluster.errors import HorovodInternalError, NotInitializedError


class InvalidRequestError(tf.errors.InvalidArgumentError, ValueError):
    """An argument, or the dtype or name of a tensor, is invalid."""


class RequestFailedError(tf.errors.FailedPreconditionError, HorovodInternalError):
    """The operation cannot run now, for example before ``hvd.init()``."""


class RanksDisagreeError(tf.errors.FailedPreconditionError, errors.RanksDisagreeError):
    """The ranks submitted different requests under one name."""


class JoinUnsupportedError(tf.errors.FailedPreconditionError, errors.JoinUnsupportedError):
    """A rank has joined, and the operation needs data of every rank."""


class UninitializedError(tf.errors.FailedPreconditionError, NotInitializedError):
    """Rank or size was requested before ``hvd.init()``."""


class WorldEndedError(tf.errors.UnknownError, errors.WorldEndedError):
    """The job has ended: a rank died or shut down."""


_KINDS: dict[type[HorovodInternalError], Any] = {
    errors.WorldEndedError: WorldEndedError,
    errors.RanksDisagreeError: RanksDisagreeError,
    errors.JoinUnsupportedError: JoinUnsupportedError,
}


@contextmanager
def as_tensorflow_errors() -> Iterator[None]:
    """Convert errors raised inside to TensorFlow's classes."""
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
