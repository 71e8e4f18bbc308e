"""A lease on a run of a store: only one living process at a time may fit it.

A lease is a small file in the store's folder ``.leases``. Its holder renews it every two seconds, with a higher count.
A holder on this machine is alive while its process is; any other holder while its count keeps growing, by the clock of
the process that watches it. The clocks of machines are never compared.
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
#: The same for leases of other runs, after which their data is removed; and seconds between two checks for them.
_SWEEP_EXPIRY_S, _SWEEP_S = 60.0, 30.0
_POLL_S = 0.1
_MAX_READS = 10

_CLAIMED, _HELD = "claimed", "held"


@dataclass(frozen=True)
class Holder:
    """The process that holds a lease, as its file describes it."""

    run_id: str
    host: str
    pid: int
    #: UTC, for messages.
    since: str
    #: Identifies the running system and the namespace of the pid; empty if unknown.
    system: str
    #: When the process started, in clock ticks of that system.
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
    def is_alive(self) -> bool | None:
        """Whether its process is alive; None if only its renewals can show that."""
        if not self.system or self.system != _system():
            return None
        return _start_of(self.pid) == self.process_start

    @property
    def is_here(self) -> bool:
        """Whether it is this process."""
        return self.pid == os.getpid() and self.is_alive is True

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}, since {self.since}"


class RunLease:
    """A context in which only this process fits a run.

    The token of the lease is also the id of the data set that the fit writes: holders of other leases in the store
    remove the data of leases that have expired.

    Args:
        store: where the run is kept.
        run_id: its name.
        exclusive: refuse a run that has another lease.
        is_shared: other programs see the store; if not, no lease is written.
        token: name of the lease and the data set; None for a new one.

    Raises:
        RunInUseError: (on entering) another living process is fitting the run.
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
        #: By token: the first count seen, the last one, and since when by this process's clock.
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
        except BaseException:  # raised again: a claim left behind would block other fits
            self._release()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._is_shared:
            self._release()

    def require_held(self) -> None:
        """Check that this process still holds the run.

        Raises:
            RunInUseError: another process has taken the run over, since this one did not renew its lease for too long.
        """
        if self._is_lost:
            raise RunInUseError(
                f"run {self._run_id!r}: another fit has taken the run over, because this process did not renew its "
                f"lease in {self._store.prefix!r} for {_EXPIRY_S:g} s (it was suspended, or the store did not respond)"
            )

    def _wait_alone(self) -> None:
        """Return when no other living process claims or holds the run."""
        has_warned = False
        while others := {
            token: each for token, each in self._others(own_run=True).items() if self._is_valid(token, each)
        }:
            for token, other in others.items():
                is_known_alive = other.is_alive or self._has_renewed(token, other)
                # Of two claims the first by name wins; the other process sees it and gives up.
                if is_known_alive and (other.state == _HELD or token < self.token):
                    who = "another fit of this program" if other.is_here else "another program"
                    raise RunInUseError(
                        f"run_id={self._run_id!r} is being fitted by {who} ({other}): wait for it, or choose another "
                        "run_id"
                    )
                if not is_known_alive and not has_warned:
                    has_warned = True
                    logger.warning(
                        "run %r was started by %s: waiting up to %g s to see whether that is still running",
                        self._run_id,
                        other,
                        _EXPIRY_S,
                    )
            time.sleep(_POLL_S)

    def _is_valid(self, token: str, other: Holder) -> bool:
        """Whether a lease is still held. An expired one is removed, with its data."""
        if self._has_expired(token, other, _EXPIRY_S):
            self._remove(token, other)
            return False
        return True

    def _has_expired(self, token: str, other: Holder, expiry_s: float) -> bool:
        is_alive = other.is_alive
        return is_alive is False or (is_alive is None and self._idle_s(token, other) > expiry_s)

    def _has_renewed(self, token: str, other: Holder) -> bool:
        """Whether it was renewed since this process first saw it."""
        self._idle_s(token, other)
        return self._seen[token][0] != other.count

    def _idle_s(self, token: str, other: Holder) -> float:
        """Seconds since its last renewal, by this process's clock."""
        now_s = time.monotonic()
        first, last, since_s = self._seen.get(token, (other.count, other.count, now_s))
        self._seen[token] = (first, other.count, since_s if last == other.count else now_s)
        return now_s - self._seen[token][2]

    def _others(self, *, own_run: bool) -> dict[str, Holder]:
        """The other leases of this run, or of all runs, by token."""
        start = f"{_hash(self._run_id)}." if own_run else ""
        found = {}
        for path in self._store.list(self._folder):
            name = path.rsplit("/", 1)[-1]
            token = name.removesuffix(".json").partition(".")[2]
            if not name.endswith(".json") or not name.startswith(start) or token in {"", self.token}:
                continue
            holder = self._read(f"{self._folder}/{name}")
            if holder is not None:
                found[token] = holder
        return found

    def _read(self, path: str) -> Holder | None:
        """The holder of a lease; None if it was released or is of another version.

        Not every store writes a file in one step, so half of a lease is read again for a second.
        """
        for _ in range(_MAX_READS):
            try:
                return Holder(**json.loads(self._store.read(path)))
            except ValueError:
                time.sleep(_POLL_S)
            except (FileNotFoundError, TypeError):
                break
        return None

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
        """The thread: renews the lease, and removes expired ones with their data."""
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
            except OSError as error:  # the store may respond next time
                logger.warning("the lease of run %r cannot be renewed: %s", self._run_id, error)
                if self._ended.wait(_RENEWAL_S):
                    return

    def _sweep(self) -> None:
        for token, other in self._others(own_run=False).items():
            if self._has_expired(token, other, _SWEEP_EXPIRY_S):
                self._remove(token, other)

    def _remove(self, token: str, other: Holder) -> None:
        """Remove the data that a dead holder wrote, then its lease."""
        removed = retention.remove(self._store, token)
        if removed:
            logger.info("removed %s, left behind by %s", ", ".join(removed), other)
        self._store.delete(self._path(token, other.run_id))

    def _release(self) -> None:
        self._ended.set()
        self._thread.join()
        with self._lock, suppress(OSError):  # the lease expires
            if not self._is_lost:
                self._store.delete(self._path(self.token, self._run_id))
            if not self._store.list(self._folder):
                self._store.delete(self._folder)


def _hash(run_id: str) -> str:
    """A run's id as a file name."""
    return hashlib.sha256(run_id.encode()).hexdigest()[:16]


def _system() -> str:
    """Identify the running system and this process's pid namespace; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    """When a process of this system started; None if it has ended or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
