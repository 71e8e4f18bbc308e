"""The workers of a tf.data service.

``hvdrun -np 4 python -m hvd_cluster.tensorflow.data.compute_worker service.json`` starts four.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import hvd_cluster.tensorflow as hvd
from hvd_cluster.rendezvous.addresses import interface_addresses
from hvd_cluster.rendezvous.secret import new_secret
from hvd_cluster.tensorflow.data.compute_service import TfDataServiceConfig, compute_worker_fn
from hvd_cluster.tensorflow.data.registry import ComputeService
from hvd_cluster.topology import join_address


def main(arguments: Sequence[str]) -> None:
    """Run until a training process shuts the service down.

    It calls ``TfDataServiceConfig.read(file).compute_client().shutdown()``.

    Raises:
        ValueError: the number of workers is not a multiple of the number of dispatchers.
    """
    given = parsed(arguments)
    hvd.init()
    if given.dispatchers < 1 or hvd.size() % given.dispatchers:
        raise ValueError(f"{hvd.size()} workers cannot be divided evenly among --dispatchers {given.dispatchers}")
    if hvd.rank() > 0:
        compute_worker_fn(TfDataServiceConfig.from_dict(hvd.broadcast_object(None)))
        hvd.barrier()
    else:
        _serve(given.configfile, given.dispatchers, given.dispatcher_side, given.timeout)
    hvd.shutdown()


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; exits on --help and on invalid arguments."""
    parser = argparse.ArgumentParser(description="Workers of a tf.data service, under hvdrun or any other launcher.")
    parser.add_argument("configfile", help="file to write for the training job; contains the key of the service")
    parser.add_argument("--dispatchers", type=int, default=1, help="one for all training processes, or one for each")
    parser.add_argument(
        "--dispatcher-side", choices=["compute", "training"], default="compute", help="which job runs the dispatchers"
    )
    parser.add_argument("--timeout", type=int, default=60, help="seconds to wait for the other processes")
    return parser.parse_args(arguments)


def _serve(configfile: str, dispatchers: int, side: str, timeout_s: int) -> None:
    key, workers = new_secret(), hvd.size() // dispatchers
    with ComputeService(dispatchers, workers, key, "0.0.0.0") as service:  # the training job may be on other hosts
        addresses = [join_address(address, service.port) for address in interface_addresses()]
        config = TfDataServiceConfig(dispatchers, workers, side, addresses, key, timeout_s)
        hvd.broadcast_object(config.to_dict())
        config.write(configfile)
        try:
            compute_worker_fn(config)
            hvd.barrier()  # no rank waits for the registry any more
        finally:
            Path(configfile).unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1:])
