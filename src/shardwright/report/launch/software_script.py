"""A batch script for Slurm that starts a job with other software: it holds the files of the job, writes them into a
folder of its own, and starts their run.sh once on each node."""

import shlex
from collections.abc import Mapping

from shardwright.config.phrase import say
from shardwright.interchange.system import System
from shardwright.report.launch.launch_description import Launch
from shardwright.report.launch.slurm_script import container_options, directives, slurm_name

_END = "END_OF_FILE"

_CODE = """
# The code of %(title)s: where this script was written, or in CODE.
export CODE=${CODE:-%(folder)s}
if [ ! -f "$CODE/%(program)s" ]; then
    echo "no %(program)s in $CODE; set CODE to the folder of %(title)s, as sbatch --export=ALL,CODE=FOLDER" >&2
    exit 2
fi
"""

_NODES = """
# All nodes meet at the first one.
read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR MASTER_PORT=%(port)d FILES
"""

_RUN = """
# A task is a node, whose torchrun starts its ranks.
# shellcheck disable=SC2016 # what stands in single quotes is for the nodes
node='export NODE_RANK=$SLURM_NODEID; cd "$CODE" && exec bash "$FILES/run.sh"'
for ((run = 0; run <= %(restarts)d; run++)); do
    srun %(options)s bash -c "$node" && exit 0
    status=$?
    echo "run $run of at most %(restarts)d more ended with status $status" >&2
done
exit "$status"
"""


def software_script(launch: Launch, system: System, files: Mapping[str, str]) -> str:
    """The script of a launch, for sbatch, with the files of a system by name."""
    assert system.run_files is not None
    folder = launch.folder / f"{slurm_name(launch.job.name)}-{system.name}"
    fields = {"title": system.title, "program": system.run_files.program, "folder": shlex.quote(str(launch.folder))}
    lines = [
        "#!/bin/bash",
        f"# shardwright launch --for {system.name} --slurm: {launch.heading}",
        *(f"#SBATCH --{line}" for line in directives(launch, tasks_per_node=1)),
        (_CODE % fields).rstrip("\n"),
        "",
        f"FILES={shlex.quote(str(folder))}",
        'mkdir -p "$FILES" || exit 2',
        *(line for name, text in files.items() for line in _written(name, text)),
        (_NODES % {"port": launch.options.port}).rstrip("\n"),
        *(f"export {name}={shlex.quote(value)}" for name, value in launch.links.variables.items()),
        *(f"# export {unset.variable}={unset.value}  # {unset.meaning}" for unset in launch.links.placeholders),
    ]
    options = ["--distribution=block", "--cpu-bind=none", "--kill-on-bad-exit=1", *container_options(launch)]
    run = _RUN % {"restarts": launch.max_restarts, "options": " \\\n        ".join(options)}
    return "\n".join(lines) + "\n" + run


def software_notes(launch: Launch, system: System) -> list[str]:
    """Notes on what the script counts on."""
    assert system.run_files is not None
    program = system.run_files.program
    notes = list[str]()
    if not (launch.folder / program).is_file():
        notes.append(
            say(
                "the script starts {program} of {system}, which is not in {folder}; write the script in the folder of "
                "{system}, or start it with sbatch --export=ALL,CODE=FOLDER",
                program=program,
                system=system.title,
                folder=str(launch.folder),
            )
        )
    if launch.job.checkpoint.is_on:
        notes.append(
            say(
                "what follows a time limit is another sbatch of the same script: {system} goes on from the newest "
                "checkpoint",
                system=system.title,
            )
        )
    return notes


def _written(name: str, text: str) -> list[str]:
    """The lines that write a file. Words that look like variables stay as they are."""
    assert _END not in text
    return [f"cat > \"$FILES/{name}\" <<'{_END}' || exit 2", text.rstrip("\n"), _END]
