"""An elastic training run on the first GPU: ``elastic_train.py FOLDER STEPS``. All write pid.<pid>, rank 0 end.json."""

import json
import os
import sys
import time
from pathlib import Path

import torch

import hvd_cluster.torch as hvd
from hvd_cluster.engine import basics

FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])

if os.environ["TRANSPORT"] == "nccl":
    os.environ["NCCL_HOSTID"] = str(os.getpid())
torch.cuda.set_device(0)
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(64, 64).cuda()
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0, sizes=[], transports=[])


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    while state.step < STEPS:
        optimizer.zero_grad()
        model(torch.randn(8, 64, device="cuda")).square().mean().backward()
        optimizer.step()
        state.step += 1
        state.sizes = [*state.sizes, hvd.size()]
        state.transports = [*state.transports, basics.engine().transport_name(0, torch.device("cuda", 0))]
        note = FOLDER / f"tmp.{os.getpid()}"
        note.write_text(f"{state.step} {hvd.rank()} {hvd.size()}")
        note.rename(FOLDER / f"pid.{os.getpid()}")
        time.sleep(0.02)
        state.commit()


train(state)
sums = hvd.allgather(sum(parameter.detach().double().sum() for parameter in model.parameters()).reshape(1))
if hvd.rank() == 0:
    end = {"sums": sums.tolist(), "sizes": state.sizes, "transports": state.transports}
    (FOLDER / "end.json").write_text(json.dumps(end))
