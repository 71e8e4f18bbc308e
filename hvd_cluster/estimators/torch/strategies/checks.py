"""What ``sharding=`` and ``communication=`` exclude, checked in the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from hvd_cluster.data.store import Store
from hvd_cluster.estimators.torch.model_source import is_lazy
from hvd_cluster.estimators.torch.strategies.communication import PowerSGD
from hvd_cluster.estimators.torch.strategies.fsdp2 import CONTAINERS, FSDP2

_APART = "sharding=FSDP2(wrap=...) with the classes of modules that have parameters of one dtype each"
#: Optimizers of torch whose first step fails on a DTensor: it changes norms or signs in place, or needs whole matrices.
_WHOLE_ONLY = ("Adafactor", "Muon", "Rprop")


def wrong_sharding(
    value: Callable[[str], Any], model: nn.Module | None, outer_names: Callable[[nn.Module], Sequence[str]]
) -> list[str]:
    """Mistakes in the params of an estimator with ``sharding=``.

    Args:
        value: returns a param by its name.
        model: what is trained, if it is known.
        outer_names: returns the names of the modules of ``model`` that are called from outside.
    """
    sharding = value("sharding")
    if sharding == "none":
        return []
    wrong = _wrong_torch("sharding")
    if value("torch_backend") not in (None, "hvd"):
        wrong.append(
            f"sharding needs torch_backend='hvd', and torch_backend is {value('torch_backend')!r}: leave it out"
        )
    if isinstance(sharding, FSDP2) and value("gradient_compression") is not None:
        wrong.append(
            "gradient_compression has no effect with sharding='fsdp2', whose backward pass reduces the gradients: "
            "leave it out, or use sharding='zero1'"
        )
    if model is None:
        return wrong
    if isinstance(sharding, FSDP2):
        return wrong + _wrong_for_fsdp2(sharding, model, outer_names)
    return wrong if is_lazy(model) else wrong + _wrong_for_zero1(model)


def called_modules(module: nn.Module) -> list[str]:
    """The names of the modules in a LightningModule that its steps may call.

    They are its children, or those in a container. ``fully_shard`` wraps these, because steps call them without
    ``forward`` of the LightningModule.

    Raises:
        ValueError: the LightningModule has parameters itself, or two of them share one.
    """
    if own := [name for name, _ in module.named_parameters(recurse=False)]:
        raise ValueError(
            f"sharding='fsdp2' divides the layers of a LightningModule, and {', '.join(own)} belongs to the module "
            "itself: move it to a layer, whose forward() uses it"
        )
    found: list[str] = []
    for name, child in module.named_children():
        if not any(True for _ in child.parameters()):
            continue
        inner = called_modules(child) if isinstance(child, CONTAINERS) else [""]
        found += [f"{name}.{one}" if one else name for one in inner]
    holders: dict[int, str] = {}
    for name in found:
        for parameter in module.get_submodule(name).parameters():
            if (other := holders.setdefault(id(parameter), name)) != name:
                raise ValueError(
                    f"sharding='fsdp2' divides the layers of a LightningModule, and {other} and {name} share a "
                    "parameter: make them one layer, whose forward() calls both"
                )
    return found


def wrong_communication(
    value: Callable[[str], Any], model: nn.Module | None, scaled: tuple[str, str] | None
) -> list[str]:
    """Mistakes in the params of an estimator with ``communication=``.

    :func:`wrong_sharding` returns the others.

    Args:
        scaled: the param with which a scaler skips steps, and the value to give instead; None without one.
    """
    given = value("communication")
    if given == "every_step":
        return []
    name = type(given).__name__
    wrong = _wrong_torch("communication")
    if value("sharding") != "none":
        wrong.append(
            f"communication={name}(...) and sharding exclude each other, because such workers need the whole model: "
            "leave one of the two out"
        )
    if value("gradient_compression") is not None:
        wrong.append(f"gradient_compression has no effect with communication={name}(...): leave it out")
    if scaled is not None:
        # The rounds of the ranks would differ after a skipped step; an overflow would stay in PowerSGD's error.
        wrong.append(
            f"{scaled[0]} skips steps whose gradients overflow, which communication={name}(...) does not allow: "
            f"use {scaled[1]}"
        )
    if value("torch_backend") not in (None, "hvd"):
        wrong.append(f"communication={name}(...) needs torch_backend='hvd': leave torch_backend out")
    if isinstance(given, PowerSGD) and model is not None:
        wrong += _wrong_for_sparse(f"communication={name}(...)", model)
    return wrong


def require_divisible(sharding: Any, optimizer: Any) -> None:
    """Check that the optimizer works on parameters divided as ``sharding=`` says.

    Raises:
        ValueError: it does not.
    """
    classes = tuple(getattr(torch.optim, name) for name in _WHOLE_ONLY if hasattr(torch.optim, name))
    if isinstance(sharding, FSDP2) and isinstance(optimizer, classes):
        raise ValueError(
            f"optimizer: {type(optimizer).__name__} of torch does not work on divided parameters, as sharding='fsdp2' "
            "makes them: use sharding='zero1', or another optimizer"
        )


def require_store(store: Any, keeps_with_driver: bool) -> None:
    """Check that the workers can write their tensors where the driver reads them.

    Raises:
        ValueError: they cannot.
    """
    if not keeps_with_driver and (store is None or Store.create(store).saving_runs()):
        return
    raise ValueError(
        "sharding, communication: each worker saves its tensors in the store, and this fit has no store that all "
        'workers see and that keeps runs (save_runs=True): give one, such as store="s3://bucket/work"'
    )


def _wrong_torch(param: str) -> list[str]:
    if find_spec("torch.distributed.fsdp._fully_shard") is not None:
        return []
    return [f"{param} needs torch 2.6 or later, and this is {torch.__version__}: update torch"]


def _wrong_for_fsdp2(config: FSDP2, model: nn.Module, outer_names: Callable[[nn.Module], Sequence[str]]) -> list[str]:
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return ["sharding='fsdp2' does not work with TorchScript: give the module that was scripted"]
    wrong = _wrong_for_sparse("sharding='fsdp2'", model)
    try:
        outer = outer_names(model)
        if is_lazy(model):
            return wrong
        wrong += _indivisible(model)
        names = config.wrapped(model)
    except ValueError as error:
        return [*wrong, str(error)]
    wrong += _mixed_dtypes(model, [*(name for name in names if name not in outer), *outer])
    if config.activation_checkpointing and not names:
        wrong.append(
            "sharding: activation_checkpointing has no effect, because no module of the model is wrapped: give "
            f"FSDP2(wrap=...), or a min_num_params below {config.min_num_params}"
        )
    return wrong


def _indivisible(model: nn.Module) -> list[str]:
    """Mistakes in the parameters of ``model``, whose modules ``fully_shard`` wraps."""
    wrong = []
    if scalars := [name for name, one in model.named_parameters() if not one.dim()]:
        wrong.append(f"sharding='fsdp2' cannot divide scalars: give {', '.join(scalars)} the shape (1,)")
    # torch's optimizers see the parts of a complex parameter as real numbers, except in a DTensor.
    if complex_ones := [name for name, one in model.named_parameters() if one.is_complex() and one.requires_grad]:
        wrong.append(
            f"sharding='fsdp2' does not train complex parameters as other fits do, and {', '.join(complex_ones)} is "
            "complex: keep the real and the imaginary part in a real parameter, and use torch.view_as_complex()"
        )
    return wrong


def _wrong_for_sparse(param: str, model: nn.Module) -> list[str]:
    return [
        f"{param} does not work with sparse gradients: make {name or 'the model'} with sparse=False"
        for name, module in model.named_modules()
        if getattr(module, "sparse", False) is True and isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    ]


def _wrong_for_zero1(model: nn.Module) -> list[str]:
    dtypes = _dtypes(model.parameters())
    if len(dtypes) < 2:
        return []
    named = ", ".join(dtypes)
    return [f"sharding='zero1' needs parameters of one dtype, and the model has {named}: use {_APART}"]


def _mixed_dtypes(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Mistakes in the dtypes of modules that ``fully_shard`` wraps, inner ones first."""
    # Below torch 2.8, also frozen parameters must have the dtype of the others.
    counts_frozen = torch.__version__ < "2.8"
    divided: set[int] = set()
    for name in names:
        own = [one for one in model.get_submodule(name).parameters() if id(one) not in divided]
        divided.update(map(id, own))
        dtypes = _dtypes(one for one in own if one.requires_grad or counts_frozen)
        if len(dtypes) > 1:
            what, found = name or "the model", ", ".join(dtypes)
            return [f"sharding='fsdp2' divides the parameters of {what} together, and they are {found}: use {_APART}"]
    return []


def _dtypes(parameters: Iterable[torch.Tensor]) -> list[str]:
    return sorted({str(one.dtype).removeprefix("torch.") for one in parameters})
