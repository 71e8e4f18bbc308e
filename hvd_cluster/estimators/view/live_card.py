"""The card that a notebook shows during a fit; its last state stays there.

The last state is also exported to HTML.
"""

from __future__ import annotations

import html as markup
import sys
import time
from collections.abc import Mapping
from typing import Any

from hvd_cluster.estimators.view.history import usage_text
from hvd_cluster.estimators.view.time_shares import TimeShares

#: The least time between two states of the card.
_INTERVAL_S = 1.0
_WIDTH = 560


class LiveCard:
    """Made of the last progress report, and of the last record of an epoch.

    Args:
        label: the name of the run.
        display: ``IPython.display.display``.
    """

    def __init__(self, label: str, display: Any) -> None:
        self._label = label
        self._display = display
        self._handle: Any = None
        self._due_s = 0.0
        self._step: Mapping[str, Any] = {}
        self._text = ""
        self._title = ""
        self._shares: TimeShares | None = None
        self._usage = ""

    @classmethod
    def in_notebook(cls, label: str) -> LiveCard | None:
        """The card, if this process is the kernel of a notebook."""
        ipython: Any = sys.modules.get("IPython")
        shell = None if ipython is None else ipython.get_ipython()
        if not hasattr(shell, "kernel"):
            return None
        from IPython.display import display

        return cls(label, display)

    def show_step(self, fields: Mapping[str, Any], text: str, shares: TimeShares | None) -> None:
        """Show a progress report, its text, and what ranks spend their recent steps on."""
        self._step, self._text = fields, text
        if shares is not None:
            self._shares, self._title = shares, "What each rank spends its recent steps on"
        self._draw("training")

    def show_epoch(self, record: Mapping[str, Any]) -> None:
        """An epoch has ended."""
        self._usage = usage_text(record)
        shares = TimeShares.of_record(record)
        if shares is not None and not (self._shares is not None and self._shares.verdict):
            self._shares, self._title = shares, f"What each rank spent its steps on in epoch {record['epoch'] + 1}"
        self._draw("training")

    def close(self, state: str) -> None:
        """The fit has ended: "finished" or "failed"."""
        if self._step:
            self._due_s = 0.0
            self._draw(state)

    def html(self, state: str) -> str:
        """The card as it is now."""
        done = (self._step["epoch"] * self._step["steps"] + self._step["step"]) if self._step else 0
        total = (self._step["epochs"] * self._step["steps"]) if self._step else 1
        colour = {"failed": "#D55E00", "finished": "#009E73"}.get(state, "#0072B2")
        parts = [
            f'<div><b>{markup.escape(self._label)}</b> <span style="color: {colour}">{state}</span></div>',
            _bar(done, total, colour),
            f"<div>{markup.escape(self._text)}</div>",
        ]
        if self._shares is not None:
            parts.append(self._shares.html(self._title))
        if self._usage:
            parts.append(f'<div style="opacity: 0.7">{markup.escape(self._usage)}</div>')
        return f'<div style="font-family: sans-serif; font-size: 13px; line-height: 1.4">{"".join(parts)}</div>'

    def _draw(self, state: str) -> None:
        if time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + _INTERVAL_S
        data = {"text/html": self.html(state), "text/plain": f"{self._label}: {state}. {self._text}"}
        if self._handle is None:
            self._handle = self._display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def _bar(done: int, total: int, colour: str) -> str:
    return (
        f'<svg width="{_WIDTH}" height="6" role="img" aria-label="{done} of {total} steps" '
        'style="display: block; margin: 6px 0; max-width: 100%">'
        f'<rect width="{_WIDTH}" height="6" rx="3" fill="#999999" fill-opacity="0.3"/>'
        f'<rect width="{_WIDTH * done / total:.0f}" height="6" rx="3" fill="{colour}"/></svg>'
    )
