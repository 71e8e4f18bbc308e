"""Who fits a run of a store: one process at a time, as long as it lives.

A lease is one small file in the store's folder ``.leases``, which its holder writes again every two seconds with a
higher count. A holder of this machine lives as long as its process; any other one as long as the count goes up within
this process's own time. So no clocks are compared.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_cluster.data.store import Store
from hvd_cluster.data.writing import retention
from hvd_cluster.errors import RunInUseError

logger = logging.getLogger(__name__)

#: Seconds between two renewals.
_RENEWAL_S = 2.0
#: Seconds without a renewal after which another machine's lease of the same run has expired.
_EXPIRY_S = 10.0
#: The same before the data of another run's lease are removed, and how often that is looked at.
_SWEEP_EXPIRY_S, _SWEEP_S = 60.0, 30.0
_POLL_S = 0.1

_CLAIMED, _HELD = "claimed", "held"


@dataclass(frozen=True)
class Holder:
    """What a lease says of the process that holds it."""

    run_id: str
    host: str
    pid: int
    #: UTC, for people.
    since: str
    #: Identifies the running system, and the namespace of the pid; empty where that is not known.
    system: str
    #: When the process began, in ticks of that system.
    process_start: str
    state: str = _CLAIMED
    #: Number of renewals.
    count: int = 0

    @classmethod
    def here(cls, run_id: str) -> Holder:
        """This process."""
        now = dt.datetime.now(dt.timezone.utc)
        pid = os.getpid()
        return cls(run_id, socket.gethostname(), pid, f"{now:%Y-%m-%d %H:%M:%S} UTC", _system(), _start_of(pid) or "")

    @property
    def lives(self) -> bool | None:
        """Whether its process lives; None where only its renewals can tell."""
        if not self.system or self.system != _system():
            return None
        return _start_of(self.pid) == self.process_start

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}, since {self.since}"


class RunLease:
    """A context in which this process alone fits a run.

    The token of the lease is also the id of the data set that the fit writes: the next holder of any lease in the store
    removes the data of those that have expired.

    Args:
        store: where the run is kept.
        run_id: its name.
        exclusive: refuse a run that another lease is for.
        is_shared: other programs see the store; if not, nothing is written there.
        token: names the lease and the data set; None for a new one.

    Raises:
        RunInUseError: (on entering) another living process fits the run.
        OSError: (on entering) the store cannot be written.
    """

    def __init__(
        self, store: Store, run_id: str, *, exclusive: bool = True, is_shared: bool = True, token: str | None = None
    ) -> None:
        self.token = token or uuid.uuid4().hex
        self._store = store
        self._run_id = run_id
        self._exclusive = exclusive
        self._is_shared = is_shared
        self._folder = f"{store.prefix}/.leases"
        self._holder = Holder.here(run_id)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._is_lost = False
        #: By token: the count that was seen first, the one that was seen last, and since when by this process's clock.
        self._seen: dict[str, tuple[int, int, float]] = {}
        self._thread = threading.Thread(target=self._renew, name="hvd-run-lease", daemon=True)

    def __enter__(self) -> RunLease:
        if not self._is_shared:
            return self
        self._write()
        self._thread.start()
        try:
            if self._exclusive:
                self._wait_alone()
            self._write(state=_HELD)
        except BaseException:  # raised again: a claim that stays would keep others away
            self._release()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._is_shared:
            self._release()

    def require_held(self) -> None:
        """Raise where another process has taken the run over: this one did not renew its lease for too long.

        Raises:
            RunInUseError: so it is.
        """
        if self._is_lost:
            raise RunInUseError(
                f"run {self._run_id!r}: another fit has taken the run over, because this process did not renew its "
                f"lease in {self._store.prefix!r} for {_EXPIRY_S:g} s (it was stopped, or the store did not answer)"
            )

    def _wait_alone(self) -> None:
        """Return when no other living process claims or holds the run."""
        has_said = False
        while others := {
            token: each for token, each in self._others(own_run=True).items() if self._counts(token, each)
        }:
            for token, other in others.items():
                is_known_to_live = other.lives or self._has_renewed(token, other)
                # Of two claims the first by name stays; the other sees it, and goes.
                if is_known_to_live and (other.state == _HELD or token < self.token):
                    raise RunInUseError(
                        f"run_id={self._run_id!r} is being fitted by another program ({other}): wait for it, or choose "
                        "another run_id"
                    )
                if not is_known_to_live and not has_said:
                    has_said = True
                    logger.warning(
                        "run %r was begun by %s: waiting up to %g s for a sign that it still runs",
                        self._run_id,
                        other,
                        _EXPIRY_S,
                    )
            time.sleep(_POLL_S)

    def _counts(self, token: str, other: Holder) -> bool:
        """Whether a lease is to be respected; one that has expired is removed, with its data."""
        if other.lives is False or (other.lives is None and self._idle_s(token, other) > _EXPIRY_S):
            self._remove(token, other)
            return False
        return True

    def _has_renewed(self, token: str, other: Holder) -> bool:
        """Whether it was renewed since this process saw it first."""
        self._idle_s(token, other)
        return self._seen[token][0] != other.count

    def _idle_s(self, token: str, other: Holder) -> float:
        """Seconds, by this process's clock, in which it was not renewed."""
        now_s = time.monotonic()
        first, last, since_s = self._seen.get(token, (other.count, other.count, now_s))
        self._seen[token] = (first, other.count, since_s if last == other.count else now_s)
        return now_s - self._seen[token][2]

    def _others(self, *, own_run: bool) -> dict[str, Holder]:
        """The other leases by token: of this run, or all."""
        start = f"{_hash(self._run_id)}." if own_run else ""
        found = {}
        for path in self._store.list(self._folder):
            name = path.rsplit("/", 1)[-1]
            token = name.removesuffix(".json").partition(".")[2]
            if not name.endswith(".json") or not name.startswith(start) or token in {"", self.token}:
                continue
            with suppress(FileNotFoundError, ValueError, TypeError):  # it has ended meanwhile, or is of another version
                found[token] = Holder(**json.loads(self._store.read(f"{self._folder}/{name}")))
        return found

    def _path(self, token: str, run_id: str) -> str:
        return f"{self._folder}/{_hash(run_id)}.{token}.json"

    def _write(self, **changes: Any) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self._holder = dataclasses.replace(self._holder, count=self._holder.count + 1, **changes)
            content = json.dumps(dataclasses.asdict(self._holder))
            path = self._path(self.token, self._run_id)
            try:
                self._store.write(path, content)
            except FileNotFoundError:  # another fit has just removed the empty folder
                self._store.write(path, content)

    def _renew(self) -> None:
        """Runs in a thread: keeps the lease, and removes what those leave that have expired."""
        swept_s = -_SWEEP_S
        while True:
            try:
                if time.monotonic() - swept_s >= _SWEEP_S:
                    swept_s = time.monotonic()
                    self._sweep()
                if self._ended.wait(_RENEWAL_S):
                    return
                if self._holder.state == _HELD and not self._store.exists(self._path(self.token, self._run_id)):
                    self._is_lost = True
                    return
                self._write()
            except OSError as error:  # the store may answer the next time
                logger.warning("the lease of run %r cannot be renewed: %s", self._run_id, error)
                if self._ended.wait(_RENEWAL_S):
                    return

    def _sweep(self) -> None:
        for token, other in self._others(own_run=False).items():
            gone = other.lives is False or (other.lives is None and self._idle_s(token, other) > _SWEEP_EXPIRY_S)
            if gone:
                self._remove(token, other)

    def _remove(self, token: str, other: Holder) -> None:
        """Remove a lease whose holder is dead, after the data that it wrote."""
        removed = retention.remove(self._store, token)
        if removed:
            logger.info("removed %s, which %s has left", ", ".join(removed), other)
        self._store.delete(self._path(token, other.run_id))

    def _release(self) -> None:
        self._ended.set()
        self._thread.join()
        with self._lock, suppress(OSError):  # it expires
            if not self._is_lost:
                self._store.delete(self._path(self.token, self._run_id))
            if not self._store.list(self._folder):
                self._store.delete(self._folder)


def _hash(run_id: str) -> str:
    """A run's id in the form of a file name."""
    return hashlib.sha256(run_id.encode()).hexdigest()[:16]


def _system() -> str:
    """Identifies the system that runs, and the pids that this process sees; empty where there is no way to tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    """When a process of this system began; None where it has ended, or waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
