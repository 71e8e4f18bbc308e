"""``hvdrun -np 2 python train.py``: entry point, exit codes, failure report."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from hvd_cluster.errors import LaunchError
from hvd_cluster.launch.cli.build import check_build
from hvd_cluster.launch.cli.config import apply_config
from hvd_cluster.launch.cli.parser import build_parser, unknown_text
from hvd_cluster.launch.cli.plan import LaunchPlan, describe, make_plan
from hvd_cluster.launch.job import run_job
from hvd_cluster.launch.logs import LinePrinter, Tracebacks, also_written
from hvd_cluster.launch.outcome import Outcome, ends_in_peer_loss, failure_text, first_failure, ranges
from hvd_cluster.launch.spec import ElasticSpec
from hvd_cluster.launch.ssh.fleet import SshFleet
from hvd_cluster.launch.worker_group import Callbacks
from hvd_cluster.oldpaths.table import HOROVOD_VERSION
from hvd_cluster.topology import inherited_env
from hvd_cluster.version import __version__

logger = logging.getLogger(__name__)

_USAGE_ERROR = 2


class _Stopped(BaseException):
    """A signal asked the launcher to end.

    Not an Exception, so that no handler mistakes it for a failure.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    It is 0, that of the worker that failed first, or 128 plus a signal.
    """
    as_horovod = Path(sys.argv[0]).name == "horovodrun"
    prog = "horovodrun" if as_horovod else "hvdrun"
    if arguments is None:
        arguments = sys.argv[1:]
    if list(arguments[:1]) == ["timeline"]:
        from hvd_cluster.launch.cli import timeline

        return timeline.main(arguments[1:], prog=prog)
    parsed = parse_args(arguments, prog=prog)
    if parsed.check_build:
        check_build()
        return 0
    if parsed.verbose:
        logging.basicConfig(level=logging.INFO, format="hvdrun: %(message)s")
    try:
        if parsed.config_file is not None:
            apply_config(parsed, parsed.config_file)
        plan = make_plan(parsed, inherited_env(), as_horovod=as_horovod or parsed.as_horovod)
        for note in plan.notes:
            print(f"{prog}: {note}", file=sys.stderr)
        if parsed.dry_run:
            print(describe(plan.spec), end="")
            return 0
        with _signals_raise():
            return execute(plan, parsed)
    except (ValueError, LaunchError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return _USAGE_ERROR
    except _Stopped as stopped:
        print(f"hvdrun: ended by {signal.Signals(stopped.number).name}; all workers are stopped", file=sys.stderr)
        return 128 + stopped.number


def parse_args(arguments: Sequence[str] | None = None, *, prog: str = "hvdrun") -> argparse.Namespace:
    """The flags and the command; exits with a message and code 2 if they are invalid."""
    version = HOROVOD_VERSION if prog == "horovodrun" else __version__
    parser = build_parser(prog, version)
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(unknown_text(unknown))
    if parsed.command[:1] == ["--"]:
        del parsed.command[0]
    if not parsed.check_build and not parsed.command:
        parser.error("the command to run is missing")
    return parsed


def execute(plan: LaunchPlan, parsed: argparse.Namespace) -> int:
    """Run a plan, show its output, and return the exit code; see :func:`main`."""
    spec, folder = plan.spec, parsed.output_filename
    max_num_proc = (spec.max_num_proc or spec.num_proc) if isinstance(spec, ElasticSpec) else spec.num_proc
    with contextlib.ExitStack() as stack:
        printer = LinePrinter(with_timestamp=parsed.prefix_output_with_timestamp)
        tracebacks = stack.enter_context(contextlib.closing(Tracebacks(printer)))
        try:
            on_line = stack.enter_context(also_written(tracebacks, folder, max_num_proc))
        except OSError as error:
            raise ValueError(f"--output-filename={folder} cannot be written: {error.strerror}") from error
        shown: set[int] = set()

        def on_failure(failed: Outcome) -> None:
            shown.update(_show_tracebacks(failed, range(spec.num_proc), tracebacks))
            logger.info("rank %d %s: the other ranks must end too", failed.rank, failed.ending())

        outcomes = run_job(spec, SshFleet.of(spec), Callbacks(on_line=on_line), on_failure)
        failed = first_failure(outcomes)
        if failed is None:
            return 0
        shown.update(_show_tracebacks(failed, [outcome.rank for outcome in outcomes], tracebacks))
        _report_end(failed, outcomes, folder, shows_output=failed.rank not in shown)
    return exit_code_of(failed)


def exit_code_of(failed: Outcome) -> int:
    """The launcher's exit code for a failed worker.

    It is the worker's own, or 128 plus the signal, as in shells.
    """
    code = failed.exit_code or 1  # None if its host was lost
    return code if code > 0 else 128 - code


def _show_tracebacks(failed: Outcome, ranks: Iterable[int], tracebacks: Tracebacks) -> Iterator[int]:
    """Show what has ended ranks, each text once and the cause first; yield the ranks.

    A rank whose interpreter does not exit is stopped in the end, but may have written the cause.
    """
    others = [rank for rank in ranks if rank != failed.rank]
    for group, text in sorted(tracebacks.take([failed.rank, *others]), key=lambda taken: ends_in_peer_loss(taken[1])):
        if failed.rank in group or not ends_in_peer_loss(text):
            print(f"[Rank {ranges(group)}]:\n{text}\n", file=sys.stderr, flush=True)
            yield from group


def _report_end(failed: Outcome, outcomes: Sequence[Outcome], folder: str | None, *, shows_output: bool) -> None:
    """Show how the ranks ended."""
    ended, _, output = failure_text(failed, outcomes).partition("\n\n")
    parts = [ended]
    parts.append(
        f"Process {failed.rank} exit with status code {failed.exit_code}.\n"
        f"Terminating remaining workers after failure of Process {failed.rank}.\n"
        "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
        f"terminated. The first process to do so was:\nProcess name: [{failed.rank}]\nExit code: {failed.exit_code}"
    )
    if output and shows_output:
        parts.append(output)
    where = f"\nIts complete output is under {folder}." if folder else ""
    print("\n\n".join(parts) + where, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into an exception.

    So the workers are stopped on the way out. A signal that this process was started to ignore stays ignored: SIGHUP
    under ``nohup``, SIGINT in the background of a shell script. But if SIGCHLD were, as some daemons leave it, the
    kernel would drop the workers' exit codes.
    """

    def stop(number: int, _frame: FrameType | None) -> None:
        raise _Stopped(number)

    handled = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    previous = {number: signal.signal(number, stop) for number in handled}
    previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
