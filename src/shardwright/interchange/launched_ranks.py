"""The numbers of nodes and devices that launchers before a program start: torchrun, deepspeed, mpirun, srun, batch
systems."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from shardwright.config import largest
from shardwright.config.cluster_facts import usual_divisor
from shardwright.config.fault_gathering_reader import whole
from shardwright.config.phrase import say
from shardwright.interchange.reading.batch_options import options_of_words
from shardwright.interchange.reading.script_text import settings_of
from shardwright.interchange.reading.settings import plain_text
from shardwright.interchange.reading.shell_marks import UNKNOWN, unknown_names

_NODES = ("nnodes", "num-nodes", "num-machines", "nodes")
_OF_EACH_NODE = ("nproc-per-node", "num-gpus", "num-gpus-per-node")  # one process of the launcher on each node
_RANKS_OF_NODE = ("ranks-per-node", "ntasks-per-node", "gpus-per-node")  # one process of the launcher for each device
_RANKS = ("ranks", "ntasks", "gpus")
_GPUS = ("gpus", "gpus-per-node")
HOSTS = ("hostfile", "include", "exclude")

_MPI = {
    "-np": "ranks",
    "--np": "ranks",
    "-n": "ranks",
    "--n": "ranks",
    "-N": "ranks-per-node",
    "-ppn": "ranks-per-node",
    "--ppn": "ranks-per-node",
    "-npernode": "ranks-per-node",
    "--npernode": "ranks-per-node",
    "--ranks-per-node": "ranks-per-node",
}
# Launchers of one process for each rank -> their options for the number of ranks.
_RANK_LAUNCHERS: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("mpirun", "mpiexec", "mpiexec.hydra", "mpirun_rsh", "orterun", "prun", "aprun"), _MPI),
    "srun": {"-n": "ntasks", "-N": "nodes", "-G": "gpus"},
    "jsrun": {  # resource sets: ranks where each has one task and one GPU (IBM, Job Step Manager)
        "-n": "ranks",
        "--nrs": "ranks",
        "-r": "ranks-per-node",
        "--rs_per_host": "ranks-per-node",
    },
    "msrun": {"--worker_num": "ranks", "--local_worker_num": "ranks-per-node"},
}
_HOSTS_OF_DEEPSPEED = {"-H": "hostfile", "-i": "include", "-e": "exclude"}  # its launcher.runner, parse_args
NODE_LAUNCHERS = ("torchrun", "deepspeed", "accelerate", "colossalai")


@dataclass(frozen=True)
class LaunchedRanks:
    """Nodes, and devices of each; 0 means unknown. `missing` are variables that they depend on and nobody has set,
    `hosts` is the option that lists the nodes, if no other option counts them."""

    nodes: int
    devices_per_node: int
    missing: tuple[str, ...] = ()
    hosts: str = ""
    notes: tuple[str, ...] = ()


def launcher_words(words: Sequence[str]) -> list[str]:
    """The words of the launcher that starts the processes of one node, without those of mpirun or srun before it."""
    names = [PurePath(word).name for word in words]
    place = next((place for place, name in enumerate(names) if name in NODE_LAUNCHERS), None)
    if place is None:
        place = next((place for place, word in enumerate(words) if "torch.distributed" in word), None)
    return [] if place is None and names[:1] and names[0] in _RANK_LAUNCHERS else list(words[place or 0 :])


# Beginnings of torchrun's options that are options themselves, as argparse takes them -> the whole options.
_SHORTENED = {re.compile(r"--nn\w*(?=$|=)"): "--nnodes", re.compile(r"--np[-\w]*(?=$|=)"): "--nproc-per-node"}


def with_whole_options(words: Sequence[str]) -> list[str]:
    """The words of launchers, with options of torchrun that are cut short written out: --nnode is --nnodes."""
    of_torchrun = [PurePath(word).name == "torchrun" or "torch.distributed" in word for word in words]
    start = of_torchrun.index(True) if any(of_torchrun) else len(words)
    behind = list(words[start:])
    for option, whole_option in _SHORTENED.items():
        behind = [option.sub(whole_option, word) if option.match(word) else word for word in behind]
    return [*words[:start], *behind]


def visible_devices(value: str) -> int:
    """The number of devices in a list of CUDA_VISIBLE_DEVICES; 0 if it is no list of numbers."""
    devices = value.strip("'\"").split(",")
    return len(devices) if all(device.strip().isdigit() for device in devices) else 0


def launched_ranks(words: Sequence[str], batch: Mapping[str, str]) -> LaunchedRanks:
    """Nodes and devices that all launchers before a program start. `batch` are options of the batch system."""
    options = settings_of(list(words)) | _rank_options(words)
    sizes = {f"batch-{name}": value for name, value in _started_sizes(words, batch).items()} | options
    nodes = _first_number(sizes, [*_NODES, "batch-nodes"])
    of_each, hosts = _first_number(sizes, _OF_EACH_NODE), next((name for name in HOSTS if name in options), "")
    ranks = _first_number(sizes, [*_RANKS, *(f"batch-{name}" for name in ("gpus", "ntasks"))])
    per_node = _first_number(sizes, [*_RANKS_OF_NODE, *(f"batch-{name}" for name in _RANKS_OF_NODE[:0:-1])])
    notes: tuple[str, ...] = ()
    if not of_each and not hosts and (gpus := _gpus_of_task(words)):
        ranks, per_node = 0, gpus
    if of_each:  # each process of the outer launcher starts those of a node
        outer_ranks = _first_number(options, ["ranks"])
        nodes = nodes or outer_ranks // max(1, _first_number(options, _RANKS_OF_NODE))
        per_node = of_each
    elif ranks and (is_mpi := "ranks" in options or not nodes) and per_node and ranks % per_node == 0:
        nodes = ranks // per_node if is_mpi else nodes
    elif ranks and not per_node:
        per_node = ranks // nodes if nodes and ranks % nodes == 0 else usual_divisor(ranks)
        notes = () if nodes else (_taken_nodes(per_node, ranks),)
        nodes = ranks // per_node
    if not nodes and per_node and not hosts and not any(name in sizes for name in (*_NODES, "batch-nodes")):
        nodes = 1
    names = [*_NODES, *_OF_EACH_NODE, *_RANKS_OF_NODE, *_RANKS]
    is_said = any(name in options for name in (*_NODES, *_OF_EACH_NODE))  # by the launcher, over what a job is given
    if not (is_said and nodes and per_node) and (slots := _slots(plain_text(options.get("include", "")))):
        nodes, per_node = slots
    missing = tuple(name for key in names for name in unknown_names(plain_text(options.get(key, ""))))
    return LaunchedRanks(nodes, per_node, missing, "" if nodes else hosts, notes)


def _gpus_of_task(words: Sequence[str]) -> int:
    """The GPUs of a node that srun gives to the one task that it starts there, which is a launcher of DeepSpeed: that
    starts a process for each. 0 if the words say something else."""
    names = [PurePath(word).name for word in words]
    if "srun" not in names or "deepspeed" not in names[names.index("srun") :]:
        return 0
    own = words[names.index("srun") + 1 : names.index("deepspeed")]
    sizes = options_of_words([part for word in own for part in re.sub(r"^(-[nNG])(?=\d)", r"\1=", word).split("=", 1)])
    tasks = sizes.get("ntasks-per-node") or (sizes.get("ntasks", "1") if "nodes" not in sizes else "1")
    return (whole(sizes.get("gpus-per-node", "")) or 0) if tasks == "1" else 0


def _started_sizes(words: Sequence[str], batch: Mapping[str, str]) -> Mapping[str, str]:
    """The sizes of a batch system, without its tasks where it says GPUs, too, and a launcher of a node's processes is
    alone: that starts a process for each GPU, and nothing starts the tasks."""
    names = {PurePath(word).name for word in words}
    if names & _RANK_LAUNCHERS.keys() or not names & {*NODE_LAUNCHERS} or not {*_GPUS} & batch.keys():
        return batch
    return {name: value for name, value in batch.items() if not name.startswith("ntasks")}


def variables_of_ranks(options: Mapping[str, Any], devices: int, devices_per_node: int) -> dict[str, str]:
    """Values for the unknown variables that are a launcher's nodes and devices of a node, for it to start a number of
    devices on nodes of `devices_per_node` or of a usual size; empty if there are none, or if it starts others."""
    named = (_NODES, _OF_EACH_NODE)
    nodes, of_node = (next((plain_text(options[name]) for name in names if name in options), "") for names in named)
    per_node = whole(of_node) or devices // (whole(nodes) or devices + 1) or devices_per_node or usual_divisor(devices)
    if not devices or devices % per_node:
        return {}
    values: dict[str, str] = {}
    for word, count in ((nodes or "1", devices // per_node), (of_node, per_node)):
        if match := UNKNOWN.fullmatch(word):
            values[match[1]] = str(count)
        elif whole(word) != count:
            return {}
    return values


def _taken_nodes(devices_per_node: int, ranks: int) -> str:
    """The note on nodes whose size nothing says."""
    return say(
        "nodes of {devices} devices are taken for {ranks} ranks (--devices-per-node N)",
        devices=devices_per_node,
        ranks=ranks,
    )


def _slots(text: str) -> tuple[int, int] | None:
    """Nodes and devices of each in a list such as host1:0,1@host2:0,1; None if a node does not say its devices, or they
    have different numbers of them."""
    parts = [node.partition(":") for node in text.split("@")]
    counts = {len(devices.split(",")) for _, _, devices in parts}
    is_whole = all(colon for _, colon, _ in parts) and len(counts) == 1 and not unknown_names(text)
    return (len(parts), counts.pop()) if is_whole else None


def _rank_options(words: Sequence[str]) -> dict[str, str]:
    """Options of mpirun, srun and the like, and short ones of DeepSpeed's launcher, under the names of long options."""
    options: dict[str, str] = {}
    known: Mapping[str, str] = {}
    for word, value in zip(words, [*words[1:], ""], strict=False):
        known = _RANK_LAUNCHERS.get(PurePath(word).name, known)
        name, equals, attached = word.partition("=")
        if joined := re.fullmatch(r"(-[A-Za-z]+)(\d+)", word):  # -n16
            name, equals, attached = joined[1], "=", joined[2]
        if PurePath(word).name in NODE_LAUNCHERS:
            known = _HOSTS_OF_DEEPSPEED if PurePath(word).name == "deepspeed" else {}
        elif name in known:
            options[known[name]] = attached if equals else value
        elif known is _MPI and name in ("--map-by", "-map-by") and (attached or value).startswith("ppr:"):
            options["ranks-per-node"] = (attached or value).split(":")[1]
    return options


def _first_number(given: Mapping[str, Any], names: Sequence[str]) -> int:
    """The first of several options that is a number, or the upper end of a range of nodes; 0 if none is."""
    for name in names:
        number = whole(str(given.get(name, "")).rpartition(":")[2])
        if number is not None and number <= largest.RANKS:
            return number
    return 0
