"""What the job runs, one process for each GPU: a small model, trained with Horovod's API."""

import torch

import hvd_cluster.torch as hvd


def main() -> None:
    hvd.init()
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    weights = torch.tensor([1.0, 2.0])
    model = torch.nn.Linear(2, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    torch.manual_seed(1 + hvd.rank())  # each worker draws data of its own
    for _ in range(100):
        x = torch.randn(64, 2)
        y = (x @ weights)[:, None]
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
    mean = hvd.allreduce(loss.detach()).item()
    if hvd.rank() == 0:
        print(f"loss {mean:.6f} on {hvd.size()} workers", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
