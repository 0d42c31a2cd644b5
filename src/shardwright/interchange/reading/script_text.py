"""The text of a launch script that starts a program with torchrun, its arguments in named arrays; and a command line of
flags as settings, and back."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.config.cluster_facts import USUAL_NODE, node_devices
from shardwright.config.job import JobSpec

# Rendezvous of the nodes: the rank of this node, and the address and port of the first node.
RENDEZVOUS = (
    "NODE_RANK=${NODE_RANK:-0}",
    "MASTER_ADDR=${MASTER_ADDR:-localhost}",
    "MASTER_PORT=${MASTER_PORT:-6000}",
)


def torchrun_line(nodes: str, devices_per_node: str) -> str:
    """The command torchrun of a node, with the variables of RENDEZVOUS."""
    rendezvous = "--node_rank $NODE_RANK --master_addr $MASTER_ADDR --master_port $MASTER_PORT"
    return f"torchrun --nproc_per_node {devices_per_node} --nnodes {nodes} {rendezvous}"


def nodes_of(job: JobSpec) -> tuple[int, int]:
    """The number of nodes that a job takes, and of devices of each node."""
    world = job.plan.world
    devices_per_node = min(world, node_devices(job.cluster) or USUAL_NODE)
    while world % devices_per_node:
        devices_per_node -= 1
    return world // devices_per_node, devices_per_node


def script_text(
    job: JobSpec, system: str, program: str, sections: Mapping[str, Sequence[str]], exports: Mapping[str, str]
) -> str:
    """A bash script that starts `program` with the words of `sections` as its arguments. Its data is a placeholder."""
    nodes, devices_per_node = nodes_of(job)
    lines = [
        "#!/bin/bash",
        f"# {' '.join(job.name.split())}, for {system}, written by shardwright.",
        "set -euo pipefail",
        "",
        *(f"export {name}={value}" for name, value in exports.items()),
        f"GPUS_PER_NODE={devices_per_node}",
        f"NUM_NODES={nodes}",
        *RENDEZVOUS,
    ]
    for name, words in sections.items():
        lines += ["", f"{name}_ARGS=(", *(f"    {word}" for word in words), ")"]
    arrays = [f'    "${{{name}_ARGS[@]}}"' for name in sections]
    lines += [
        "",
        f"{torchrun_line('$NUM_NODES', '$GPUS_PER_NODE')} \\",
        f"    {program} \\",
        " \\\n".join(arrays),
    ]
    return "\n".join(lines) + "\n"


def settings_of(words: list[str]) -> dict[str, Any]:
    """The flags of a command with their values: a word, a list of words, or True if none. The last of a name counts."""
    settings: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            # A quoted element of an array is one word: "--fp8-format hybrid".
            name, blank, attached = name.partition(" ")
            name = name if name == "DDP-impl" else name.replace("_", "-")
            settings[name] = ([value] if equals else []) + (attached.split() if blank else [])
        elif name:
            settings[name].append(word)
    return {key: True if not values else values[0] if len(values) == 1 else values for key, values in settings.items()}


def flag_words(settings: dict[str, Any]) -> list[str]:
    """The lines of a command, one for each flag with its values."""
    lines = []
    for name, value in settings.items():
        if value is True:
            lines.append(f"--{name}")
        elif value is not False and value is not None:
            values = value if isinstance(value, list) else [value]
            lines.append(" ".join([f"--{name}", *(shlex.quote(value_word(item)) for item in values)]))
    return lines


def value_word(value: Any) -> str:
    """The text of a value as an argument."""
    return repr(value) if isinstance(value, float) else str(value)
