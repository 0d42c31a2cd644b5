"""The result of torchtitan 0.3's configuration function, a Trainer.Config, as settings under the release's names."""

from dataclasses import dataclass, field
from typing import Any

from shardwright.config.phrase import say
from shardwright.interchange.reading.python_values import Named, ParsedCall, Unread, is_constant
from shardwright.interchange.reading.settings import Settings
from shardwright.interchange.reading.shell_words import ShellFault
from shardwright.interchange.systems.torchtitan_releases import GROUP

_ADAMW = "default_adamw"
# Functions of torchtitan whose calls are read from their arguments, even if a file defines the functions.
UNEXPANDED_FUNCTIONS = ("model_registry", "decoder_vocab_size")


def _default_adamw(positional: list[Any], keywords: dict[str, Any]) -> ParsedCall:
    """The result of torchtitan's default_adamw(). Its defaults equal those of the table."""
    group = {"pattern": ".*", "optimizer_name": "AdamW", "optimizer_kwargs": {}}
    group["optimizer_kwargs"] = dict(zip(("lr",), positional, strict=False)) | keywords
    return ParsedCall(CLASSES["optimizer"], {"param_groups": [ParsedCall(_ADAMW, group)]})


# Functions of torchtitan whose results the configuration function may change.
MAKERS = {_ADAMW: _default_adamw}
_POLICY_OF_ANY_MODE = "ActivationCheckpointConfig"  # of releases before those classes
POLICIES = {"selective": "SelectiveAC.Config", "full": "FullAC.Config", "memory-budget": "MemoryBudgetAC.Config"}
# Classes of the sections that affect a plan. Another class may have other defaults.
CLASSES = {
    "training": "TrainingConfig",
    "parallelism": "ParallelismConfig",
    "lr_scheduler": "LRSchedulersContainer.Config",
    "optimizer": "OptimizersContainer.Config",
    "compile": "CompileConfig",
}
# Defaults of torch's optimizers, for what a group of parameters leaves out.
_TORCH_OPTIMIZER_DEFAULTS = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}
_DEFAULT_WEIGHT_DECAY = {"AdamW": 0.01, "Adam": 0.0}
_REGISTRY = ("flavor", "attn_backend")  # positional arguments of model_registry
_MOST_SETTINGS, _MOST_LEVELS = 5_000, 20


@dataclass
class Config:
    """Settings of a configuration (`given`), settings with unknown values (`unread`), assumptions (`notes`), and
    settings that a job cannot express (`lost`)."""

    given: dict[str, Any] = field(default_factory=dict)
    unread: dict[str, Unread] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def put(self, name: str, value: Any, depth: int = 0) -> None:
        """Add a setting, or all settings within a nested value. Raises ShellFault."""
        if depth > _MOST_LEVELS or len(self.given) + len(self.unread) > _MOST_SETTINGS:
            raise ShellFault(
                say("the configuration has too many settings, or too deep ones; check that it is the file")
            )
        if isinstance(value, ParsedCall) and (value.is_of_class or not value.callee):
            expected = CLASSES.get(name)
            if expected and value.callee and value.short_callee not in (expected, expected.partition(".")[0]):
                self.notes.append(
                    say(
                        "{name}: {call} is taken for {expected}, with its defaults",
                        name=name,
                        call=value.short_callee[:60],
                        expected=expected,
                    )
                )
            if value.positional:
                self.notes.append(
                    say(
                        "{name}: arguments of {call} without names are not read",
                        name=name,
                        call=value.short_callee[:60],
                    )
                )
            for key, item in value.keywords.items():
                self.put(f"{name}.{key}", item, depth + 1)
        elif isinstance(value, dict):
            for key, item in value.items():
                self.put(f"{name}.{key}", item, depth + 1)
        elif isinstance(value, ParsedCall):
            self.unread[name] = Unread(f"{value.callee[:60]}(...)", "")
        elif isinstance(value, Named):
            self.given[name] = value.last
        elif isinstance(value, Unread):
            self.unread[name] = value
        else:
            self.given[name] = _as_constants(value)


