"""Files of schedulers and clouds that hold a command and how many nodes run it: manifests of Kubernetes (PyTorchJob,
MPIJob, Volcano, TrainJob, ...), tasks of SkyPilot and dstack, jobs of Azure ML, Amulet, Determined, Beaker, Vertex AI,
services of Docker Compose, recipes of Makefiles and justfiles, arguments of Megatron-LM's tests. The command is read as
a launch script.

Sources: their schemas, kubeflow.org (training operator 1.9, trainer 2), volcano.sh, docs.skypilot.co, dstack.ai,
learn.microsoft.com (commandJob), docs.docker.com (compose), amulet-docs (config_file), August 2026.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from shardwright.config.base import shortened
from shardwright.config.fault_gathering_reader import whole
from shardwright.config.phrase import say
from shardwright.interchange.known_settings import could_matter
from shardwright.interchange.make_recipes import recipes_script
from shardwright.interchange.reading.file_signs import FileSigns
from shardwright.interchange.reading.plain_data import read_documents
from shardwright.interchange.reading.shell_words import ShellFault

_SHELLS = ("bash", "sh", "zsh", "dash")
_COUNTS_OF_PODS = ("replicas", "numNodes", "numWorkers", "parallelism", "completions", "size")
_OF_GPUS = re.compile(r"nvidia\.com/(?:gpu|[abghlv]\d+\w*|mig-.*)|amd\.com/gpu|habana\.ai/gaudi|gpu\.intel\.com/i915")
_EXPRESSION = re.compile(r"\$\{\{\s*([\w.]+)\s*\}\}")  # of Azure ML and dstack
_FIRST_KEYS = ("apiversion:", "kind:")  # of a manifest of Kubernetes
_TRAINING = re.compile(r"\b(?:torchrun|deepspeed|accelerate|mpirun|mpiexec|python3?|tune|composer|\w*train\w*)\b")
_SCRIPT = re.compile(r"[\w./-]{1,200}\.(?:sh|slurm|sbatch)\b")
_PLAIN = re.compile(r"[\w./:=,@%+-]+")  # a word that a shell takes as it is
_MOST_LEVELS = 20
_MOST_OF_A_NODE = 8  # devices


@dataclass(frozen=True)
class WrappedCommand:
    """A script, with variables before it, on `nodes` nodes of `devices` devices; 0 means unknown."""

    text: str
    nodes: int = 0
    devices: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)

    def script(self) -> str:
        """The text of a script that says all of it: its size as scripts of a batch system have it."""
        sizes = {"nodes": self.nodes, "gpus-per-node": self.devices}
        lines = [f"#SBATCH --{name}={size}" for name, size in sizes.items() if size]
        exports = [f"export {name}={_quoted(value)}" for name, value in self.variables.items() if name.isidentifier()]
        return "\n".join(["#!/bin/bash", *lines, *exports, self.text]) + "\n"


@dataclass(frozen=True)
class Wrapper:
    """A kind of such files, known by its keys."""

    title: str
    keys: tuple[tuple[str, ...], ...]
    commands: Callable[[Mapping[str, Any]], Iterator[WrappedCommand]]


def unwrapped(path: str, text: str) -> tuple[str, str] | None:
    """(path, text) of the script that a file holds; None if it is no such file. Raises ShellFault for a file without a
    command."""
    if recipes := recipes_script(path, text):
        return f"{path}.sh", recipes
    if not (_is_manifest(text) or path.lower().endswith((".yaml", ".yml"))):
        return None
    try:
        documents = read_documents(path, text)
    except ShellFault:
        return None  # its own reader says why
    for document in documents:
        for wrapper in WRAPPERS:
            if FileSigns(wrapper.keys).fit_keys(document):
                for command in wrapper.commands(document):
                    return str(PurePath(path).with_suffix(".sh")), command.script()
    titles = [w.title for d in documents for w in WRAPPERS if FileSigns(w.keys).fit_keys(d)]
    if titles:
        raise ShellFault(
            say(
                "it is a file of {system}, and no command in it trains; name the script or the configuration that it "
                "starts",
                system=titles[0],
            )
        )
    return None


def _is_manifest(text: str) -> bool:
    """True if the first line that is no comment begins a manifest of Kubernetes."""
    lines = (line.strip().lower() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith(("#", "---"))), "")
    return first.startswith(_FIRST_KEYS)


def with_scripts(texts: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Texts by path, with the script in the place of a file that holds one, and a note on each. Raises ShellFault."""
    result, notes = dict[str, str](), list[str]()
    for path, text in texts.items():
        script = unwrapped(path, text)
        if script is not None and script[0] not in texts:
            notes.append(say("the command in {path} is read as a script", path=path))
            path, text = script
        result[path] = text
    return result, notes


