"""A Ray Dataset in, a fitted model out, its predictions as a Ray Dataset:

python examples/ray/estimator.py --num-workers 2
"""

from __future__ import annotations

import argparse
import tempfile

import ray
import torch
from sklearn.datasets import load_digits

from hvd_cluster.estimators import TorchEstimator


def main() -> None:
    parser = argparse.ArgumentParser(description="handwritten digits from a Ray Dataset")
    parser.add_argument("--address", default=None, help="of the Ray cluster; none starts one here")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--store", default=None, help="a folder that all nodes see; a temporary one by default")
    args = parser.parse_args()

    ray.init(address=args.address)
    images, labels = load_digits(return_X_y=True)
    rows = [{"image": image / 16, "digit": int(digit)} for image, digit in zip(images, labels, strict=True)]
    data = ray.data.from_items(rows, override_num_blocks=8)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    with tempfile.TemporaryDirectory() as folder:
        model = TorchEstimator(
            model=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
            loss=torch.nn.CrossEntropyLoss(),
            feature_cols=["image"],
            label_cols=["digit"],
            validation=0.2,
            num_proc=args.num_workers,
            epochs=args.epochs,
            store=args.store or folder,
            random_seed=0,
        ).fit(data)
        scored = model.setOutputKinds(["argmax"]).transform(data).take_all()
    right = [row["digit__output"] == row["digit"] for row in scored]
    print(f"accuracy {sum(right) / len(right):.3f} on {args.num_workers} workers")


if __name__ == "__main__":
    main()
