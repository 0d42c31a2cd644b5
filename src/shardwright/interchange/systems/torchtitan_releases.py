"""torchtitan's releases: their names for the settings of the table (torchtitan_table.py), the settings that they lack,
and the models that they know by name and flavor."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from shardwright.config import catalog
from shardwright.config.base import PlanError
from shardwright.config.dotted_keys import flat_keys
from shardwright.config.fault_gathering_reader import whole
from shardwright.config.hugging_face.same_arithmetic import is_same
from shardwright.config.job import JobSpec
from shardwright.config.model import ModelSpec
from shardwright.config.phrase import say
from shardwright.interchange.imported import Asked, ReadResult
from shardwright.interchange.reading.setting_notes import priced_as
from shardwright.interchange.reading.settings import Flat, Settings
from shardwright.interchange.rows import read_row, write_table
from shardwright.interchange.systems.torchtitan_table import PARTS, TABLE, WORLD

_QWEN3 = {"head_dim": 128, "kv_heads": 8, "qk_norm": "head", "vocab": 151936, "rotary_base": 1e6, "norm_epsilon": 1e-6}
_DEEPSEEK_V3_IN_TORCHTITAN = {
    "mtp_layers": 0,
    "moe": {"aux_loss": "none", "aux_scope": "microbatch", "aux_coefficient": 0.01},
}
_LLAMA4 = {
    "layers": 48,
    "hidden": 5120,
    "heads": 40,
    "kv_heads": 8,
    "ffn": 16384,
    "vocab": 202048,
    "rotary_base": 5e5,
}
_LLAMA4_EXPERTS = {
    "top_k": 1,
    "ffn": 8192,
    "shared_experts": 1,
    "gate": "sigmoid",
    "normalise": False,
    "weigh": "input",
    "bias_update": 0.001,
}
_LLAMA4_SCALING = {"kind": "llama3", "factor": 16.0, "trained_sequence": 8192, "fast": 1.0}


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, tied: bool = False) -> tuple[str, dict[str, Any]]:
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "ffn": ffn, "tied_embeddings": tied}
    return "", _QWEN3 | shape


def _llama4(experts: int, every: int) -> tuple[str, dict[str, Any]]:
    scaling = {"rotary_scaling": _LLAMA4_SCALING} if every == 1 else {}
    return "", _LLAMA4 | {"moe": _LLAMA4_EXPERTS | {"experts": experts, "every": every}} | scaling


FLAVORS: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("llama3", "1B"): ("llama3.2-1b", {}),
    ("llama3", "3B"): ("llama3.2-3b", {}),
    ("llama3", "8B"): ("llama3-8b", {}),
    ("llama3", "70B"): ("llama3-70b", {}),
    ("llama3", "405B"): ("llama3-405b", {}),
    ("llama2", "7B"): ("llama2-7b", {}),
    ("llama2", "13B"): ("llama2-13b", {}),
    ("llama2", "70B"): ("llama2-70b", {}),
    ("deepseek_v3", "16B"): ("deepseek-v2-lite", {}),
    ("deepseek_v3", "236B"): ("deepseek-v2.5", {}),
    ("deepseek_v3", "671B"): ("deepseek-v3", _DEEPSEEK_V3_IN_TORCHTITAN),
    ("gpt_oss", "20b"): ("gpt-oss-20b", {}),
    ("gpt_oss", "120b"): ("gpt-oss-120b", {}),
    ("llama4", "17bx16e"): _llama4(16, 1),
    ("llama4", "17bx128e"): _llama4(128, 2),
    ("qwen3", "0.6B"): _qwen3(28, 1024, 16, 3072, tied=True),
    ("qwen3", "1.7B"): _qwen3(28, 2048, 16, 6144, tied=True),
    ("qwen3", "4B"): _qwen3(36, 2560, 32, 9728, tied=True),
    ("qwen3", "8B"): _qwen3(36, 4096, 32, 12288),
    ("qwen3", "14B"): _qwen3(40, 5120, 40, 17408),
    ("qwen3", "32B"): _qwen3(64, 5120, 64, 25600),
    ("qwen3", "30B-A3B"): ("qwen3-30b-a3b", {}),
    ("qwen3", "235B-A22B"): ("qwen3-235b-a22b", {"rotary_base": 5e6}),
}


def fields_of_flavor(name: str, flavor: str) -> dict[str, Any] | None:
    """Fields of [model] for a flavor; None if it is unknown."""
    attention_suffixes = ("_flex", "_varlen", "_flex_attn", "_varlen_attn")
    base_flavor = next(
        (flavor.removesuffix(suffix) for suffix in attention_suffixes if flavor.endswith(suffix)), flavor
    )
    flavor_fields = FLAVORS.get((name, base_flavor))
    if flavor_fields is None:
        entry = catalog.model_name(flavor) if "/" in flavor else ""  # DeepSeek's experiment has names of the Hub
        return {"name": entry} if entry in catalog.names("models") else None
    catalog_name, fields = flavor_fields
    return ({"name": catalog_name} if catalog_name else {"name": f"{name}-{base_flavor}".lower()}) | fields


def flavor_of(model: ModelSpec, missing: Container[str] = ()) -> tuple[str, str] | None:
    """The name and flavor of a model; None if torchtitan has no such model, or only under names that are `missing`."""
    return next((key for key in FLAVORS if not _is_missing(*key, missing) and is_same(_spec(*key), model)), None)


def _is_missing(name: str, flavor: str, missing: Container[str]) -> bool:
    """True if a list has the name of a model, or its name with the flavor."""
    return name in missing or f"{name} {flavor}" in missing


@cache
def _spec(name: str, flavor: str) -> ModelSpec:
    catalog_name, fields = FLAVORS[name, flavor]
    catalog_fields = catalog.read("models", catalog_name) if catalog_name else {}
    experts = catalog_fields.get("moe", {}) | fields.get("moe", {})
    merged = catalog_fields | fields | ({"moe": experts} if experts else {})
    return ModelSpec.model_validate(merged, strict=False)


_SOFTWARE = "torchtitan-2025"
GROUP = "optimizer.param_groups.0."  # the parameters without a group of their own
_KWARGS = GROUP + "optimizer_kwargs."


@dataclass(frozen=True)
class Release:
    """A release of torchtitan, with its form of the configuration.

    `spelled` maps names of the table to the release's names. `lacks` are names, or "name=value" pairs, that the release
    does not have. `defaults` has the defaults that differ from the table's. `missing_models` are names of models, or
    names with a flavor, that the release lacks. `modules` maps the table's names for parts of a model to the release's.
    """

    number: str
    spelled: Mapping[str, str] = field(default_factory=dict)
    lacks: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    missing_models: frozenset[str] = frozenset()
    modules: Mapping[str, str] = field(default_factory=dict)

    def plain(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The release's settings under the names of the table."""
        table_names = {spelling: name for name, spelling in self.spelled.items()}
        return {table_names.get(name, name): value for name, value in settings.items()}

    def faults(self, settings: Mapping[str, Any]) -> list[str]:
        """Faults for settings of other releases that this release refuses."""
        refused = [
            name
            for name in settings
            if (name in self.lacks and not (name.endswith("_degree") and settings[name] == 1)) or name in self.spelled
        ]
        return [
            say(
                "{name} is no setting of torchtitan {release}; {way_out}",
                name=name,
                release=self.number,
                way_out=say("say {name}", name=self.spelled[name]) if name in self.spelled else say("take it out"),
            )
            for name in refused
        ]

    @property
    def known(self) -> str:
        """The names and flavors of the models that are known for the release."""
        flavors = (f"{name} {flavor}" for name, flavor in FLAVORS if not self.lacks_model(name, flavor))
        return say("{listed}", listed=tuple(flavors))

    def lacks_model(self, name: str, flavor: str) -> bool:
        """True if the release has no such model."""
        return _is_missing(name, flavor, self.missing_models)

    def written(self, job: JobSpec) -> dict[str, Any]:
        """A job's settings under the names of the table, without those that the release lacks. PlanError if the release
        has no such model."""
        name_and_flavor = flavor_of(job.model, self.missing_models)
        if name_and_flavor is None:
            fault = say(
                "it names its models, and this one is none of those that are known here (known: {known}); take another "
                "--to",
                known=self.known,
            )
            raise PlanError(say("job {name}", name=job.name), [fault])
        settings: dict[str, Any] = {"model.name": name_and_flavor[0], "model.flavor": name_and_flavor[1]}
        settings |= write_table(TABLE, job)
        parts = settings.get(PARTS, [])
        settings |= {PARTS: [[self.modules.get(module, module) for module in part] for part in parts]} if parts else {}
        return {
            name: value
            for name, value in settings.items()
            if name not in self.lacks and f"{name}={value}" not in self.lacks
        }

    def settings(self, job: JobSpec) -> dict[str, Any]:
        """A job's settings under the names of the release."""
        return {self.spelled.get(name, name): value for name, value in self.written(job).items()}


