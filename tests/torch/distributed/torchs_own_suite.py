"""Runs the tests that torch ships for its backends, with ``hvd`` in Gloo's place, and writes the outcome of each:

    python tests/torch/distributed/torchs_own_suite.py OUTCOMES [TEST ...]

OUTCOMES becomes a JSON object: the name of each test, and "passed", "skipped", or the text of its failure. The ranks of
a test are forks of this process: a new interpreter would spend seconds on importing torch.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

NUM_RANKS = 3

with tempfile.TemporaryDirectory() as folder:
    # What the module reads when it is imported.
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(NUM_RANKS), TEMP_DIR=folder, OMP_NUM_THREADS="1")
    path, names = sys.argv[1], sys.argv[2:]
    del sys.argv[1:]  # torch's module of tests parses it

    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed import distributed_test

    import hvd_cluster.torch  # noqa: F401 - registers the backend

    of_torch = dist.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        """That of torch, with our backend whichever is asked for."""
        of_torch(*args, **{**kwargs, "backend": "hvd"})

    dist.init_process_group = init_process_group

    class TestHvd(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    class Outcomes(unittest.TextTestResult):
        """Keeps one text for each test."""

        def startTest(self, test: Any) -> None:  # noqa: N802 - unittest's name
            super().startTest(test)
            outcomes[test._testMethodName] = "passed"

        def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802
            super().addSkip(test, reason)
            outcomes[test._testMethodName] = "skipped"

        def addFailure(self, test: Any, error: Any) -> None:  # noqa: N802
            super().addFailure(test, error)
            outcomes[test._testMethodName] = self.failures[-1][1]

        def addError(self, test: Any, error: Any) -> None:  # noqa: N802
            super().addError(test, error)
            outcomes[test._testMethodName] = self.errors[-1][1]

    outcomes: dict[str, str] = {}
    suite = unittest.TestSuite(map(TestHvd, names or unittest.TestLoader().getTestCaseNames(TestHvd)))
    unittest.TextTestRunner(verbosity=2, resultclass=Outcomes).run(suite)
    Path(path).write_text(json.dumps(outcomes, indent=1))
