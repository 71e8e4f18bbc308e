from __future__ import annotations

import os
from typing import Any

import pytest

from hvd_cluster.spark.active_session import active
from hvd_cluster.spark.session import INLINE_BYTES


@pytest.mark.spark("connect")
def test_the_same_content_is_brought_to_a_server_once_in_a_sessions_life(spark: Any, monkeypatch: Any) -> None:
    upload, paths = spark.addArtifacts, []

    def counted(path: str, **options: Any) -> None:
        paths.append(path)
        upload(path, **options)

    monkeypatch.setattr(spark, "addArtifacts", counted)
    content = os.urandom(INLINE_BYTES + 1)
    names = [active(spark).keep(content) for _ in range(2)]
    assert names[0] == names[1]
    assert len(paths) == 1
    assert active(spark).keep(content[1:] + b"another") != names[0]
    assert len(paths) == 2
