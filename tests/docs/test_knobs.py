"""Every environment variable that users may set is described in docs/."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from hvd_cluster.settings import Settings
from hvd_cluster.topology import is_job_variable

DOCS = Path(__file__).parents[2] / "docs"


def test_every_knob_is_described() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    knobs = [knob.metadata["env"] for knob in fields(Settings)]
    assert not [name for name in knobs if f"`{name}" not in text and not is_job_variable(name)]