def _as_constants(value: Any) -> Any:
    """The value; in a list, items that are no constants become their names, and inner lists become lists of text."""
    if isinstance(value, list):
        return [[str(word) for word in item] if isinstance(item, list) else _constant_or_name(item) for item in value]
    return value


def _constant_or_name(value: Any) -> Any:
    if isinstance(value, ParsedCall):
        return value.short_callee
    if isinstance(value, Named):
        return value.last
    return value if is_constant(value) else "..."


def config_of(result: Any, origin: str, family: str) -> Config:
    """The settings of the Trainer.Config that a function returns. `origin` is its file and name, for messages.

    `family` is the package of the model if no import names it. Raises ShellFault.
    """
    if isinstance(result, ParsedCall) and result.callee and not result.is_of_class:
        module, _, function = result.callee.rpartition(".")
        path = f"{module.strip('.').replace('.', '/')}.py"[:100]
        if not module.strip("."):
            path = say("the file with {function}", function=function[:60])
        raise ShellFault(
            say(
                "{origin} begins with {function}, which is in no file here; name {path} too",
                origin=origin,
                function=function[:60],
                path=path,
            )
        )
    if not isinstance(result, ParsedCall):
        shown = result.text if isinstance(result, Unread) else say("nothing that is known here")
        raise ShellFault(
            say(
                "{origin} returns {value}, and not a Trainer.Config; check that it is the function",
                origin=origin,
                value=shown,
            )
        )
    config = Config()
    if result.short_callee not in ("Trainer.Config", "Config", ""):
        config.notes.append(say("{call} is taken for Trainer.Config, with its defaults", call=result.short_callee[:60]))
    for name, value in result.keywords.items():
        if name == "model_spec":
            _put_model(value, config, family)
        elif name == "activation_checkpoint":
            _put_policy(value, config)
        elif name == "optimizer":
            _put_optimizer(value, config)
        else:
            config.put(name, value)
    if "optimizer" not in result.keywords:
        config.faults.append(say("optimizer is not said, and has no default; add optimizer=default_adamw(lr=RATE)"))
    return config


def _put_model(value: Any, config: Config, family: str) -> None:
    if not isinstance(value, ParsedCall) or value.short_callee != "model_registry":
        config.put("model_spec", value if isinstance(value, Unread) else Unread("it", ""))
        return
    package = value.callee.strip(".").split(".")[:-1]
    config.given["model_spec.name"] = package[-1] if package else family
    arguments = dict(zip(_REGISTRY, value.positional, strict=False)) | value.keywords
    for name, argument in arguments.items():
        if name == "flavor":
            config.put("model_spec.flavor", argument)
        elif name == "converters":
            _put_converters(argument, config)
        else:
            config.put(f"model_registry.{name}", argument)


def _put_converters(value: Any, config: Config) -> None:
    if not isinstance(value, list) or not all(isinstance(converter, ParsedCall) for converter in value):
        if value is not None:
            config.put("model_registry.converters", value if isinstance(value, Unread) else Unread("it", ""))
        return
    config.given["model_registry.converters"] = [converter.short_callee.removesuffix(".Config") for converter in value]
    for converter in value:
        for name, setting in converter.keywords.items():
            config.put(f"{converter.short_callee.removesuffix('.Config')}.{name}", setting)


def _put_policy(value: Any, config: Config) -> None:
    modes_by_class = {class_name: mode for mode, class_name in POLICIES.items()}
    if value is None:
        config.given["activation_checkpoint"] = "none"
    elif isinstance(value, ParsedCall) and value.short_callee in modes_by_class:
        config.given["activation_checkpoint"] = modes_by_class[value.short_callee]
        for name, setting in value.keywords.items():
            config.put(f"activation_checkpoint.{name}", setting)
    elif isinstance(value, ParsedCall) and value.short_callee == _POLICY_OF_ANY_MODE:
        settings = {"mode": "selective"} | value.keywords
        mode = settings.pop("mode")
        config.put("activation_checkpoint", mode.replace("_", "-") if isinstance(mode, str) else mode)
        for name, setting in settings.items():
            config.put(f"activation_checkpoint.{name}", setting)
    else:
        callee = value.short_callee if isinstance(value, ParsedCall) else "it"
        config.unread["activation_checkpoint"] = value if isinstance(value, Unread) else Unread(callee[:60], "")


