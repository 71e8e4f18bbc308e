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

from hvd_cluster.errors import SHUT_DOWN_TEXT, HorovodInternalError, NotInitializedError


class InvalidRequestError(tf.errors.InvalidArgumentError, ValueError):
    """The arguments, or the type or the name of a tensor, cannot be used."""


class RanksDisagreeError(tf.errors.FailedPreconditionError, HorovodInternalError):
    """The ranks asked for different things under one name, or the operation cannot be carried out as things stand."""


class UninitializedError(tf.errors.FailedPreconditionError, NotInitializedError):
    """A question after rank or size before ``hvd.init()``."""


class WorldEndedError(tf.errors.UnknownError, HorovodInternalError):
    """The job has ended: a rank died or shut down."""


@contextmanager
def as_tensorflow_errors() -> Iterator[None]:
    """Raise what is raised inside as TensorFlow would."""
    kind: Any
    try:
        yield
    except tf.errors.OpError:
        raise
    except HorovodInternalError as error:
        kind = WorldEndedError if SHUT_DOWN_TEXT in str(error) else RanksDisagreeError
        raise kind(None, None, str(error)) from error
    except NotImplementedError:
        raise
    except NotInitializedError as error:
        kind = UninitializedError
        raise kind(None, None, str(error)) from error
    except ValueError as error:
        raise InvalidRequestError(None, None, str(error)) from error


def was_world_ended(error: BaseException) -> bool:
    """Whether an error out of a graph is one of a collective that failed because the job did."""
    return isinstance(error, tf.errors.OpError) and HorovodInternalError.__name__ in str(error)
