"""A manifest for Kubernetes: a Job with an index for each server, and a Service that gives its pods names.

A Job of batch/v1 is part of every cluster, while Kubeflow's PyTorchJob needs an operator that somebody installs. The
pods of a Job have an index and, through a Service without an address, names that stay when a pod is replaced. The Job's
policy for a failed pod depends on the reason: a pod that the cluster took away costs no restart.
"""

import re
import shlex
from typing import Any

from shardwright.config.base import PlanError
from shardwright.config.link_words import link_words
from shardwright.config.network_facts import NETWORKS
from shardwright.config.phrase import both, say
from shardwright.config.yaml_text import yaml_text
from shardwright.report.launch.launch_description import Launch, read_paths
from shardwright.report.launch.torchrun_command import torchrun_variables, torchrun_words
from shardwright.report.toml_files import job_toml
from shardwright.train.launch.preemption import EXIT_STATUS as PREEMPTED

Fields = dict[str, Any]

FOLDER, JOB_FOLDER, JOB_FILE = "/shardwright", "/etc/shardwright", "job.toml"
_CONTAINER = "train"
_LONGEST_NAME = 52  # an index of ten digits follows, and the whole is still a host name
_JOIN_TIMEOUT_S = 1800  # time for the other pods to get a node and an image
_JOB_LABEL = "batch.kubernetes.io/job-name"


def kubernetes_manifest(launch: Launch) -> str:
    """The manifest of a launch, for kubectl. PlanError if pods would not keep the job's folders."""
    if faults := _folder_faults(launch):
        raise PlanError(say("launch of {name}", name=launch.job.name), faults)
    name = kubernetes_name(launch.job.name)
    metadata = {"name": name}
    text = job_toml(launch.job)
    documents = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {JOB_FILE: text}}]
    if launch.layout.servers > 1:
        spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {_JOB_LABEL: name}}
        documents.append({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})
    documents.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": _job_spec(launch, name)})
    unset_variables = [
        f"# {placeholder.variable} is not set: {placeholder.meaning}\n" for placeholder in launch.links.placeholders
    ]
    heading = f"# shardwright launch --kubernetes: {launch.heading}\n{''.join(unset_variables)}"
    return heading + "---\n".join(yaml_text(document) for document in documents)


