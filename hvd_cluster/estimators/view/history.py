"""The history of a fit as a table, a plot, and the card of a model in a notebook."""

from __future__ import annotations

import html as markup
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hvd_cluster.data.optional import load_extra
from hvd_cluster.estimators.view.time_shares import TimeShares

_WIDTH, _HEIGHT, _MARGIN = 360, 140, 8
#: No more hosts and ranks are listed.
_MAX_HOSTS, _MAX_RANKS = 8, 16
#: Positive losses whose largest is more than this many times the smallest are drawn on a logarithmic scale.
_MAX_LINEAR = 50
#: Part of the history -> colour of its curve, from the Okabe-Ito palette for colour-blind readers.
_COLOURS = {"train": "#0072B2", "validation": "#D55E00"}


def rows(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A flat dict of numbers for each epoch, by name.

    The names are ``epoch``, ``train_loss``, ``validation_loss``, ``train_<metric>``, ..., ``samples_per_s`` (all ranks
    together), ``data_wait_share`` and ``seconds`` (the largest of the ranks), ``left_out_rows`` and
    ``validation_left_out_rows`` if rows on which ``preprocess`` fails are left out, and ``time_share_<activity>`` (the
    mean over the ranks).
    """
    found = []
    for record in records:
        row: dict[str, Any] = {"epoch": record["epoch"]}
        for part in ("train", "validation"):
            row.update({f"{part}_{name}": value for name, value in flat(record.get(part, {})).items()})
        if "samples_per_s" in record:
            row["samples_per_s"] = sum(record["samples_per_s"])
            row["data_wait_share"] = max(record["data_wait_share"])
            row["seconds"] = record["seconds"]
        row |= {name: record[name] for name in ("left_out_rows", "validation_left_out_rows") if name in record}
        if (shares := TimeShares.of_record(record)) is not None:
            row.update({f"time_share_{name}": share for name, share in shares.mean.items()})
        found.append(row)
    return found


def flat(part: dict[str, Any]) -> dict[str, float]:
    """The loss and metrics of a record's "train" or "validation" part, by name."""
    found = {"loss": part["loss"]} if "loss" in part else {}
    for group in part.get("all_metrics", []):
        found.update(group)
    return found


def frame(records: Sequence[dict[str, Any]]) -> Any:
    """The same as a pandas DataFrame, one row for each epoch.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    pandas = load_extra("pandas", "data", "to show the history as a table; getHistory() gives plain lists")
    return pandas.DataFrame(rows(records))


def plot(records: Sequence[dict[str, Any]], ax: Any = None) -> Any:
    """Draw the training and validation loss over the epochs; returns the axes.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    if ax is None:
        _, ax = load_extra("matplotlib.pyplot", "plot", "to draw the history").subplots()
        ax.locator_params("x", integer=True)
    table = rows(records)
    for part in ("train", "validation"):
        points = [(row["epoch"], row[f"{part}_loss"]) for row in table if f"{part}_loss" in row]
        if points:
            ax.plot(*zip(*points, strict=True), marker="o", label=part)
    ax.set_xlabel("epoch")
    ax.set_ylabel("loss")
    if table:
        ax.legend()
    return ax


def card(kind: str, run_id: str | None, records: Sequence[dict[str, Any]]) -> str:
    """The HTML of the card.

    Args:
        kind: the model's class.
        run_id: the run that made it.
        records: the history as it was recorded.
    """
    table = rows(records)
    parts = [f"<b>{markup.escape(kind)}</b>" + (f" of run {markup.escape(run_id)}" if run_id else "")]
    if table:
        last = ", ".join(
            f"{markup.escape(name)} {value:.4g}"
            for name, value in table[-1].items()
            if name.startswith(("train_", "validation_"))
        )
        parts += [f"{len(table)} epoch{'s'[: len(table) - 1]}; last: {last}", _curves(table)]
        shares = TimeShares.of_record(records[-1])
        if shares is not None:
            parts.append(shares.html("What each rank spent its steps on in the last epoch"))
        parts += [_speeds(records[-1]), markup.escape(usage_text(records[-1]))]
    return '<div style="font-family: sans-serif">' + "<br>".join(part for part in parts if part) + "</div>"


def usage_text(record: Mapping[str, Any]) -> str:
    """How busy hosts were in an epoch, e.g. "node-a: CPU 93%"; "" if that is unknown."""
    return "; ".join(
        f"{host}: " + ", ".join(f"{_usage_name(name)} {value:.0f}%" for name, value in numbers.items())
        for host, numbers in list(record.get("node_usage", {}).items())[:_MAX_HOSTS]
    )


def _usage_name(name: str) -> str:
    words = name.removesuffix("_percent").replace("_", " ")
    return words.replace("cpu", "CPU").replace("gpu", "GPU ")


def _curves(table: Sequence[dict[str, Any]]) -> str:
    """The losses over the epochs as an inline SVG."""
    losses = {
        part: [(row["epoch"], row[f"{part}_loss"]) for row in table if math.isfinite(row.get(f"{part}_loss", math.nan))]
        for part in _COLOURS
    }
    points = [point for line in losses.values() for point in line]
    if not points:
        return ""
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    is_logarithmic = 0 < low < high / _MAX_LINEAR
    scale = math.log if is_logarithmic else float
    bottom, top = scale(low), scale(high)

    def place(x: float, y: float) -> str:
        across = _MARGIN + (x - first) / max(last - first, 1) * (_WIDTH - 2 * _MARGIN)
        down = _MARGIN + (top - scale(y)) / ((top - bottom) or 1.0) * (_HEIGHT - 2 * _MARGIN)
        return f"{across:.1f},{down:.1f}"

    lines = [
        f'<polyline fill="none" stroke="{_COLOURS[part]}" stroke-width="2" '
        f'points="{" ".join(place(x, y) for x, y in line)}"><title>{part} loss</title></polyline>'
        for part, line in losses.items()
        if line
    ]
    legend = " ".join(
        f'<span style="color: {_COLOURS[part]}">&#9644; {part} loss</span>' for part, line in losses.items() if line
    )
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="loss over the epochs">{"".join(lines)}</svg>'
        f"<br>{legend} (between {low:.4g} and {high:.4g}{', logarithmic' if is_logarithmic else ''})"
    )


def _speeds(record: dict[str, Any]) -> str:
    """Each rank's samples per second and share of waiting for data in the last epoch."""
    if not record.get("samples_per_s"):
        return ""
    cells = "".join(
        f"<tr><td>{rank}</td><td>{rate:,.0f}</td><td>{wait:.0%}</td></tr>"
        for rank, (rate, wait) in list(enumerate(zip(record["samples_per_s"], record["data_wait_share"], strict=True)))[
            :_MAX_RANKS
        ]
    )
    if (num_others := len(record["samples_per_s"]) - _MAX_RANKS) > 0:
        cells += f'<tr><td colspan="3">and {num_others} ranks more</td></tr>'
    return f"<table><tr><th>rank</th><th>samples/s</th><th>waits for data</th></tr>{cells}</table>"
