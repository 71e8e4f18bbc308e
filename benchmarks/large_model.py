"""A transformer of a billion parameters trains two steps with AdamW in bf16, on two workers of a machine with 24 GiB:
`TorchEstimator(sharding=FSDP2(...))` beside the same fit without sharding.

Each worker may have 11 GiB of memory to write to (RLIMIT_DATA, of which about 1 GiB is never touched), so that the
driver and the kernel keep the rest. Without sharding a parameter takes 16 bytes on every rank: itself, its gradient and
AdamW's two numbers, in float32. The layers are made on the meta device, so only the first rank ever holds the whole
model. LAYERS=2 is for a try.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.report import Report
from hvd_cluster.errors import WorkerFailedError
from hvd_cluster.estimators import FSDP2, LocalBackend, ModelFactory, TorchEstimator

VOCABULARY, LENGTH, WIDTH = 256, 32, 2048
NUM_LAYERS = int(os.environ.get("LAYERS", "20"))
ROWS = 4
MAX_BYTES = 11 << 30


class Transformer(nn.Module):
    """Predicts the next of each sequence of tokens."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.last = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(LENGTH, device=tokens.device)
        mask = nn.Transformer.generate_square_subsequent_mask(
            LENGTH, device=tokens.device, dtype=self.last.weight.dtype
        )
        found: torch.Tensor = self.last(self.layers(self.tokens(tokens) + self.places(places), mask, is_causal=True))
        return found


def make(num_layers: int) -> nn.Module:
    if "HOROVOD_RANK" in os.environ:  # a worker, and not the driver
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    with torch.device("meta"):
        return Transformer(num_layers)


def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), label.flatten())


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def note_memory(record: dict[str, Any], model: nn.Module) -> None:
    import hvd_cluster.torch as hvd

    # Not ru_maxrss: that of a new process is the driver's.
    status = Path("/proc/self/status").read_text()
    record["peak_bytes"] = hvd.allgather_object(int(status.partition("VmHWM:")[2].split()[0]) * 1024)


def fit(sharding: Any, store: str) -> tuple[dict[str, Any], int, float]:
    """The record of the epoch, the number of parameters, and the seconds of the whole fit."""
    text = np.random.default_rng(0).integers(VOCABULARY, size=(ROWS, LENGTH + 1))
    rows = pd.DataFrame({"tokens": list(text[:, :-1]), "next": list(text[:, 1:])})
    estimator = TorchEstimator(
        model=ModelFactory(make, NUM_LAYERS),
        optimizer=optimizer,
        loss=loss,
        feature_cols=["tokens"],
        label_cols=["next"],
        batch_size=1,
        epochs=1,
        sharding=sharding,
        mixed_precision="bf16",
        callbacks=[note_memory],
        backend=LocalBackend(2, env={"OMP_NUM_THREADS": "1"}, verbose=0),
        store=store,
        verbose=0,
    )
    start_s = time.monotonic()
    model = estimator.fit(rows)
    duration_s = time.monotonic() - start_s
    return model.getHistory()[0], sum(one.numel() for one in model.getModel().parameters()), duration_s


def measure() -> Report:
    rows: list[tuple[str, ...]] = []
    divided = FSDP2(wrap="TransformerEncoderLayer", activation_checkpointing=True)
    with tempfile.TemporaryDirectory() as folder:
        record, num_parameters, duration_s = fit(divided, f"{folder}/divided")
        step_s = 1 / record["samples_per_s"][0]
        peak = max(record["peak_bytes"]) / (1 << 30)
        rows.append(("`FSDP2`", f"trains, loss {record['train']['loss']:.2f}", f"{peak:.1f} GiB", f"{step_s:.1f} s"))
        try:
            record, _, _ = fit("none", f"{folder}/whole")
            peak = max(record["peak_bytes"]) / (1 << 30)
            rows.append(("none", f"trains, loss {record['train']['loss']:.2f}", f"{peak:.1f} GiB", ""))
        except WorkerFailedError as error:
            print(error, file=sys.stderr)
            reason = next((line for line in str(error).splitlines() if "memory" in line), "see stderr")
            rows.append(("none", f"fails: {reason.strip()[:120]}", "", ""))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    title = f"{num_parameters / 1e9:.2f} billion parameters on two workers of a machine with {memory:.0f} GiB"
    note = (
        f"The whole fit with `FSDP2` took {duration_s:.0f} s: it writes {12 * num_parameters / 1e9:.0f} GB of shards."
    )
    return Report(title, ["sharding", "result", "peak of a rank", "a step"], rows, [note])
