"""torchrun's command line, the same on every node: its agents meet on the first node, and number the nodes."""

import shlex
from collections.abc import Sequence

from shardwright.config.phrase import say
from shardwright.report.launch.launch_description import QUOTED, Launch

FIRST_NODE = "FIRST_NODE"


def torchrun_words(launch: Launch, rendezvous: Sequence[str], train: Sequence[str]) -> list[str]:
    """torchrun and its options, then the arguments of `train`. `rendezvous` are options by which several nodes meet."""
    layout = launch.layout
    least_nodes = f"{layout.least_servers}:" if layout.least_servers < layout.servers else ""
    nodes = [f"--nnodes={least_nodes}{layout.servers}", *rendezvous] if layout.servers > 1 else ["--standalone"]
    ranks = f"--nproc-per-node={layout.ranks_per_server}"
    options = [*nodes, ranks, f"--max-restarts={launch.max_restarts}"]
    return ["torchrun", *options, "-m", "shardwright", "train", *train]


def torchrun_variables(launch: Launch) -> dict[str, str]:
    """Variables for torchrun and its ranks: links, and the time that ranks have to leave after SIGTERM."""
    shutdown = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(launch.save_s)} if launch.save_s else {}
    return launch.links.variables | shutdown


def torchrun_command(launch: Launch) -> str:
    """The command line of every node, behind comments that say on which nodes and in which folder to give it."""
    first_node = launch.options.first_node or FIRST_NODE
    rendezvous = [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={first_node}:{launch.options.port}",
        f"--rdzv-id={launch.job.name}",
    ]
    variables = [f"{name}={shlex.quote(value)}" for name, value in torchrun_variables(launch).items()]
    lines = [
        "#!/bin/bash",
        f"# shardwright launch --torchrun: {launch.heading}",
        QUOTED,
        f"# {_usage(launch, first_node)}",
        *(
            f"# May stand in front: {unset.variable}={unset.value}, {unset.meaning}"
            for unset in launch.links.placeholders
        ),
        " ".join([*variables, shlex.join(torchrun_words(launch, rendezvous, launch.words))]),
    ]
    return "\n".join(lines) + "\n"


def _usage(launch: Launch, first_node: str) -> str:
    layout, folder = launch.layout, repr(str(launch.folder))  # on one line
    if layout.servers == 1:
        return f"Give this in {folder}."
    meaning = "the name of the first one, by which the others reach it" if first_node == FIRST_NODE else "the first one"
    return f"Give this on each of the {layout.servers} servers, in {folder}; {first_node} is {meaning}."


def torchrun_notes(launch: Launch) -> list[str]:
    """A note about the placeholder for the first node's name, if nobody stated the name."""
    if launch.layout.servers == 1 or launch.options.first_node:
        return []
    return [
        say(
            "{first_node} stands for the name or address of the first node; --first-node says it", first_node=FIRST_NODE
        )
    ]
