"""The flags of ``hvdrun``; their names, forms and parsed names are Horovod's."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterable

from hvd_cluster.launch.cli.knobs import KEPT_ANYWAY, KNOBS, OBSOLETE, SWITCHES
from hvd_cluster.rendezvous.addresses import interface_names

_COUNT = "-np N is the number of workers, on all hosts together"
_LEAVE_OUT = "hvdrun does not use MPI: leave MPI's flags out"
#: A flag of mpirun or torchrun -> what to write instead.
_INSTEAD = {
    "-x": "hvdrun passes its environment to the workers: write NAME=value in front of the command",
    "-m": "hvdrun runs any program: write python -m MODULE",
    "--np": _COUNT,
    **dict.fromkeys(("--nproc_per_node", "--nproc-per-node", "--nnodes"), _COUNT),
    **dict.fromkeys(("--mca", "-mca", "--map-by", "-map-by", "--bind-to", "-bind-to"), _LEAVE_OUT),
    **dict.fromkeys(("--allow-run-as-root", "--oversubscribe"), _LEAVE_OUT),
}


def build_parser(prog: str, version: str) -> argparse.ArgumentParser:
    """The parser.

    Flags that are not given are None, so that a config file can set them.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} -np N [options] command [argument ...]",
        description="Run a command as N workers of one job, on this host or on several. "
        f"`{prog} timeline FILE` summarises a timeline.",
        allow_abbrev=False,
    )
    parser.set_defaults(notes=None)
    _add_basic(parser, version)
    _add_hosts(parser.add_argument_group("hosts"))
    _add_elastic(parser.add_argument_group("elastic jobs, which may lose and gain workers"))
    engine = parser.add_argument_group("the engine")
    for knob in KNOBS:
        engine.add_argument(
            knob.flag,
            dest=knob.dest,
            type=str.lower if knob.choices else knob.kind,
            metavar="|".join(knob.choices).upper() if knob.choices else "X",
            choices=knob.choices,
            help=knob.help,
        )
    for switch in SWITCHES:
        pair = engine.add_mutually_exclusive_group()
        pair.add_argument(switch.on, dest=switch.dest, action="store_true", default=None, help=switch.help)
        pair.add_argument(switch.off, dest=switch.dest, action="store_false", default=None, help=argparse.SUPPRESS)
    for flag in KEPT_ANYWAY:
        parser.add_argument(flag, action="store_true", dest="kept_anyway", help=argparse.SUPPRESS)
    for flag, (num_values, instead) in OBSOLETE.items():
        note = f"{flag} has no effect: {instead}"
        if num_values:
            kind = functools.partial(_note, note=note)
            parser.add_argument(flag, dest="notes", action="append", type=kind, help=argparse.SUPPRESS)
        else:
            parser.add_argument(flag, dest="notes", action="append_const", const=note, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    return parser


def unknown_text(flags: Iterable[str]) -> str:
    """The message about flags that do not exist.

    Some are those of mpirun and torchrun, which have other names here.
    """
    hints = dict.fromkeys(_INSTEAD[name] for flag in flags if (name := flag.partition("=")[0]) in _INSTEAD)
    return "; ".join([f"unrecognized arguments: {' '.join(flags)}", *hints])


def _note(_value: str, note: str) -> str:
    return note


def _add_basic(parser: argparse.ArgumentParser, version: str) -> None:
    add = parser.add_argument
    add("-v", "--version", action="version", version=version)
    add("-np", "--num-proc", dest="num_proc", type=int, metavar="N", help="number of workers")
    add("-cb", "--check-build", action="store_true", help="show what is built in and exit")
    add("--dry-run", action="store_true", help="show what would run where, and run nothing")
    add("--verbose", action="store_true", help="log what the launcher does")
    add("--config-file", metavar="YAML", help="a file that sets flags; the command line overrides it")
    add("--start-timeout", type=float, metavar="S", help="seconds for hosts and workers to respond")
    add(
        "--output-filename",
        metavar="DIR",
        help="also write each worker's output to DIR/rank.<rank>/stdout and .../stderr",
    )
    add(
        *("-prefix-timestamp", "--prefix-output-with-timestamp"),
        dest="prefix_output_with_timestamp",
        action="store_true",
        help="print the time before each line of output",
    )
    add("--as-horovod", action="store_true", help="make `import horovod` work in the workers, as horovodrun does")


def _add_hosts(group: argparse._ArgumentGroup) -> None:
    where = group.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", help="hosts and their slots, for example a:2,b:4; by default this host")
    where.add_argument("-hostfile", "--hostfile", metavar="FILE", help="a file with lines like: host slots=4")
    where.add_argument("--host-discovery-script", metavar="SCRIPT", help="prints host:slots per line; elastic")
    group.add_argument("-p", "--ssh-port", type=int, metavar="PORT", help="port of ssh on the other hosts")
    group.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh")
    group.add_argument(
        *("--network-interfaces", "--network-interface"),
        dest="nics",
        action="extend",
        type=interface_names,  # of a,b
        metavar="A,B",
        help="network interfaces to use; by default those through which the hosts reach each other",
    )


def _add_elastic(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--min-np", "--min-num-proc", dest="min_num_proc", type=int, metavar="N", help="the minimum number of workers")
    add("--max-np", "--max-num-proc", dest="max_num_proc", type=int, metavar="N", help="the maximum number of workers")
    add(
        "--slots-per-host",
        "--slots",
        dest="slots",
        type=int,
        metavar="N",
        help="slots of a host for which the hostfile or the script has no number",
    )
    add("--elastic-timeout", type=float, metavar="S", help="seconds to wait for enough slots")
    add("--reset-limit", type=int, metavar="N", help="how many times the workers may change")
    add(
        "--blacklist-cooldown-range",
        dest="cooldown_range",
        type=float,
        nargs=2,
        metavar=("MIN", "MAX"),
        help="seconds after which a failed host is used again; by default never",
    )