def kubernetes_name(name: str) -> str:
    """The name of a job as a DNS label."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:_LONGEST_NAME].strip("-")
    return plain if plain[:1].isalpha() else f"job-{plain}".strip("-")


def _job_spec(launch: Launch, name: str) -> Fields:
    servers, options = launch.layout.servers, launch.options
    rules: list[Fields] = [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
    if servers == 1:  # with several servers a pod has torchrun's status, which is always 1
        rules += [_on_status("FailJob", 2), _on_status("Ignore", PREEMPTED)]
    spec: Fields = {
        "completionMode": "Indexed",
        "completions": servers,
        "parallelism": servers,
        "backoffLimitPerIndex": launch.max_restarts,
        "maxFailedIndexes": 0,
        "podFailurePolicy": {"rules": rules},
    }
    if options.limit_s:
        spec["activeDeadlineSeconds"] = options.limit_s
    return spec | {"template": {"spec": _pod_spec(launch, name)}}


def _on_status(action: str, status: int) -> Fields:
    return {"action": action, "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [status]}}


def _pod_spec(launch: Launch, name: str) -> Fields:
    volumes: list[Fields] = [
        {"name": "job", "configMap": {"name": name}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},  # NCCL's ranks of a pod exchange data through it
    ]
    mounts: list[Fields] = [
        {"name": "job", "mountPath": JOB_FOLDER, "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    claim = launch.options.claim
    volumes.append({"name": "runs"} | ({"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}))
    mounts.append({"name": "runs", "mountPath": FOLDER})
    container: Fields = {
        "name": _CONTAINER,
        "image": launch.options.image,
        "command": _command(launch, name),
        "workingDir": FOLDER,
        "env": [{"name": name, "value": value} for name, value in _variables(launch).items()],
        "volumeMounts": mounts,
    }
    if not container["env"]:
        del container["env"]
    if not launch.on_cpu:
        container["resources"] = {"limits": {_resource(launch): launch.layout.ranks_per_server}}
    spec: Fields = {"restartPolicy": "Never"}
    if launch.layout.servers > 1:
        spec["subdomain"] = name
    if launch.save_s:
        spec["terminationGracePeriodSeconds"] = launch.save_s + 10  # torchrun ends remaining processes a little earlier
    return spec | {"containers": [container], "volumes": volumes}


def _command(launch: Launch, name: str) -> list[str]:
    """The command that a pod runs. The agent of pod 0 hosts the rendezvous. It knows that from its index, since its
    name may not be resolvable yet."""
    job = [f"{JOB_FOLDER}/{JOB_FILE}"]
    if launch.layout.servers == 1:  # `train` starts the ranks, restarts them and returns their status
        return ["python", "-m", "shardwright", "train", *job]
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={name}-0.{name}:{launch.options.port}", f"--rdzv-id={name}"]
    program, *arguments = torchrun_words(launch, rendezvous, job)
    timeouts = f"join_timeout={_JOIN_TIMEOUT_S},read_timeout={_JOIN_TIMEOUT_S}"
    # No bracket follows $: Kubernetes would expand that as a variable of its own.
    is_host, rendezvous_conf = "((host = JOB_COMPLETION_INDEX == 0))", f'--rdzv-conf="is_host=$host,{timeouts}"'
    return ["bash", "-c", f"{is_host}; exec {program} {rendezvous_conf} {shlex.join(arguments)}"]


def _variables(launch: Launch) -> dict[str, str]:
    return torchrun_variables(launch) if launch.layout.servers > 1 else launch.links.variables


def _resource(launch: Launch) -> str:
    """The resource name of a maker's device plugin."""
    return "amd.com/gpu" if launch.is_amd else "nvidia.com/gpu"


def _folder_faults(launch: Launch) -> list[str]:
    """Faults of the job's folders that pods would not keep."""
    job, claim = launch.job, launch.options.claim
    faults = list[str]()
    for field, folder in (("run.folder", job.run.folder), ("checkpoint.path", job.checkpoint.path)):
        if folder.startswith(("/", "~")) and not folder.startswith(f"{FOLDER}/"):
            faults.append(
                say(
                    "{field} {folder} is not in {kept}, which is what pods keep; name a folder without / in front",
                    field=field,
                    folder=folder,
                    kept=FOLDER,
                )
            )
    if job.checkpoint.is_on and not claim and "://" not in job.checkpoint.path:
        faults.append(
            say(
                "checkpoints would go with the pods that write them; name a PersistentVolumeClaim with --claim, or "
                "set checkpoint.path to an address such as s3://bucket/run"
            )
        )
    return faults


def kubernetes_notes(launch: Launch) -> list[str]:
    """Notes about requirements that a manifest can't state and the cluster or the image must meet."""
    job, network, notes = launch.job, launch.job.cluster.network, list[str]()
    if launch.layout.servers > 1 and NETWORKS[network.kind].adapter:
        notes.append(
            say(
                "pods reach InfiniBand and RoCE adapters by a resource or a network that each cluster names by "
                "itself; add it to the container's resources, or to the pods' annotations"
            )
        )
    if launch.layout.servers_per_node > 1:
        links, pods = link_words(job.cluster).link or "fast links", launch.layout.servers_per_node
        notes.append(
            say(
                "{pods} pods at a time need servers of one domain of {links}; add the affinity or the resource claim "
                "by which the cluster says so",
                pods=pods,
                links=links,
            )
        )
    path_texts = [f"{field} {', '.join(values)}" for field, values in read_paths(job).items()]
    path_texts += [f"data.cache {job.data.cache}"] if job.data.cache else []
    if path_texts:
        notes.append(
            say(
                "{paths} must be there in the containers, relative paths in {folder}",
                paths=both(path_texts),
                folder=FOLDER,
            )
        )
    return notes
