"""torchrun's command line, which is the same on every node: its agents meet on the first one, and number the nodes."""

import shlex
from collections.abc import Sequence

from shardwright.report.launch.launch_description import QUOTED, Launch

FIRST_NODE = "FIRST_NODE"


def torchrun_words(launch: Launch, meeting: Sequence[str], train: Sequence[str]) -> list[str]:
    """torchrun and its options, then the words of `train`; `meeting` says where the agents of several nodes meet."""
    seats = launch.seats
    least = f"{seats.least_servers}:" if seats.least_servers < seats.servers else ""
    nodes = [f"--nnodes={least}{seats.servers}", *meeting] if seats.servers > 1 else ["--standalone"]
    ranks = f"--nproc-per-node={seats.ranks_per_server}"
    options = [*nodes, ranks, f"--max-restarts={launch.max_restarts}"]
    return ["torchrun", *options, "-m", "shardwright", "train", *train]


def torchrun_variables(launch: Launch) -> dict[str, str]:
    """Variables that torchrun and its ranks want: links, and how long ranks may take to leave after SIGTERM."""
    leaving = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(launch.save_s)} if launch.save_s else {}
    return launch.links.variables | leaving


def torchrun_command(launch: Launch) -> str:
    """The command line of every node, behind lines that say where it is given."""
    first = launch.options.first_node or FIRST_NODE
    meeting = [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={first}:{launch.options.port}",
        f"--rdzv-id={launch.job.name}",
    ]
    variables = [f"{name}={shlex.quote(value)}" for name, value in torchrun_variables(launch).items()]
    lines = [
        "#!/bin/bash",
        f"# shardwright launch --torchrun: {launch.heading}",
        QUOTED,
        f"# {_where(launch, first)}",
        *(f"# May stand in front: {left.variable}={left.value}, {left.meaning}" for left in launch.links.placeholders),
        " ".join([*variables, shlex.join(torchrun_words(launch, meeting, launch.words))]),
    ]
    return "\n".join(lines) + "\n"


def _where(launch: Launch, first: str) -> str:
    seats, folder = launch.seats, repr(str(launch.folder))  # on one line
    if seats.servers == 1:
        return f"Give this in {folder}."
    named = "the name of the first one, by which the others reach it" if first == FIRST_NODE else "the first one"
    return f"Give this on each of the {seats.servers} servers, in {folder}; {first} is {named}."


def torchrun_notes(launch: Launch) -> list[str]:
    """A note about the placeholder for the first node's name, if nobody stated the name."""
    if launch.seats.servers == 1 or launch.options.first_node:
        return []
    return [f"{FIRST_NODE} stands for the name or address of the first node; --first-node says it"]
