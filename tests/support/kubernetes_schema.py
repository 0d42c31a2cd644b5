"""Kubernetes' rules for the fields that we write: ConfigMap, Service and Job of the API v1 and batch/v1, strictly.

Names, types and the rules between fields are those of the API reference of Kubernetes 1.33, written down by hand; a
field that is not here is refused.
"""

from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

Label = Annotated[str, Field(pattern=r"^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$")]
Subdomain = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
Count = Annotated[int, Field(ge=0, lt=2**31)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ObjectMeta(Strict):
    name: Label


class ConfigMap(Strict):
    apiVersion: Literal["v1"]
    kind: Literal["ConfigMap"]
    metadata: ObjectMeta
    data: dict[Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$")], str]


class ServiceSpec(Strict):
    clusterIP: Literal["None"]
    publishNotReadyAddresses: bool
    selector: dict[str, Label]


class Service(Strict):
    apiVersion: Literal["v1"]
    kind: Literal["Service"]
    metadata: ObjectMeta
    spec: ServiceSpec


class ConfigMapVolume(Strict):
    name: Label


class EmptyDir(Strict):
    medium: Literal["", "Memory"] = ""


class ClaimVolume(Strict):
    claimName: Subdomain


class Volume(Strict):
    name: Label
    configMap: ConfigMapVolume | None = None
    emptyDir: EmptyDir | None = None
    persistentVolumeClaim: ClaimVolume | None = None

    @model_validator(mode="after")
    def has_one_source(self) -> "Volume":
        assert len(self.model_fields_set) == 2, "a volume has a name and one source"
        return self


class VolumeMount(Strict):
    name: Label
    mountPath: Annotated[str, Field(pattern=r"^/[^:]*$")]
    readOnly: bool = False


class EnvVar(Strict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    value: str


class Resources(Strict):
    limits: dict[Literal["nvidia.com/gpu", "amd.com/gpu"], Annotated[int, Field(gt=0)]]


class Container(Strict):
    name: Label
    image: Annotated[str, Field(min_length=1)]
    command: Annotated[list[str], Field(min_length=1)]
    workingDir: str
    env: Annotated[list[EnvVar], Field(min_length=1)] | None = None
    volumeMounts: list[VolumeMount]
    resources: Resources | None = None


class PodSpec(Strict):
    restartPolicy: Literal["Never"]  # the others allow neither a failure policy nor a limit for each index
    subdomain: Label | None = None
    terminationGracePeriodSeconds: Count | None = None
    containers: Annotated[list[Container], Field(min_length=1)]
    volumes: list[Volume]

    @model_validator(mode="after")
    def mounts_its_volumes(self) -> "PodSpec":
        volumes = [volume.name for volume in self.volumes]
        assert len(set(volumes)) == len(volumes)
        for container in self.containers:
            assert {mount.name for mount in container.volumeMounts} == set(volumes)
            assert len({mount.mountPath for mount in container.volumeMounts}) == len(volumes)
        return self


class Template(Strict):
    spec: PodSpec


class OnExitCodes(Strict):
    containerName: Label
    operator: Literal["In", "NotIn"]
    values: Annotated[list[Annotated[int, Field(gt=0, lt=256)]], Field(min_length=1, max_length=255)]


class OnPodCondition(Strict):
    type: str
    status: Literal["True", "False", "Unknown"]


class Rule(Strict):
    action: Literal["FailJob", "FailIndex", "Ignore", "Count"]
    onExitCodes: OnExitCodes | None = None
    onPodConditions: list[OnPodCondition] | None = None

    @model_validator(mode="after")
    def has_one_condition(self) -> "Rule":
        assert len(self.model_fields_set) == 2, "a rule has an action and one condition"
        return self


class FailurePolicy(Strict):
    rules: Annotated[list[Rule], Field(max_length=20)]


class JobSpec(Strict):
    completionMode: Literal["Indexed"]
    completions: Annotated[int, Field(gt=0, le=100_000)]
    parallelism: Annotated[int, Field(gt=0, le=100_000)]
    backoffLimitPerIndex: Count
    maxFailedIndexes: Count
    podFailurePolicy: FailurePolicy
    activeDeadlineSeconds: Annotated[int, Field(gt=0)] | None = None
    template: Template

    @model_validator(mode="after")
    def names_its_containers(self) -> "JobSpec":
        assert self.maxFailedIndexes <= self.completions
        names = {container.name for container in self.template.spec.containers}
        for rule in self.podFailurePolicy.rules:
            assert rule.onExitCodes is None or rule.onExitCodes.containerName in names
        return self


class Job(Strict):
    apiVersion: Literal["batch/v1"]
    kind: Literal["Job"]
    metadata: ObjectMeta
    spec: JobSpec


class Manifest(Strict):
    """The resources that a manifest asks for; `service` is None where there is one pod."""

    config: ConfigMap
    service: Service | None
    job: Job

    @model_validator(mode="after")
    def pods_have_names(self) -> "Manifest":
        name = self.job.metadata.name
        assert len(f"{name}-{self.job.spec.completions - 1}") <= 63, "the name of a pod is that of its host"
        pod = self.job.spec.template.spec
        assert any(volume.configMap and volume.configMap.name == self.config.metadata.name for volume in pod.volumes)
        if self.service is None:
            assert pod.subdomain is None and self.job.spec.completions == 1
        else:
            assert pod.subdomain == self.service.metadata.name
            assert self.service.spec.selector == {"batch.kubernetes.io/job-name": name}
        return self


def read_manifest(text: str) -> Manifest:
    """A manifest that Kubernetes takes; else a ValidationError."""
    config, *service, job = yaml.safe_load_all(text)
    return Manifest(config=ConfigMap(**config), service=Service(**service[0]) if service else None, job=Job(**job))