IN_TOML = Release(
    "0.2",
    missing_models=frozenset({"llama3 1B", "llama3 3B"}),
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
            "activation_checkpoint.selective_ac_option",
            "parallelism.context_parallel_rotate_method",
            "parallelism.expert_tensor_parallel_degree",
            "quantize.linear.float8.recipe_name=tensorwise",
        }
    ),
    defaults={"activation_checkpoint.selective_ac_option": "op", "quantize.linear.float8.recipe_name": "rowwise"},
    missing_models=frozenset({"llama2", "llama4"}),
    modules={"output": "lm_head"},
)


def read_settings(
    settings: Settings, release: Release, asked: Asked, nodes: int = 0, devices_per_node: int = 0
) -> ReadResult:
    """The fields of a job, read from settings under the names of the table.

    The launcher starts `nodes` nodes with `devices_per_node` devices each; 0 means unknown.
    """
    given = settings.given
    world = asked.cluster.devices or nodes * devices_per_node
    given |= {name: value for name, value in release.defaults.items() if given.get(name) is None}
    given |= {WORLD: world} if world else {}
    name_and_flavor = settings.text("model.name", "llama3"), settings.text("model.flavor", "debugmodel")
    model = None if release.lacks_model(*name_and_flavor) else fields_of_flavor(*name_and_flavor)
    if model is None and not any(field.startswith("model.") for field in asked.fields):
        name, flavor = (word[:40] for word in name_and_flavor)
        problem = say("model {name} {flavor} is not known here", name=name, flavor=flavor)
        if not settings.has("model.name", "model.flavor"):
            problem = say(
                "no {name} and {flavor} say a model that is known here",
                name=settings.shown("model.name"),
                flavor=settings.shown("model.flavor"),
            )
        settings.faults.append(
            say(
                "{problem} (known: {known}); give it with --set model.name=NAME of the catalog",
                problem=problem,
                known=release.known,
            )
        )
    fields: Flat = {"layers": _layers_of(model or {}, asked)}
    for row in TABLE:
        read_row(row, settings, fields)
    del fields["layers"]
    fields |= {f"model.{name}": value for name, value in flat_keys(model or {}).items()}
    if tokens := settings.count("training.vocab_size", 0):  # of forks, over that of the flavor
        fields["model.vocab"] = tokens
    settings.note(priced_as(_SOFTWARE))
    settings.ignore(WORLD, *release.defaults)
    return ReadResult(
        fields, settings, _SOFTWARE, 0 if asked.cluster.devices else nodes, devices_per_node, ("torchtitan",)
    )


def _layers_of(model: dict[str, Any], asked: Asked) -> int:
    """The number of layers of the model, which torchtitan divides into stages; 0 if unknown."""
    name = asked.fields.get("model.name", model.get("name", ""))
    override = whole(asked.fields.get("model.layers", ""))
    if override is not None:
        return override
    if name in catalog.names("models"):
        return int(catalog.read("models", name)["layers"])
    return int(model.get("layers", 0))
