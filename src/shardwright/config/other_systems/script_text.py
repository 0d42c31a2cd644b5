"""The text of a launch script that starts a program with torchrun, its arguments in named arrays."""

from collections.abc import Mapping, Sequence

from shardwright.config.job import JobSpec
from shardwright.config.usual_links import USUAL_NODE, node_devices

# How nodes find each other: each says its number, and the address of the first one.
MEETING = (
    "NODE_RANK=${NODE_RANK:-0}", "MASTER_ADDR=${MASTER_ADDR:-localhost}", "MASTER_PORT=${MASTER_PORT:-6000}",
)  # fmt: skip


def torchrun_line(nodes: str, each: str) -> str:
    """torchrun on each of some nodes, as variables of MEETING say."""
    where = "--node_rank $NODE_RANK --master_addr $MASTER_ADDR --master_port $MASTER_PORT"
    return f"torchrun --nproc_per_node {each} --nnodes {nodes} {where}"


def nodes_of(job: JobSpec) -> tuple[int, int]:
    """Nodes, and devices of each."""
    world = job.plan.world
    each = min(world, node_devices(job.cluster) or USUAL_NODE)
    while world % each:
        each -= 1
    return world // each, each


def script_text(
    job: JobSpec, system: str, program: str, sections: Mapping[str, Sequence[str]], exports: Mapping[str, str]
) -> str:  # fmt: skip
    """A script for bash. Its data is made up: what trains is to be put in its place."""
    nodes, each = nodes_of(job)
    lines = [
        "#!/bin/bash",
        f"# {' '.join(job.name.split())}, for {system}, written by shardwright.",
        "set -euo pipefail",
        "",
        *(f"export {name}={value}" for name, value in exports.items()),
        f"GPUS_PER_NODE={each}",
        f"NUM_NODES={nodes}",
        *MEETING,
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
