"""Every environment variable that users may set is described in docs/."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from hvd_cluster.settings import Settings
from hvd_cluster.topology import is_job_variable

DOCS = Path(__file__).parents[2] / "docs"


def test_every_knob_is_described() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    knobs = [knob.metadata["env"] for knob in fields(Settings)]
    named = set(re.findall(r"\bHOROVOD_\w+", text))
    lost = [name for name in knobs if name not in named and not is_job_variable(name)]
    assert not lost, f"describe these in a table of the page in docs/ that users will read: {lost}"
