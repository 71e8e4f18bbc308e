"""What each rank spends its steps on, as a line of text or a bar for each rank."""

from __future__ import annotations

import html as markup
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvd_cluster.monitor.job_monitor import JobSteps
from hvd_cluster.monitor.step_clock import ACTIVITIES, LATE

#: No more ranks are drawn: those that wait least for others, because they are the ones that the others wait for.
_MAX_RANKS = 16
#: Activity -> colour and meaning, in the order of the bars. From the Okabe-Ito palette for colour-blind readers;
#: readable on white and on black.
_STYLES = {
    "compute": ("#0072B2", "forward and backward"),
    "optimizer": ("#56B4E9", "the optimizer"),
    "transfer": ("#CC79A7", "transferring between ranks"),
    "data": ("#E69F00", "waiting for data"),
    "save": ("#009E73", "saving"),
    "other": ("#999999", "code between the steps"),
    "late": ("#D55E00", "waiting for late ranks"),
}
#: Ranks that wait fade, so that the one they wait for stands out.
_FADED = {"late": ' fill-opacity="0.4"'}
#: Colours of the numbers in a bar.
_TEXT_COLOURS = {"compute": "#fff", "save": "#fff", "late": "currentColor"}
_LABEL_WIDTH, _BAR_WIDTH, _ROW_HEIGHT, _BAR_HEIGHT = 64, 496, 22, 16
#: What a newcomer may misunderstand.
_HINTS = {"late": " (waiting for late ranks)"}
_LEGEND_ROWS, _LEGEND_COLUMNS = 2, 4
#: The smallest share whose number fits into its part of a bar.
_MIN_LABELLED = 0.07


@dataclass(frozen=True)
class TimeShares:
    """The shares of the recent steps or of an epoch."""

    #: Activity -> share, the mean over all ranks.
    mean: Mapping[str, float]
    #: By rank, the same for the ranks that are shown.
    ranks: Mapping[int, Mapping[str, float]]
    #: Ranks of the job that are not shown.
    num_others: int = 0
    #: What slows the job down, as a sentence; may be empty.
    verdict: str = ""

    @classmethod
    def of_ranks(cls, shares: Mapping[int, Mapping[str, float]], verdict: str = "") -> TimeShares:
        """Show the ranks that wait least for others."""
        mean = {name: statistics.fmean(each[name] for each in shares.values()) for name in ACTIVITIES}
        shown = sorted(sorted(shares, key=lambda rank: shares[rank][ACTIVITIES[LATE]])[:_MAX_RANKS])
        return cls(mean, {rank: shares[rank] for rank in shown}, len(shares) - len(shown), verdict)

    @classmethod
    def of_job(cls, steps: JobSteps) -> TimeShares:
        """What the monitor knows of the recent steps."""
        return cls.of_ranks(steps.shares, steps.verdict)

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> TimeShares | None:
        """What an epoch's record says; None without that, or if no step was measured."""
        shares = dict(enumerate(record.get("time_share") or []))
        return cls.of_ranks(shares) if any(any(each.values()) for each in shares.values()) else None

    def to_fields(self) -> dict[str, Any]:
        """For a report, which is JSON."""
        return {
            "mean": _rounded(self.mean),
            "ranks": {str(rank): _rounded(each) for rank, each in self.ranks.items()},
            "num_others": self.num_others,
            "verdict": self.verdict,
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> TimeShares:
        """What :meth:`to_fields` returned."""
        ranks = {int(rank): each for rank, each in fields["ranks"].items()}
        return cls(fields["mean"], ranks, fields["num_others"], fields["verdict"])

    def text(self) -> str:
        """A line, e.g. "compute 61%, late 22%, data 17%. Rank 3 on node-b was last ..."."""
        parts = sorted(self.mean.items(), key=lambda item: -item[1])
        line = ", ".join(f"{name} {share:.0%}" for name, share in parts if share >= 0.005)
        return f"{line}. {self.verdict}" if self.verdict else line

    def svg(self) -> str:
        """A stacked bar per rank with a legend; its text has the surrounding colour."""
        rows = [_row(index, rank, each) for index, (rank, each) in enumerate(self.ranks.items())]
        height = len(rows) * _ROW_HEIGHT
        if self.num_others:
            text = f"and {self.num_others} ranks that wait longer for others"
            rows.append(f'<text x="{_LABEL_WIDTH}" y="{height + 14}" opacity="0.7">{text}</text>')
            height += _ROW_HEIGHT
        rows.append(self._legend(height + 8))
        width, height = _LABEL_WIDTH + _BAR_WIDTH, height + 8 + _LEGEND_ROWS * _ROW_HEIGHT
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            'role="img" aria-label="what each rank spends its steps on" fill="currentColor" font-family="sans-serif" '
            f'font-size="12" style="max-width: 100%">{"".join(rows)}</svg>'
        )

    def html(self, title: str) -> str:
        """The bars below a title, and the verdict below them."""
        parts = [f'<div style="margin: 6px 0 4px; opacity: 0.7">{markup.escape(title)}</div>{self.svg()}']
        if self.verdict:
            colour = _STYLES["late"][0]
            style = f"border-left: 3px solid {colour}; padding-left: 8px; margin: 6px 0; max-width: 552px"
            parts.append(f'<div style="{style}">{markup.escape(self.verdict)}</div>')
        return "".join(parts)

    def _legend(self, top: int) -> str:
        """The mean shares of all ranks, each beside its colour."""
        found = []
        for index, (name, (_, meaning)) in enumerate(_STYLES.items()):
            row, column = divmod(index, _LEGEND_COLUMNS)
            x, y = _LABEL_WIDTH + column * _BAR_WIDTH // _LEGEND_COLUMNS, top + row * _ROW_HEIGHT
            found.append(
                f'<g><title>{meaning}</title><rect x="{x}" y="{y + 2}" width="12" height="12" rx="2" {_fill(name)}/>'
                f'<text x="{x + 18}" y="{y + 12}">{name} {self.mean[name]:.0%}{_HINTS.get(name, "")}</text></g>'
            )
        return "".join(found)


def _row(index: int, rank: int, shares: Mapping[str, float]) -> str:
    """The bar of one rank."""
    top, x = index * _ROW_HEIGHT + 3, float(_LABEL_WIDTH)
    parts = [f'<text x="{_LABEL_WIDTH - 8}" y="{top + 12}" text-anchor="end">rank {rank}</text>']
    for name, (_, meaning) in _STYLES.items():
        width = shares[name] * _BAR_WIDTH
        if width < 0.5:
            continue
        parts.append(
            f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{_BAR_HEIGHT}" {_fill(name)}>'
            f"<title>rank {rank}: {meaning}, {shares[name]:.1%}</title></rect>"
        )
        if shares[name] >= _MIN_LABELLED:
            parts.append(
                f'<text x="{x + width / 2:.1f}" y="{top + 12}" text-anchor="middle" font-size="11" '
                f'fill="{_TEXT_COLOURS.get(name, "#000")}" pointer-events="none">{shares[name]:.0%}</text>'
            )
        x += width
    return "".join(parts)


def _fill(name: str) -> str:
    """The attributes of what is drawn in an activity's colour."""
    return f'fill="{_STYLES[name][0]}"{_FADED.get(name, "")}'


def _rounded(shares: Mapping[str, float]) -> dict[str, float]:
    return {name: round(share, 4) for name, share in shares.items()}
