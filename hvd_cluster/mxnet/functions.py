"""Broadcast of parameters, and broadcast and allgather of Python objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mxnet as mx

from hvd_cluster.engine import objects
from hvd_cluster.engine.none_arguments import none_is_default
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.mxnet.ops import broadcast_


@none_is_default
def broadcast_parameters(
    params: Any, root_rank: int = 0, prefix: str | None = None, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite parameters with those of ``root_rank``, in place.

    Args:
        params: the result of ``block.collect_params()``, or a dict of names and arrays; the same names on all ranks. A
            parameter whose shape is not known yet is broadcast when it is initialized.
        root_rank: the global rank whose values are broadcast.
        prefix: a prefix of the names by which the ranks match parameters, for two models with the same names.
        process_set: the ranks that take part.

    Raises:
        ValueError: ``params`` is something else.
    """
    if not isinstance(params, (Mapping, mx.gluon.ParameterDict)):
        raise ValueError(f"invalid params of type: {type(params)}")
    for name, parameter in sorted(params.items()):
        label = f"parameters.{prefix or ''}{name}"
        if isinstance(parameter, mx.gluon.Parameter):
            _broadcast_parameter(parameter, root_rank, label, process_set)
        else:
            broadcast_(parameter, root_rank, label, process_set=process_set)


@none_is_default
def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Broadcast ``root_rank``'s object to all ranks.

    It may be any object that cloudpickle supports.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


@none_is_default
def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Gather the objects of all ranks on every rank, in the order of the ranks."""
    return objects.allgather_object(obj, name, process_set)


def _broadcast_parameter(parameter: Any, root_rank: int, label: str, process_set: ProcessSet) -> None:
    def send() -> None:
        value = parameter.list_data()[0]
        broadcast_(value, root_rank, label, process_set=process_set)
        parameter.set_data(value)  # on further devices

    try:
        parameter.list_data()
    except mx.gluon.parameter.DeferredInitializationError:
        finish = parameter._finish_deferred_init

        def finish_and_send() -> None:
            is_pending = bool(parameter._deferred_init)
            finish()
            if is_pending:
                send()

        parameter._finish_deferred_init = finish_and_send
    else:
        send()