def _quoted(word: str) -> str:
    """A word in double quotes, in which variables hold."""
    return '"' + re.sub(r'(["`\\])', r"\\\1", re.sub(r"\$\((\w+)\)", r"${\1}", word)) + '"'


def _number(value: Any) -> int:
    """A whole number above 0, such as 8 of H100:8; 0 if it is none."""
    if isinstance(value, Mapping):
        value = next(iter(value.values()), "") if len(value) == 1 else ""
    return whole(str(value).rpartition(":")[2]) or 0


def _words(value: Any) -> list[str]:
    return [str(word) for word in value] if isinstance(value, list) else [str(value)] if value else []


def _text_of(words: list[str]) -> str:
    """The script of a command: what a shell is given with -c, or the words themselves."""
    for place, word in enumerate(words[:-1]):
        is_shell = place and any(PurePath(before).name in _SHELLS for before in words[:place])
        if is_shell and re.fullmatch(r"-\w*c", word):
            return words[place + 1]
    return " ".join(word if _PLAIN.fullmatch(word) else _quoted(word) for word in words)


def _values(listed: Any) -> dict[str, str]:
    """Variables: a mapping, or a list of NAME=VALUE or of names with values."""
    if isinstance(listed, Mapping):
        return {str(name): str(value) for name, value in listed.items() if value is not None}
    items = listed if isinstance(listed, list) else []
    pairs = [item.partition("=")[::2] for item in items if isinstance(item, str) and "=" in item]
    named = [item for item in items if isinstance(item, Mapping) and {"name", "value"} <= item.keys()]
    return dict(pairs) | {str(item["name"]): str(item["value"]) for item in named}


def _of_sky(data: Mapping[str, Any]) -> Iterator[WrappedCommand]:
    resources = data.get("resources")
    nodes = whole(str(data.get("num_nodes") or 1)) or 0
    devices = _number(resources.get("accelerators")) if isinstance(resources, Mapping) else 0
    own = {"SKYPILOT_NUM_NODES": nodes, "SKYPILOT_NUM_GPUS_PER_NODE": devices, "SKYPILOT_NODE_RANK": "0"}
    variables = _values(data.get("envs")) | {name: str(value) for name, value in own.items() if value}
    if isinstance(data.get("run"), str):
        yield WrappedCommand(data["run"], nodes, devices, variables)


def _of_dstack(data: Mapping[str, Any]) -> Iterator[WrappedCommand]:
    resources = data.get("resources")
    gpu = resources.get("gpu") if isinstance(resources, Mapping) else None
    gpu = gpu.get("count") if isinstance(gpu, Mapping) else gpu
    nodes = whole(str(data.get("nodes") or 1)) or 0
    devices = _number(gpu) or (1 if isinstance(gpu, str) and gpu.isalnum() else 0)
    own = {"DSTACK_NODES_NUM": nodes, "DSTACK_GPUS_PER_NODE": devices, "DSTACK_NODE_RANK": "0"}
    variables = _values(data.get("env")) | {name: str(value) for name, value in own.items() if value}
    if commands := _words(data.get("commands")):
        yield WrappedCommand(_EXPRESSION.sub("", "\n".join(commands)), nodes, devices, variables)


def _of_azure(data: Mapping[str, Any]) -> Iterator[WrappedCommand]:
    resources, distribution = (
        value if isinstance(value, Mapping) else {} for value in (data.get("resources"), data.get("distribution"))
    )
    inputs = data["inputs"] if isinstance(data.get("inputs"), Mapping) else {}

    def value_of(match: re.Match[str]) -> str:
        section, _, name = match[1].rpartition(".")
        value = inputs.get(name)
        value = value.get("default", value.get("path")) if isinstance(value, Mapping) else value
        return str(value) if section == "inputs" and value is not None else f"/{name}"

    if isinstance(data.get("command"), str):
        yield WrappedCommand(
            _EXPRESSION.sub(value_of, data["command"]),
            whole(str(resources.get("instance_count", 1))) or 0,
            whole(str(distribution.get("process_count_per_instance", ""))) or 0,
            _values(data.get("environment_variables")),
        )


@dataclass(frozen=True)
class _Container:
    """A container of pods: its words, how many pods have it, its devices and its variables."""

    words: list[str]
    pods: int
    devices: int
    variables: dict[str, str]


