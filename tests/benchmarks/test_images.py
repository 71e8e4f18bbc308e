"""All loaders of benchmarks/images.py that are installed give the same pictures."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

pytest.importorskip("PIL")

from benchmarks import images


@pytest.mark.processes
@pytest.mark.timeout(200)
def test_every_loader_gives_each_picture_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The peers leave files there, and in their processes.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    count = 2 * images.BATCH_SIZE + 10
    expected = sorted(int(images.decoded(jpeg).sum()) for jpeg in images.jpegs(count))
    for name, loader in images.written(tmp_path, count).items():
        batches = list(loader(tmp_path, 1))
        assert all(batch.shape[1:] == (images.SIDE, images.SIDE, 3) for batch in batches)
        found = sorted(int(picture.sum()) for batch in batches for picture in batch)
        assert found == expected, name