def _put_optimizer(value: Any, config: Config) -> None:
    """Use the last parameter group, whose pattern matches every remaining parameter. The other groups cannot be
    expressed in a job."""
    if not isinstance(value, ParsedCall):
        config.put("optimizer", value if isinstance(value, Unread) else Unread("it", ""))
        return
    if "param_groups" not in value.keywords and value.short_callee == CLASSES["optimizer"]:
        _put_one_group(dict(value.keywords), config)
        return
    groups = value.keywords.get("param_groups")
    if not isinstance(groups, list) or not groups or not all(isinstance(group, ParsedCall) for group in groups):
        config.put("optimizer", groups if isinstance(groups, Unread) else Unread(say("its groups of parameters"), ""))
        return
    *others, default_group = groups
    for group in others:
        pattern = str(group.keywords.get("pattern", ""))[:60]
        config.lost.append(
            say(
                "optimizer.param_groups of {pattern}: all parameters are trained as those of the last are",
                pattern=pattern,
            )
        )
    name = default_group.keywords.get("optimizer_name", "AdamW")
    given = default_group.keywords.get("optimizer_kwargs", {})
    if not isinstance(given, dict):
        config.put("optimizer", given if isinstance(given, Unread) else Unread("optimizer_kwargs", ""))
        return
    weight_decay = _DEFAULT_WEIGHT_DECAY.get(str(name), 0.0)
    defaults = {} if default_group.callee == _ADAMW else _TORCH_OPTIMIZER_DEFAULTS | {"weight_decay": weight_decay}
    _put_group(defaults | given, name, config)
    for key, setting in value.keywords.items():
        if key != "param_groups":
            config.put(f"optimizer.{key}", setting)


def _put_one_group(settings: dict[str, Any], config: Config) -> None:
    """Use the settings of an optimizer that stand in its class itself, as before there were groups of parameters."""
    betas = [settings.pop(name, default) for name, default in (("beta1", 0.9), ("beta2", 0.95))]
    own = {name: settings.pop(name) for name in ("lr", "eps", "weight_decay") if name in settings}
    _put_group(own | {"betas": betas}, settings.pop("name", "AdamW"), config)
    for name, setting in settings.items():
        config.put(f"optimizer.{name}", setting)


def _put_group(settings: dict[str, Any], name: Any, config: Config) -> None:
    config.put(f"{GROUP}optimizer_name", name)
    for key, setting in settings.items():
        if key == "betas" and isinstance(setting, list) and len(setting) == 2:
            for place, beta in enumerate(setting):
                config.put(f"{GROUP}optimizer_kwargs.betas.{place}", beta)
        else:
            config.put(f"{GROUP}optimizer_kwargs.{key}", setting)


def tell_unread(settings: Settings, unknown: dict[str, Unread]) -> None:
    """Add a fault for each unknown setting that the table reads, and the text of each other one as its value.

    The keys of `unknown` are names of the table. Call it after the settings are read.
    """
    for name, unread in unknown.items():
        read_names = [
            read_name for read_name in settings.names_read if read_name == name or read_name.startswith(name + ".")
        ]
        shown = settings.shown(name)
        if any(settings.given.get(read_name) is None for read_name in read_names):
            settings.faults.append(
                say(
                    "{name} = {code}{place} can't be known without running it; write its value there, say it as a flag "
                    "of the command, or name the file with the function too",
                    name=shown,
                    code=unread.text,
                    place=say(" ({place})", place=unread.place) if unread.place else "",
                )
            )
        elif not read_names:
            settings.given[name] = unread.text
