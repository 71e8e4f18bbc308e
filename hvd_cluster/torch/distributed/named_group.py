"""Group names, devices and abilities that C++ knows only of torch's backends."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_TorchGroup: Any = dist.ProcessGroup


class NamedGroup(_TorchGroup):
    """A process group with the name and the description that torch gives it."""

    #: torch asks the backend of a device for these.
    supports_coalescing = supports_splitting = supports_time_estimate = False

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._name = self._description = ""

    def getBackendName(self) -> str:  # noqa: N802 - torch's spelling
        return "hvd"

    name = _get_backend_name = getBackendName

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, text: str) -> None:
        self._description = text

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        """The kinds of devices whose tensors it takes."""
        return [torch.device(kind) for kind in ("cpu", "cuda") if kind == "cpu" or torch.cuda.is_available()]

    def _get_backend(self, device: torch.device) -> NamedGroup:
        """It is its own backend, for every device."""
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether the backend allocates memory for tensors."""
        return False
