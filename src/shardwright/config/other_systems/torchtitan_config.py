"""The result of a configuration function of torchtitan 0.3, a Trainer.Config, as settings under the release's names."""

from dataclasses import dataclass, field
from typing import Any

from shardwright.config.other_systems.python_values import Made, Named, Unread, is_constant
from shardwright.config.other_systems.settings import Settings
from shardwright.config.other_systems.shell_words import ShellFault
from shardwright.config.other_systems.torchtitan_releases import GROUP

_ADAMW = "default_adamw"
KEPT = ("model_registry", "decoder_vocab_size")


def _default_adamw(placed: list[Any], named: dict[str, Any]) -> Made:
    """The optimizer of torchtitan's default_adamw, whose defaults are those of the table."""
    group = {"pattern": ".*", "optimizer_name": "AdamW", "optimizer_kwargs": {}}
    group["optimizer_kwargs"] = dict(zip(("lr",), placed, strict=False)) | named
    return Made(CLASSES["optimizer"], {"param_groups": [Made(_ADAMW, group)]})


MAKERS = {_ADAMW: _default_adamw}  # functions of torchtitan's own whose results are changed item by item
POLICIES = {"selective": "SelectiveAC.Config", "full": "FullAC.Config", "memory-budget": "MemoryBudgetAC.Config"}
# Classes of the sections that say something of a plan. Another class may have other defaults.
CLASSES = {
    "training": "TrainingConfig", "parallelism": "ParallelismConfig", "lr_scheduler": "LRSchedulersContainer.Config",
    "optimizer": "OptimizersContainer.Config", "compile": "CompileConfig",
}  # fmt: skip
# Defaults of torch's optimizers, which hold where a group of parameters does not say them.
_TORCH = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}
_DECAY = {"AdamW": 0.01, "Adam": 0.0}
_REGISTRY = ("flavor", "attn_backend")  # arguments of model_registry that may stand without their names
_MOST_SETTINGS, _MOST_DEEP = 5_000, 20


@dataclass
class Config:
    """Settings of a configuration, those that are not known, and what was assumed or has no place in a job."""

    given: dict[str, Any] = field(default_factory=dict)
    unread: dict[str, Unread] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def put(self, name: str, value: Any, deep: int = 0) -> None:
        """A setting, or all that are within it. Raises ShellFault."""
        if deep > _MOST_DEEP or len(self.given) + len(self.unread) > _MOST_SETTINGS:
            raise ShellFault("the configuration has too many settings, or too deep ones; check that it is the file")
        if isinstance(value, Made) and (value.is_of_class or not value.maker):
            expected = CLASSES.get(name)
            if expected and value.maker and value.last not in (expected, expected.partition(".")[0]):
                self.notes.append(f"{name}: {value.last[:60]} is taken for {expected}, with its defaults")
            if value.placed:
                self.notes.append(f"{name}: arguments of {value.last[:60]} without names are not read")
            for key, one in value.values.items():
                self.put(f"{name}.{key}", one, deep + 1)
        elif isinstance(value, dict):
            for key, one in value.items():
                self.put(f"{name}.{key}", one, deep + 1)
        elif isinstance(value, Made):
            self.unread[name] = Unread(f"{value.maker[:60]}(...)", "")
        elif isinstance(value, Named):
            self.given[name] = value.last
        elif isinstance(value, Unread):
            self.unread[name] = value
        else:
            self.given[name] = _shallow(value)


def _shallow(value: Any) -> Any:
    """A list of constants, or of lists of them; others as words."""
    if isinstance(value, list):
        return [[str(part) for part in one] if isinstance(one, list) else one if is_constant(one) else _word(one)
                for one in value]  # fmt: skip
    return value


def _word(value: Any) -> str:
    return value.last if isinstance(value, (Named, Made)) else "..."


def config_of(result: Any, where: str, family: str) -> Config:
    """The settings of what a function returns. `family` is the package that a model is of where no import says it.
    Raises ShellFault."""
    if isinstance(result, Made) and result.maker and not result.is_of_class:
        module, _, function = result.maker.rpartition(".")
        path = f"{module.strip('.').replace('.', '/')}.py" if module.strip(".") else f"the file with {function[:60]}"
        raise ShellFault(f"{where} begins with {function[:60]}, which is in no file here; name {path[:100]} too")
    if not isinstance(result, Made):
        what = result.text if isinstance(result, Unread) else "nothing that is known here"
        raise ShellFault(f"{where} returns {what}, and not a Trainer.Config; check that it is the function")
    config = Config()
    if result.last not in ("Trainer.Config", "Config", ""):
        config.notes.append(f"{result.last[:60]} is taken for Trainer.Config, with its defaults")
    for name, value in result.values.items():
        if name == "model_spec":
            _put_model(value, config, family)
        elif name == "activation_checkpoint":
            _put_policy(value, config)
        elif name == "optimizer":
            _put_optimizer(value, config)
        else:
            config.put(name, value)
    if "optimizer" not in result.values:
        config.faults.append("optimizer is not said, and has no default; add optimizer=default_adamw(lr=RATE)")
    return config


