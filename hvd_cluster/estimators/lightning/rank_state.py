"""What one rank holds within an epoch, and Lightning's checkpoint lacks.

These are the sums of ``self.log(on_epoch=True)``, the states of torchmetrics metrics, the metrics that callbacks and
schedulers monitor, and random generators. Importing this needs Lightning.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torchmetrics

from hvd_cluster.estimators.run import random_state
from hvd_cluster.estimators.torch.model_pickling import on_cpu
from hvd_cluster.lightning.installed import submodule

_result: Any = submodule("trainer.connectors.logger_connector.result")

#: What ``self.log(reduce_fx=)`` takes.
_REDUCTIONS = (torch.mean, torch.sum, torch.max, torch.min, sum, max, min)


def capture(trainer: Any, module: Any) -> dict[str, Any]:
    """This rank's state between two batches, as tensors and plain values."""
    logged = trainer.fit_loop.epoch_loop._results
    part = {
        "logged": {key: _entry(result) for key, result in logged.items() if _is_epoch_sum(result)},
        "metrics": {
            path: {"updates": metric._update_count, "state": metric.metric_state} for path, metric in _metrics(module)
        },
        "monitored": dict(trainer.callback_metrics),
        "random": random_state.capture(),
    }
    found: dict[str, Any] = on_cpu(part)
    return found


def restore(part: dict[str, Any], trainer: Any, module: Any) -> None:
    """Restore what :func:`capture` returned, before the next batch."""
    for path, metric in _metrics(module):
        if path in part["metrics"]:
            kept = part["metrics"][path]
            for name, value in kept["state"].items():
                setattr(metric, name, _moved(value, module.device))
            metric._update_count = kept["updates"]
    logged = trainer.fit_loop.epoch_loop._results
    for key, entry in part["logged"].items():
        logged[key] = _result_of(entry, trainer, module)
    # Otherwise Lightning resets its sums in the first batch that it sees.
    trainer._logger_connector._first_loop_iter = False
    trainer.callback_metrics.update({name: value.to(module.device) for name, value in part["monitored"].items()})
    random_state.restore(part["random"])


def metric_states(module: Any) -> dict[str, dict[str, Any]]:
    """Copies of the states of the module's torchmetrics metrics, by path."""
    return {path: copy.deepcopy(metric.metric_state) for path, metric in _metrics(module)}


def set_metric_states(module: Any, states: dict[str, dict[str, Any]]) -> None:
    """Restore what :func:`metric_states` returned; ``{}`` restores nothing."""
    if not states:
        return
    for path, metric in _metrics(module):
        for name, value in states.get(path, {}).items():
            setattr(metric, name, copy.deepcopy(value))  # a metric adds to its state in place


def _metrics(module: torch.nn.Module) -> Iterator[tuple[str, torchmetrics.Metric]]:
    for path, part in module.named_modules():
        if isinstance(part, torchmetrics.MetricCollection):
            part.items(copy_state=False)  # updates those that share a state
        elif isinstance(part, torchmetrics.Metric):
            yield path, part


def _is_epoch_sum(result: Any) -> bool:
    """Whether a logged number adds up over the epoch.

    Those of a group of ranks are not kept.
    """
    return result.meta.on_epoch and not result.has_reset and result.meta.sync.group is None


def _entry(result: Any) -> dict[str, Any]:
    meta, sync = result.meta, result.meta.sync
    names = {field.name for field in dataclasses.fields(meta)} - {"_sync", "reduce_fx"}
    return {
        "meta": {name: getattr(meta, name) for name in names},
        "reduction": _REDUCTIONS.index(meta.reduce_fx),
        "is_synced": sync.should,
        "rank_zero_only": sync.rank_zero_only,
        # A metric's own state is kept with the module's metrics.
        "value": result.value if result.is_tensor else None,
        "rows": result.cumulated_batch_size if result.is_tensor and meta.is_mean_reduction else None,
    }


def _result_of(entry: dict[str, Any], trainer: Any, module: Any) -> Any:
    meta = _result._Metadata(**entry["meta"], reduce_fx=_REDUCTIONS[entry["reduction"]])
    meta.sync = _result._Sync(
        _should=entry["is_synced"], fn=trainer.strategy.reduce, rank_zero_only=entry["rank_zero_only"]
    )
    result = _result._ResultMetric(meta, entry["value"] is not None)
    if entry["value"] is None:
        result.value = module.get_submodule(meta.metric_attribute)
    else:
        result.value = entry["value"].to(module.device)
    if entry["rows"] is not None:
        result.cumulated_batch_size = entry["rows"].to(module.device)
    result._update_count = 1
    return result


def _moved(value: Any, device: torch.device) -> Any:
    """A metric's state: a tensor, or a list of tensors."""
    return [one.to(device) for one in value] if isinstance(value, list) else value.to(device)
