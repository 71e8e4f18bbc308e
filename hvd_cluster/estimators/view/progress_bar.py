"""The progress bar of a fit, driven by the reports of rank 0."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TextIO

from hvd_cluster.estimators.view.live_card import LiveCard
from hvd_cluster.estimators.view.time_shares import TimeShares


class FitProgressBar:
    """Bar of epoch, step, loss, metrics, samples/s, data wait share and what is slow.

    Uses tqdm if it is installed, else prints a line for each tenth of the fit. What the ranks spend their steps on is a
    second line in a terminal. A notebook shows a card instead. Call it with ``(rank, fields)`` from any thread;
    other fields than a fit's are ignored.
    """

    def __init__(self, label: str, enabled: bool = True, file: TextIO | None = None) -> None:
        self._label = label
        self._enabled = enabled
        self._file = file
        self._bar: Any = None
        #: The line below the bar, in a terminal.
        self._status: Any = None
        self._shares: TimeShares | None = None
        self._card = LiveCard.in_notebook(label) if enabled and file is None else None
        self._lock = threading.Lock()
        self._done = 0

    def __enter__(self) -> FitProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._enabled = False
            if self._card is not None:
                self._card.close("finished" if error is None else "failed")
            if self._status is not None:
                self._status.close()
            if self._bar is not None:
                self._bar.close()
                if self._shares is not None:
                    file = self._file or sys.stderr
                    file.write(f"{self._label}: {self._shares.text()}\n")

    def show_epoch(self, record: dict[str, Any]) -> None:
        """An epoch has ended; from any thread."""
        with self._lock:
            if not self._enabled:
                return
            if self._shares is None or not self._shares.verdict:
                self._shares = TimeShares.of_record(record) or self._shares
            if self._card is not None:
                self._card.show_epoch(record)

    def say(self, text: Callable[[], str]) -> None:
        """Show a line of text. If the bar is disabled, ``text`` is not called."""
        if self._enabled:
            file = self._file or sys.stderr
            file.write(f"{text()}\n")
            file.flush()

    def __call__(self, rank: int, fields: dict[str, Any]) -> None:
        if rank != 0 or not {"epoch", "epochs", "step", "steps", "loss"} <= fields.keys():
            return
        with self._lock:
            if self._enabled:
                self._show(fields)

    def _show(self, fields: dict[str, Any]) -> None:
        live = TimeShares.from_fields(fields["time_shares"]) if "time_shares" in fields else None
        self._shares = live or self._shares
        if self._shares is not None:  # they say it of all ranks, and of the recent steps
            fields = {name: value for name, value in fields.items() if name != "data_wait_share"}
        if self._card is not None:
            self._card.show_step(fields, _text(fields), live)
            return
        steps = fields["steps"]
        done = fields["epoch"] * steps + fields["step"]
        if self._bar is None:
            self._bar = _new_bar(self._label, fields["epochs"] * steps, done - 1, self._file)
            self._done = done - 1
        has_lines = isinstance(self._bar, _Lines)
        text = f"{_text(fields)}; {live.text()}" if has_lines and live is not None else _text(fields)
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(max(0, done - self._done))
        self._done = max(self._done, done)
        if live is not None and not has_lines:
            if self._status is None:
                self._status = _new_status(self._file or sys.stderr)
            self._status.set_description_str(live.text())


def _text(fields: Mapping[str, Any]) -> str:
    """The text after the bar."""
    parts = [f"epoch {fields['epoch'] + 1}/{fields['epochs']}", f"loss {fields['loss']:.4g}"]
    parts += [f"{name} {value:.4g}" for name, value in (fields.get("metrics") or {}).items()]
    if fields.get("samples_per_s") is not None:
        parts.append(f"{fields['samples_per_s']:,.0f} samples/s")
    if fields.get("data_wait_share") is not None:
        parts.append(f"{fields['data_wait_share']:.0%} waiting for data")
    return ", ".join(parts)


def _new_bar(label: str, total: int, initial: int, file: TextIO | None) -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return _Lines(label, total, initial, file or sys.stderr)
    return tqdm(desc=label, total=total, initial=initial, unit="step", file=file, dynamic_ncols=True, mininterval=0.2)


def _new_status(file: TextIO) -> Any:
    """The line below the bar; in a file, where lines cannot be replaced, nothing."""
    from tqdm.auto import tqdm

    return tqdm(
        total=0, position=1, bar_format="{desc}", leave=False, file=file, disable=not file.isatty(), dynamic_ncols=True
    )


class _Lines:
    """The part of tqdm's interface used here; prints a line per tenth of the work."""

    def __init__(self, label: str, total: int, initial: int, file: TextIO) -> None:
        self._label = label
        self._total = total
        self._done = initial
        self._file = file
        self._text = ""

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        self._text = text

    def update(self, steps: int) -> None:
        tenth = 10 * self._done // self._total
        self._done += steps
        if 10 * self._done // self._total > tenth:
            self._file.write(f"{self._label}: step {self._done}/{self._total}, {self._text}\n")

    def close(self) -> None:
        self._file.flush()
