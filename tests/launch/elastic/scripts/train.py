"""An elastic training run: ``train.py FOLDER EPOCHS PAUSE_S [BATCH]``. Rank 0 writes end.json; all write pid.<pid>.

A file "hurry" in the folder ends the pauses: the test has seen what it waited for.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

import hvd_cluster.torch as hvd

FOLDER, EPOCHS, PAUSE_S = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
BATCH = int(sys.argv[4]) if len(sys.argv) > 4 else 4
NUM_SAMPLES = 64

hvd.init()
torch.manual_seed(hvd.rank())  # ranks begin apart: the first sync makes them equal
x = torch.arange(NUM_SAMPLES, dtype=torch.float32).reshape(-1, 1) / NUM_SAMPLES
data = torch.utils.data.TensorDataset(torch.cat([x, x * x], 1), 3 * x, torch.arange(NUM_SAMPLES))
model = torch.nn.Linear(2, 1)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(0.5 if hvd.rank() == 0 else -1.0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), named_parameters=model.named_parameters()
)
sampler = hvd.elastic.ElasticSampler(data, shuffle=True, seed=3)
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0, seen=[], sizes=[])


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    while state.epoch < EPOCHS:
        loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=state.sampler)
        for index, (features, target, which) in enumerate(loader):
            state.optimizer.zero_grad()
            torch.nn.functional.mse_loss(state.model(features), target).backward()
            state.optimizer.step()
            state.seen = state.seen + [(state.epoch, int(sample)) for sample in hvd.allgather(which)]
            state.sizes = [*state.sizes, hvd.size()]
            state.step += 1
            state.sampler.record_batch(index, BATCH)
            note = FOLDER / f"tmp.{os.getpid()}"
            note.write_text(f"{state.step} {hvd.rank()} {hvd.size()} {os.environ['HOROVOD_HOSTNAME']}")
            note.rename(FOLDER / f"pid.{os.getpid()}")
            if not (FOLDER / "hurry").exists():
                time.sleep(PAUSE_S)
            state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()


train(state)
if hvd.rank() == 0:
    weights = [parameter.detach().flatten().tolist() for parameter in model.parameters()]
    (FOLDER / "end.json").write_text(json.dumps({"weights": weights, "seen": state.seen, "sizes": state.sizes}))
