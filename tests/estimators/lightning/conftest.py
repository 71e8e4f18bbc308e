"""What the tests of Lightning fits share."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_mpi(two_workers, one_worker):
    """Lightning looks for MPI, which would start Open MPI's daemon in the worker."""

    def fn():
        import sys

        sys.modules["mpi4py.MPI"] = None

    for workers in (two_workers, one_worker):
        workers.run(fn)
