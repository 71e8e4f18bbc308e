"""The arguments of torch's calls, in the forms that torch and its users pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

#: The module with the classes of the options, which torch does not export.
c10d: Any = dist.distributed_c10d


def options(opts: Any, kind: Callable[[], Any]) -> Any:
    """The options of a call: those given, the defaults, or a reduction given alone."""
    if opts is None or isinstance(opts, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        made = kind()
        if opts is not None:
            made.reduceOp = opts
        return made
    return opts


def listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def nested(tensors: Any) -> list[list[torch.Tensor]]:
    """A list of lists; one list may be given without the outer one."""
    return [list(tensors)] if isinstance(tensors[0], torch.Tensor) else [list(each) for each in tensors]


def only(tensors: Any) -> torch.Tensor:
    (tensor,) = listed(tensors)
    return tensor
