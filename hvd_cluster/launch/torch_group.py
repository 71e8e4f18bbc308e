"""torch.distributed's default group, ready when the user's function starts.

For every launcher, if it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

from hvd_cluster.errors import LaunchError
from hvd_cluster.settings import Settings


@contextmanager
def torch_group() -> Iterator[None]:
    """Make the default group if ``HOROVOD_TORCH_BACKEND`` names its backend.

    Destroy it after a success. After an error the other ranks may never come to the end of theirs.

    Raises:
        LaunchError: the job is elastic: its ranks change, and a process group's do not.
    """
    settings = Settings.from_env()
    if not settings.torch_backend:
        yield
        return
    if settings.elastic:
        raise LaunchError(
            f"HOROVOD_TORCH_BACKEND={settings.torch_backend} does not work in an elastic job: call "
            "init_process_group() in the function that hvd.elastic.run() wraps"
        )
    # By its name: launchers do not import the frameworks, and run where they are not installed.
    backend = importlib.import_module("hvd_cluster.torch.distributed")
    is_own = backend.begin(settings.torch_backend)
    yield
    if is_own:
        backend.end()