def _put_model(value: Any, config: Config, family: str) -> None:
    if not isinstance(value, Made) or value.last != "model_registry":
        config.put("model_spec", value if isinstance(value, Unread) else Unread("it", ""))
        return
    package = value.maker.strip(".").split(".")[:-1]
    config.given["model_spec.name"] = package[-1] if package else family
    arguments = dict(zip(_REGISTRY, value.placed, strict=False)) | value.values
    for name, one in arguments.items():
        if name == "flavor":
            config.put("model_spec.flavor", one)
        elif name == "converters":
            _put_converters(one, config)
        else:
            config.put(f"model_registry.{name}", one)


def _put_converters(value: Any, config: Config) -> None:
    if not isinstance(value, list) or not all(isinstance(one, Made) for one in value):
        if value is not None:
            config.put("model_registry.converters", value if isinstance(value, Unread) else Unread("it", ""))
        return
    config.given["model_registry.converters"] = [one.last.removesuffix(".Config") for one in value]
    for one in value:
        for name, setting in one.values.items():
            config.put(f"{one.last.removesuffix('.Config')}.{name}", setting)


def _put_policy(value: Any, config: Config) -> None:
    words = {maker: word for word, maker in POLICIES.items()}
    if value is None:
        config.given["activation_checkpoint"] = "none"
    elif isinstance(value, Made) and value.last in words:
        config.given["activation_checkpoint"] = words[value.last]
        for name, one in value.values.items():
            config.put(f"activation_checkpoint.{name}", one)
    else:
        maker = value.last if isinstance(value, Made) else "it"
        config.unread["activation_checkpoint"] = value if isinstance(value, Unread) else Unread(maker[:60], "")


def _put_optimizer(value: Any, config: Config) -> None:
    """The group of parameters that no other takes, the last one; others have rates of their own, which are lost."""
    if not isinstance(value, Made):
        config.put("optimizer", value if isinstance(value, Unread) else Unread("it", ""))
        return
    groups = value.values.get("param_groups")
    if not isinstance(groups, list) or not groups or not all(isinstance(one, Made) for one in groups):
        config.put("optimizer", groups if isinstance(groups, Unread) else Unread("its groups of parameters", ""))
        return
    *others, last = groups
    for one in others:
        pattern = str(one.values.get("pattern", ""))[:60]
        config.lost.append(f"optimizer.param_groups of {pattern}: all parameters are trained as those of the last are")
    name = last.values.get("optimizer_name", "AdamW")
    given = last.values.get("optimizer_kwargs", {})
    if not isinstance(given, dict):
        config.put("optimizer", given if isinstance(given, Unread) else Unread("optimizer_kwargs", ""))
        return
    own = {} if last.maker == _ADAMW else _TORCH | {"weight_decay": _DECAY.get(str(name), 0.0)}
    _put_group(own | given, name, config)
    for key, one in value.values.items():
        if key != "param_groups":
            config.put(f"optimizer.{key}", one)


def _put_group(given: dict[str, Any], name: Any, config: Config) -> None:
    config.put(f"{GROUP}optimizer_name", name)
    for key, one in given.items():
        if key == "betas" and isinstance(one, list) and len(one) == 2:
            for place, beta in enumerate(one):
                config.put(f"{GROUP}optimizer_kwargs.betas.{place}", beta)
        else:
            config.put(f"{GROUP}optimizer_kwargs.{key}", one)


def tell_unread(settings: Settings, unknown: dict[str, Unread]) -> None:
    """Faults for what is not known and counts, and words for the rest. Names are those of the table."""
    for name, unread in unknown.items():
        inside = [one for one in settings.asked if one == name or one.startswith(name + ".")]
        shown = settings.shown(name)
        if any(settings.given.get(one) is None for one in inside):
            where = f" ({unread.where})" if unread.where else ""
            settings.faults.append(
                f"{shown} = {unread.text}{where} can't be known without running it; write its value there, say it as a "
                "flag of the command, or name the file with the function too"
            )
        elif not inside:
            settings.given[name] = unread.text
