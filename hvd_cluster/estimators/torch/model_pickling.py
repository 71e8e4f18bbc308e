"""Copies of models and states, and pickles of models that PyTorch cannot pickle.

Copies are for this process or another one. The classes of parametrized modules (``torch.nn.utils.parametrizations``)
are made at run time and cannot be pickled; TorchScript has its own file format. After :func:`make_picklable` any
pickler takes both, and what it rebuilds in another process can be pickled again.
"""

from __future__ import annotations

import copy
import copyreg
import importlib
import io
import types
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import cloudpickle
import numpy as np
import torch
from torch.nn.utils import parametrize

from hvd_cluster.errors import DataError

M = TypeVar("M", bound=torch.nn.Module)
T = TypeVar("T")

_HOLDS = "the state of the model, the optimizer or the scheduler holds"
_REMEDY = (
    "set it to None before fit() and create it where it is used, or exclude it from the module's state with a "
    "__getstate__ method"
)


def make_picklable(value: Any) -> None:
    """Make the modules in ``value`` picklable; ignore anything else.

    ``value`` is a module, or a list or dict of modules.
    """
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for one in value:
            make_picklable(one)
    elif isinstance(value, torch.jit.ScriptFunction):
        copyreg.pickle(torch.jit.ScriptFunction, _reduce_script_function)
    elif isinstance(value, torch.nn.Module):
        for module in value.modules():
            if isinstance(module, torch.jit.ScriptModule):
                copyreg.pickle(type(module), _reduce_script)
            elif parametrize.is_parametrized(module):
                type(module).__reduce_ex__ = _reduce_parametrized  # type: ignore[method-assign, assignment]


def copied(module: M) -> M:
    """A copy of ``module`` that shares nothing with it.

    The copy is made through pickle if ``copy.deepcopy`` fails. ``deepcopy`` refuses a tensor that was computed, such as
    a stored attention map or the weight of a pruned module, and the parameters of its copies of TorchScript cannot be
    trained.

    Raises:
        DataError: pickle fails too; the text names the attribute.
    """
    refusal: Exception | None = None
    if not any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        try:
            return copy.deepcopy(module)
        except Exception as error:  # noqa: BLE001 - copying runs user code, which may raise anything
            refusal = error
    make_picklable(module)
    try:
        return cloudpickle.loads(cloudpickle.dumps(module))  # type: ignore[no-any-return]
    except Exception as error:  # noqa: BLE001 - so does pickling
        raise DataError(unpicklable_text("model", module) or f"the model cannot be copied: {error}") from (
            refusal or error
        )


def module_on_cpu(value: T) -> T:
    """A copy of a module on the CPU, or itself if it is there; other values as is."""
    if not isinstance(value, torch.nn.Module):
        return value
    if all(tensor.device.type == "cpu" for tensor in (*value.parameters(), *value.buffers())):
        return value
    return copied(value).cpu()


def on_cpu(state: Any) -> Any:
    """The same nest of dicts and lists, with every tensor on the CPU.

    Scalars of NumPy become Python's.

    Raises:
        DataError: it holds a NumPy array with dimensions, or a named tuple or the like; no checkpoint brings it back.
    """
    if isinstance(state, torch.Tensor):
        return state.detach().cpu()
    if isinstance(state, dict):
        moved = {key: on_cpu(value) for key, value in state.items()}
        if isinstance(state, Counter):  # MultiStepLR calls its methods
            return Counter(moved)
        return with_versions(moved, state) if isinstance(state, OrderedDict) else moved
    if type(state) in (list, tuple, torch.Size):
        return type(state)(on_cpu(value) for value in state)
    if isinstance(state, (list, tuple)):
        raise DataError(f"{_HOLDS} a {type(state).__qualname__}: make it a dict, a list or a plain tuple")
    if isinstance(state, np.ndarray) and state.ndim:
        raise DataError(
            f"{_HOLDS} a NumPy array of shape {state.shape}: make it a tensor, e.g. torch.from_numpy(array)"
        )
    return state.item() if isinstance(state, (np.ndarray, np.generic)) else state


def with_versions(entries: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of a state dict as one that knows the versions of its modules.

    ``load_state_dict`` gives the modules these versions.

    Args:
        entries: the entries.
        state: the state dict.
    """
    found = OrderedDict(entries)
    if hasattr(state, "_metadata"):
        found._metadata = state._metadata  # type: ignore[attr-defined]
    return found


def state_within(state: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The state dict of the module at ``path`` in the module that ``state`` is of.

    It has the versions of its modules.
    """

    def within(entries: Mapping[str, Any]) -> dict[str, Any]:
        return {name.removeprefix(f"{path}."): one for name, one in entries.items() if name.startswith(f"{path}.")}

    found = OrderedDict(within(state))
    if hasattr(state, "_metadata"):
        found._metadata = {"": state._metadata.get(path, {}), **within(state._metadata)}  # type: ignore[attr-defined]
    return found


def unpicklable_text(name: str, module: torch.nn.Module) -> str:
    """Which attributes prevent pickling of ``module``, with the remedy; else empty.

    Args:
        name: the user's name for the module.
        module: the module to send.
    """
    make_picklable(module)
    if _is_picklable(module):
        return ""
    found = list(_unpicklable(name, module)) or [f"{name} ({type(module).__qualname__})"]
    return f"{', '.join(found)} cannot be copied or sent to the workers: {_REMEDY}"


def _unpicklable(name: str, module: torch.nn.Module) -> Iterator[str]:
    for inner, part in module.named_modules():
        for attribute, value in vars(part).items():
            if attribute in {"_modules", "_parameters", "_buffers", "_trainer"} or _is_picklable(value):
                continue
            path = ".".join(text for text in (name, inner, attribute) if text)
            values = value.items() if isinstance(value, Mapping) else []
            culprits = [(f"{path}[{key!r}]", one) for key, one in values if not _is_picklable(one)]
            for where, one in culprits or [(path, value)]:
                yield f"{where} ({type(one).__qualname__})"


def _is_picklable(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # noqa: BLE001 - pickling runs user code; any failure is the answer
        return False
    return True


def _reduce_parametrized(module: torch.nn.Module, _protocol: Any = None) -> tuple[Any, ...]:
    names = tuple(module.parametrizations.keys())  # type: ignore[operator, union-attr]
    return _rebuilt_parametrized, (parametrize.type_before_parametrizations(module), names, dict(vars(module)))


def _rebuilt_parametrized(cls: type[torch.nn.Module], names: tuple[str, ...], state: dict[str, Any]) -> Any:
    """The module, with a new class whose properties compute the parametrized tensors."""
    module: Any = cls.__new__(cls)
    torch.nn.Module.__init__(module)
    for name in names:
        module.register_parameter(name, torch.nn.Parameter(torch.zeros(0)))
        parametrize.register_parametrization(module, name, torch.nn.Identity(), unsafe=True)
    vars(module).clear()
    vars(module).update(state)
    make_picklable(module)
    return module


def _reduce_script(module: Any) -> tuple[Any, ...]:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of PyTorch call all of TorchScript deprecated
        torch.jit.save(module, buffer)
    return _loaded_script, (buffer.getvalue(), module.training)


def _reduce_script_function(function: Any) -> tuple[Any, ...]:
    return _loaded_script, (function.save_to_buffer(), True)


def _loaded_script(content: bytes, training: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.jit.load(io.BytesIO(content))
    make_picklable(module)
    return module.train(training)


def imported_if_present(name: str) -> types.ModuleType:
    """A module; an empty one of its name if it cannot be imported.

    The functions that use it may never be called.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        return types.ModuleType(name)
