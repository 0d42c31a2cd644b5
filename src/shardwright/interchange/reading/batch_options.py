"""The size of a job in options of batch systems: of Slurm's sbatch and srun, of PBS's qsub, of LSF's bsub, and of UGE.

A script with such lines runs as a job of the batch system, which sets variables for it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from shardwright.config.fault_gathering_reader import whole

# Slurm's options for the size of a job -> the variables that Slurm sets from them.
_SLURM: Mapping[str, tuple[str, ...]] = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "gpus": ("SLURM_GPUS",),
}
_SHORT_OPTIONS = {"-N": "nodes", "-n": "ntasks", "-G": "gpus"}
# Variables that are set in each job, whatever its size.
_OF_SLURM = {"SLURM_JOB_ID": "1", "SLURM_JOBID": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
_OF_PBS = {"PBS_JOBID": "1", "PBS_ENVIRONMENT": "PBS_BATCH"}
_OF_LSF = {"LSB_JOBID": "1", "LSB_JOBINDEX": "0"}
# LSF's options -> Slurm's names: GPUs are those of a node (lsf "bsub -gpu"), slots are shared out by ptile.
_LSF_SIZES = {
    r"-nnodes[ \t]+(\d{1,9})": "nodes",
    r"-gpu\b[^#\n]*?\bnum=(\d{1,9})(?!/task)": "gpus-per-node",
    r"-n[ \t]+(\d{1,9})": "slots",
    r"\bptile=(\d{1,9})": "slots-per-node",
}
_FULL_NODES = re.compile(
    r"-l[ \t]+(?:\S*,)?rt_F=(\d{1,9})\b"
)  # UGE on ABCI: whole nodes (docs.abci.ai, "Resource Types")
_OF_UGE = {"JOB_ID": "1", "NSLOTS": "1"}
_PBS_SIZES = {
    "select": "nodes",
    "nodes": "nodes",
    "ngpus": "gpus-per-node",
    "gpus": "gpus-per-node",
    "mpiprocs": "ntasks-per-node",
    "ppn": "ntasks-per-node",
}


def options_of_lines(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """(options, variables of each job) by the #SBATCH, #PBS, #BSUB and #$ lines of a script; empty without such
    lines."""
    options: dict[str, str] = {}
    variables: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            words = line.split("#", 2)[1].split()[1:]
            options |= options_of_words([part.strip("\"'") for word in words for part in word.split("=", 1)])
            variables |= _OF_SLURM
        elif line.startswith("#PBS"):
            options |= dict(_pbs_options(line))
            variables |= _OF_PBS
        elif line.startswith("#BSUB"):
            options |= {name: match[1] for sign, name in _LSF_SIZES.items() if (match := re.search(sign, line))}
            variables |= _OF_LSF
        elif line.startswith("#$") and (match := _FULL_NODES.search(line)):
            options["nodes"] = match[1]
            variables |= _OF_UGE | {"NHOSTS": match[1]}
    slots, per_node = (whole(options.pop(name, "")) or 0 for name in ("slots", "slots-per-node"))
    if slots and per_node and slots % per_node == 0:
        options.setdefault("nodes", str(slots // per_node))
    return options, variables


def options_of_words(words: Sequence[str]) -> dict[str, str]:
    """The options of sbatch or srun that give the size of a job; the names of long options are keys."""
    options: dict[str, str] = {}
    for word, value in pairwise(words):
        name = _SHORT_OPTIONS.get(word, word.removeprefix("--"))
        if name == "gres":  # such as gpu:a100:4(S:0-1),nvme:100
            kinds = [kind.partition("(")[0] for kind in value.removeprefix("gres:").split(",")]
            name, value = "gpus-per-node", next((kind for kind in kinds if kind.startswith("gpu")), "")
            value = value.rpartition(":")[2] if ":" in value else "1" if value == "gpu" else ""
        elif name in ("gpus-per-node", "gpus"):  # with the kind of GPU before the number
            value = value.partition("(")[0].rpartition(":")[2]
        if name == "nodes":  # at least, and at most
            value = value.rpartition("-")[2]
        if name in _SLURM and whole(value) is not None:
            options.setdefault(name, value)
    return options


def variables_of(options: Mapping[str, str]) -> dict[str, str]:
    """The variables that Slurm sets from its options."""
    variables = {variable: value for name, value in options.items() for variable in _SLURM.get(name, ())}
    nodes, per_node = whole(options.get("nodes", "")), whole(options.get("ntasks-per-node", ""))
    if nodes and per_node and "ntasks" not in options:
        variables |= {"SLURM_NTASKS": str(nodes * per_node), "SLURM_NPROCS": str(nodes * per_node)}
    return variables


def _pbs_options(line: str) -> Iterator[tuple[str, str]]:
    """The options of a line such as "#PBS -l select=4:ncpus=64:ngpus=8", under Slurm's names."""
    for name, value in re.findall(r"\b([a-z]+)=([0-9]{1,9})\b", line):
        if name in _PBS_SIZES:
            yield _PBS_SIZES[name], value
