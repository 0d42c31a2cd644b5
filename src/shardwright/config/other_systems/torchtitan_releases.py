"""Names of torchtitan's releases for the settings of the one table (torchtitan_table.py), and the settings that a
release lacks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.config import catalog
from shardwright.config.base import PlanError
from shardwright.config.dotted_keys import flat_keys
from shardwright.config.job import JobSpec
from shardwright.config.other_systems.imported import Asked, Told
from shardwright.config.other_systems.known_settings import subjects
from shardwright.config.other_systems.rows import read_row, write_table
from shardwright.config.other_systems.settings import Flat, Settings
from shardwright.config.other_systems.torchtitan_models import FLAVORS, flavor_of, model_fields
from shardwright.config.other_systems.torchtitan_table import PARTS, TABLE, WORLD
from shardwright.config.other_systems.whole_text import whole

_SOFTWARE = "torchtitan-2025"
GROUP = "optimizer.param_groups.0."  # the parameters that no other group takes
_KWARGS = GROUP + "optimizer_kwargs."


@dataclass(frozen=True)
class Release:
    """A form of torchtitan's configuration. `spelled` are its names for those of the table, `lacks` names, or names
    with a value ("name=value"), that it has not, `holds` what is so where nothing is said and the table takes something
    else, `without` the models that it lacks, and `modules` its names for parts of a model."""

    number: str
    spelled: Mapping[str, str] = field(default_factory=dict)
    lacks: frozenset[str] = frozenset()
    holds: Mapping[str, Any] = field(default_factory=dict)
    without: frozenset[str] = frozenset()
    modules: Mapping[str, str] = field(default_factory=dict)

    def plain(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings of the release under the names of the table."""
        back = {name: fields for fields, name in self.spelled.items()}
        return {back.get(name, name): value for name, value in settings.items()}

    def faults(self, settings: Mapping[str, Any]) -> list[str]:
        """Settings that other releases have, and this one refuses."""
        refused = [name for name in settings if name in self.lacks or name in self.spelled]
        ways = {name: f"say {self.spelled[name]}" if name in self.spelled else "take it out" for name in refused}
        return [f"{name} is no setting of torchtitan {self.number}; {way}" for name, way in ways.items()]

    @property
    def known(self) -> str:
        """The models that are known of it, by name and flavor."""
        return ", ".join(f"{name} {flavor}" for name, flavor in FLAVORS if name not in self.without)

    def written(self, job: JobSpec) -> dict[str, Any]:
        """Settings of a job under the names of the table, less what the release lacks. PlanError where it has no name
        for the model."""
        named = flavor_of(job.model, self.without)
        if named is None:
            known = f"known here (known: {self.known})"
            fault = f"it names its models, and this one is none of those that are {known}; take another --to"
            raise PlanError(f"job {job.name}", [fault])
        settings: dict[str, Any] = {"model.name": named[0], "model.flavor": named[1]}
        settings |= write_table(TABLE, job)
        parts = settings.get(PARTS, [])
        settings |= {PARTS: [[self.modules.get(one, one) for one in part] for part in parts]} if parts else {}
        return {
            name: value
            for name, value in settings.items()
            if name not in self.lacks and f"{name}={value}" not in self.lacks
        }

    def settings(self, job: JobSpec) -> dict[str, Any]:
        """Settings of a job under the names of the release."""
        return {self.spelled.get(name, name): value for name, value in self.written(job).items()}


IN_TOML = Release(
    "0.2",
    lacks=frozenset(
        {"parallelism.enable_sequence_parallel", "training.disable_cuda_graphs", "optimizer.implementation"}
    ),
)
IN_PYTHON = Release(
    "0.3",
    spelled={
        "model.name": "model_spec.name",
        "model.flavor": "model_spec.flavor",
        "model.converters": "model_registry.converters",
        "quantize.linear.float8.recipe_name": "Float8LinearConverter.recipe_name",
        "parallelism.expert_parallel_comm_backend": "model_registry.moe_comm_backend",
        "activation_checkpoint.mode": "activation_checkpoint",
        "optimizer.name": GROUP + "optimizer_name",
        "optimizer.lr": _KWARGS + "lr",
        "optimizer.beta1": _KWARGS + "betas.0",
        "optimizer.beta2": _KWARGS + "betas.1",
        "optimizer.eps": _KWARGS + "eps",
        "optimizer.weight_decay": _KWARGS + "weight_decay",
    },
    lacks=frozenset(
        {
            "activation_checkpoint.selective_ac_option", "parallelism.context_parallel_rotate_method",
            "parallelism.expert_tensor_parallel_degree", "quantize.linear.float8.recipe_name=tensorwise",
        }
    ),
    holds={"activation_checkpoint.selective_ac_option": "op", "quantize.linear.float8.recipe_name": "rowwise"},
    without=frozenset({"llama2"}),
    modules={"output": "lm_head"},
)  # fmt: skip


def told_of(settings: Settings, release: Release, asked: Asked, nodes: int = 0, each: int = 0) -> Told:
    """The job that settings under the names of the table say. `nodes` of `each` devices start it; 0 is not said."""
    given = settings.given
    without = subjects(given, "torchtitan")
    world = asked.cluster.devices or nodes * each
    given |= {name: value for name, value in release.holds.items() if given.get(name) is None}
    given |= {WORLD: world} if world else {}
    named = settings.text("model.name", "llama3"), settings.text("model.flavor", "debugmodel")
    model = None if named[0] in release.without else model_fields(*named)
    if model is None and not any(field.startswith("model.") for field in asked.fields):
        what = f"model {named[0][:40]} {named[1][:40]} is not known here"
        if not settings.has("model.name", "model.flavor"):
            what = (
                f"no {settings.shown('model.name')} and {settings.shown('model.flavor')} say a model that is known here"
            )
        settings.faults.append(f"{what} (known: {release.known}); give it with --set model.name=NAME of the catalog")
    fields: Flat = {"layers": _layers_of(model or {}, asked)}
    for row in TABLE:
        read_row(row, settings, fields)
    del fields["layers"]
    fields |= {f"model.{name}": value for name, value in flat_keys(model or {}).items()}
    settings.note(f"priced as {_SOFTWARE} software (--as NAME for another)")
    settings.ignore(WORLD, *release.holds)
    return Told(fields, settings, _SOFTWARE, 0 if asked.cluster.devices else nodes, each, without)


def _layers_of(model: dict[str, Any], asked: Asked) -> int:
    """Layers of the model, which say how torchtitan cuts it into stages."""
    name = asked.fields.get("model.name", model.get("name", ""))
    given = whole(asked.fields.get("model.layers", ""))
    if given is not None:
        return given
    if name in catalog.names("models"):
        return int(catalog.read("models", name)["layers"])
    return int(model.get("layers", 0))