def _containers(node: Any, pods: int, level: int = 0) -> Iterator[_Container]:
    """The containers of a manifest, with how many pods each is in."""
    if isinstance(node, list):
        for item in node:
            yield from _containers(item, pods, level + 1)
    if not isinstance(node, Mapping) or level > _MOST_LEVELS:
        return
    counts = [_number(node[name]) for name in _COUNTS_OF_PODS if name in node]
    pods = counts[0] if counts else pods
    words = [*_words(node.get("command")), *_words(node.get("args"))]
    limits = [value for name in ("resources", "resourcesPerNode") for value in _limits(node.get(name))]
    if words or limits:
        yield _Container(words, pods, next((_number(value) for value in limits), 0), _values(node.get("env")))
    if isinstance(node.get("entrypoint"), str):  # of a RayJob
        yield _Container(["bash", "-c", node["entrypoint"]], 0, 0, {})
    for name, inner in node.items():
        if name not in ("command", "args", "env", "initContainers"):
            yield from _containers(inner, pods, level + 1)


def _limits(resources: Any) -> list[Any]:
    """The numbers of GPUs in the resources of a container."""
    sections = [resources.get(name) for name in ("limits", "requests")] if isinstance(resources, Mapping) else []
    return [
        value
        for section in sections
        if isinstance(section, Mapping)
        for name, value in section.items()
        if _OF_GPUS.fullmatch(str(name))
    ]


def _of_kubernetes(data: Mapping[str, Any]) -> Iterator[WrappedCommand]:
    if data.get("kind") in ("Service", "Deployment", "ConfigMap", "PersistentVolumeClaim", "Namespace", "Secret"):
        return
    containers = list(_containers(data.get("spec"), 1))
    trains = sorted(
        (container for container in containers if container.words),
        key=lambda container: not _TRAINING.search(" ".join(container.words)),
    )
    with_devices = [container for container in containers if container.devices]
    nodes = sum(container.pods for container in with_devices)
    for container in trains:
        devices = container.devices or (with_devices[0].devices if with_devices else 0)
        yield WrappedCommand(_text_of(container.words), nodes, devices, container.variables)


def _of_compose(data: Mapping[str, Any]) -> Iterator[WrappedCommand]:
    services = data.get("services")
    for service in services.values() if isinstance(services, Mapping) else ():
        if not isinstance(service, Mapping):
            continue
        parts = [service.get(name) for name in ("entrypoint", "command")]
        text = " ".join(part if isinstance(part, str) else _text_of(_words(part)) for part in parts if part)
        if _TRAINING.search(text) or _SCRIPT.search(text):
            reserved = list(_reserved(service, "deploy", "resources", "reservations", "devices"))
            listed = [device.get("device_ids") for device in reserved]
            devices = [_number(device.get("count")) for device in reserved]
            devices += [len(names) for names in listed if isinstance(names, list)]
            yield WrappedCommand(text, 0, max([0, *devices]), _values(service.get("environment")))


def _of_determined(data: Mapping[str, Any]) -> Iterator[WrappedCommand]:
    resources, environment = (
        value if isinstance(value, Mapping) else {} for value in (data.get("resources"), data.get("environment"))
    )
    slots = _number(resources.get("slots_per_trial", 1))
    devices = slots if slots <= _MOST_OF_A_NODE else 0  # how many agents share more is theirs to say
    variables = _values(environment.get("environment_variables"))
    names = [name for name in _names_within(data.get("hyperparameters")) if could_matter(f"--{name}", "", "options")]
    if names:
        raise ShellFault(
            say(
                "hyperparameters ({names}) reach the program in Determined's own way, which is not followed; name its "
                "script, with these as options",
                names=tuple(names[:6]),
            )
        )
    if words := _words(data.get("entrypoint")):
        text = words[0] if isinstance(data["entrypoint"], str) else _text_of(words)
        yield WrappedCommand(text, 1 if devices else 0, devices, variables)


def _names_within(node: Any, level: int = 0) -> Iterator[str]:
    """The names of hyperparameters, in sections too, without the words that say where they are sought."""
    for name, inner in node.items() if isinstance(node, Mapping) and level < _MOST_LEVELS else ():
        if name not in ("type", "val", "vals", "minval", "maxval", "base", "count"):
            yield str(name)
        yield from _names_within(inner, level + 1)


