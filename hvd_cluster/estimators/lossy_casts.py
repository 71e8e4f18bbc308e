"""Values of a column that another dtype cannot hold.

Every floating dtype rounds fractions, as is usual when training in float32. Reported are whole numbers that become
other ones (ids, timestamps), numbers beyond the range, and fractions that become whole numbers.
"""

from __future__ import annotations

import torch


def inexact_value(tensor: torch.Tensor, dtype: str) -> int | float | bool | None:
    """A value of the column that another dtype cannot hold; None if it holds all.

    Args:
        tensor: the column, of any shape.
        dtype: torch's name of the other dtype.
    """
    wanted: torch.dtype = getattr(torch, dtype)
    if not tensor.numel() or tensor.dtype in {torch.bool, wanted}:
        return None
    if wanted == torch.bool:
        changed = (tensor != 0) & (tensor != 1)
    elif tensor.dtype.is_floating_point and wanted.is_floating_point:
        if torch.finfo(tensor.dtype).bits <= torch.finfo(wanted).bits:
            return None
        largest = tensor.nan_to_num(0.0, 0.0, 0.0).abs().max()
        if largest <= _exact_up_to(wanted):
            return None
        after = tensor.to(wanted).to(tensor.dtype)
        changed = torch.isfinite(tensor) & (after != tensor) & ((tensor == tensor.round()) | torch.isinf(after))
    elif wanted.is_floating_point:
        if max(abs(int(tensor.max())), abs(int(tensor.min()))) <= _exact_up_to(wanted):
            return None
        # Compared as float64, and converted back for values that float64 cannot hold either.
        after = tensor.to(wanted)
        changed = after.double() != tensor.double()
        if tensor.dtype == torch.int64:
            inside = after.double().abs() < 2.0**63
            back = torch.where(inside, after.double(), torch.zeros_like(after, dtype=torch.float64)).to(torch.int64)
            changed = changed | ~inside | (back != tensor)
    elif tensor.dtype.is_floating_point:
        limits = torch.iinfo(wanted)
        outside = (tensor < limits.min) | (tensor > limits.max) | ~torch.isfinite(tensor)
        changed = outside | (tensor != tensor.round())
    else:
        limits, wide = torch.iinfo(wanted), tensor.to(torch.int64)  # limits beyond the dtype's own would wrap
        changed = (wide < limits.min) | (wide > limits.max)
    return tensor[changed][0].item() if bool(changed.any()) else None


def inexact_text(name: str, value: float, dtype: str) -> str:
    """The warning about a value of a column that its dtype cannot hold."""
    becomes = torch.tensor(value).to(getattr(torch, dtype)).item()
    return (
        f"column {name!r} holds {value}, which becomes {becomes} in the model's {dtype}: different values may become "
        "equal. Make the numbers smaller (subtract an offset, encode ids as 0, 1, 2, ...), or let the model take a "
        "wider dtype: model.double() in PyTorch, keras.Input(..., dtype='int64') in Keras, an embedding"
    )


def _exact_up_to(floating: torch.dtype) -> int:
    """The largest number up to which the dtype holds every whole number."""
    return round(2 / torch.finfo(floating).eps)