def _of_mosaic(data: Mapping[str, Any]) -> Iterator[WrappedCommand]:
    compute = data.get("compute")
    devices = _number(compute.get("gpus")) if isinstance(compute, Mapping) else 0
    nodes = max(1, devices // _MOST_OF_A_NODE) if devices % _MOST_OF_A_NODE == 0 else 1
    if isinstance(data.get("command"), str):
        yield WrappedCommand(data["command"], nodes, devices // nodes, _values(data.get("env_variables")))


def _of_beaker(data: Mapping[str, Any]) -> Iterator[WrappedCommand]:
    tasks = data.get("tasks")
    for task in tasks if isinstance(tasks, list) else ():
        if isinstance(task, Mapping) and (words := [*_words(task.get("command")), *_words(task.get("arguments"))]):
            resources = task.get("resources")
            devices = _number(resources.get("gpuCount")) if isinstance(resources, Mapping) else 0
            nodes = _number(task.get("replicas")) or 1
            yield WrappedCommand(_text_of(words), nodes, devices, _values(task.get("envVars")))


def _of_vertex(data: Mapping[str, Any]) -> Iterator[WrappedCommand]:
    pools = data.get("workerPoolSpecs", _below(data, "jobSpec", "workerPoolSpecs"))
    listed = [pool for pool in (pools if isinstance(pools, list) else ()) if isinstance(pool, Mapping)]
    nodes = sum(_number(pool.get("replicaCount", 1)) for pool in listed)
    for pool in listed:
        words = [*_words(_below(pool, "containerSpec", "command")), *_words(_below(pool, "containerSpec", "args"))]
        if words:
            devices = _number(_below(pool, "machineSpec", "acceleratorCount"))
            yield WrappedCommand(_text_of(words), nodes, devices, _values(_below(pool, "containerSpec", "env")))


_SKU = re.compile(r"(?:(\d+)x)?(?:\d+)?G(\d+)(?:-.*)?")  # of Amulet: nodes, memory, GPUs of a node, kind: 2x80G8-A100


def _of_amulet(data: Mapping[str, Any]) -> Iterator[WrappedCommand]:
    """The commands of jobs, or of the one that a search starts with other values; $$ is a sign of the shell's."""
    listed = data.get("jobs")
    searched = _below(data, "search", "job_template")
    for job in [*(listed if isinstance(listed, list) else ()), searched]:
        if not isinstance(job, Mapping) or not (commands := _words(job.get("command"))):
            continue
        sku = _SKU.fullmatch(str(job.get("sku") or ""))
        nodes, devices = (whole(sku[1] or "1") or 0, whole(sku[2]) or 0) if sku else (0, 0)
        text = "\n".join(commands).replace("$$", "$")
        yield WrappedCommand(text, nodes, devices, _values(_below(job, "submit_args", "env")))


def _of_megatrons_tests(data: Mapping[str, Any]) -> Iterator[WrappedCommand]:
    """The arguments of one of Megatron-LM's functional tests; the list of all tests says program and GPUs."""
    if (mode := str(data.get("MODE") or "pretraining")) != "pretraining":
        raise ShellFault(
            say("MODE = {mode}: training by next tokens is counted here; name a test of that", mode=shortened(mode, 40))
        )
    words: list[str] = []
    for name, value in data["MODEL_ARGS"].items() if isinstance(data["MODEL_ARGS"], Mapping) else ():
        values = value if isinstance(value, list) else [] if value is True else [value]
        words += [] if value in (None, False) else [str(name), *map(str, values)]
    command = f"torchrun $TRAINING_SCRIPT_PATH {' '.join(words)}"  # other programs have the same arguments
    text = f"case $TRAINING_SCRIPT_PATH in\n*.py)\n  {command}\n  ;;\nesac"
    yield WrappedCommand(text, variables=_values(data.get("ENV_VARS")))


def _below(node: Any, *names: str) -> Any:
    """The value under names within names; None if one is not there."""
    for name in names:
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def _reserved(node: Any, *names: str) -> Iterator[Mapping[str, Any]]:
    """The mappings of a list that stands under names within names."""
    listed = _below(node, *names)
    yield from (item for item in (listed if isinstance(listed, list) else ()) if isinstance(item, Mapping))


WRAPPERS = (
    Wrapper("Kubernetes", (("apiVersion", "kind"),), _of_kubernetes),
    Wrapper("SkyPilot", (("resources", "run"), ("num_nodes", "run"), ("setup", "run")), _of_sky),
    Wrapper("Determined", (("entrypoint", "searcher"), ("entrypoint", "resources.slots_per_trial")), _of_determined),
    Wrapper("MosaicML's platform", (("command", "compute.gpus"),), _of_mosaic),
    Wrapper("Beaker", (("tasks", "budget"),), _of_beaker),
    Wrapper("Vertex AI", (("workerPoolSpecs",), ("jobSpec.workerPoolSpecs",)), _of_vertex),
    Wrapper("Azure ML", (("command", "environment"), ("command", "compute")), _of_azure),
    Wrapper(say("Megatron-LM's tests"), (("MODEL_ARGS", "ENV_VARS"),), _of_megatrons_tests),
    Wrapper(
        "Amulet", (("target", "jobs"), ("target", "search.job_template"), ("environment", "jobs", "code")), _of_amulet
    ),
    Wrapper("dstack", (("type", "commands"),), _of_dstack),
    Wrapper("Docker Compose", (("services",),), _of_compose),
)
