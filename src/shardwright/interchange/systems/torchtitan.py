"""torchtitan 0.3: a job from a launch script and the Python file with its configuration function, and back.

The command line names the configuration function, and has flags that override its result.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.interchange.imported import Asked, ReadResult
from shardwright.interchange.known_settings import program
from shardwright.interchange.launcher import Launched, find_training_command, missing_ranks
from shardwright.interchange.reading.file_signs import FileSigns
from shardwright.interchange.reading.python_source import Reader, Source, source_of_text
from shardwright.interchange.reading.script_text import script_text
from shardwright.interchange.reading.settings import Settings
from shardwright.interchange.reading.shell_marks import UNKNOWN, mark, unknown_names
from shardwright.interchange.reading.shell_words import ShellFault
from shardwright.interchange.system import RunFiles, System
from shardwright.interchange.systems import torchtitan_toml
from shardwright.interchange.systems.torchtitan_config import MAKERS, UNEXPANDED_FUNCTIONS, config_of, tell_unread
from shardwright.interchange.systems.torchtitan_python import FUNCTION, python_text, python_value
from shardwright.interchange.systems.torchtitan_releases import FLAVORS, IN_PYTHON, read_settings
from shardwright.interchange.systems.torchtitan_run import RunLines, run_lines
from shardwright.interchange.systems.torchtitan_table import PARTS

SIGNS = (FileSigns(commands=(r"torchtitan",)),)
_SCRIPT_ARGUMENTS = (mark("@"), mark("*"))  # "$@" and "$*": arguments of the script itself
CONFIG = "CONFIG"  # the variable that names the configuration function
_REGISTRY = "config_registry"  # the module of a package that has its configuration functions
_WRITTEN_MODULE = "job_config"  # the module that `write` writes, with the configuration function


def is_training(words: list[str]) -> bool:
    """True if a command trains with torchtitan."""
    flags = {word.partition("=")[0] for word in words}
    programs = (word.removesuffix(".py").replace("/", ".") for word in words)
    return any(name.endswith(program("torchtitan")) for name in programs) or {"--module", "--config"} <= flags


def read(texts: Mapping[str, str], asked: Asked) -> ReadResult:
    """Read a launch script and the Python files that `texts` has beside it. Raises ShellFault."""
    if any(sign.fit_script(text) for text in [*texts.values()][:1] for sign in torchtitan_toml.SIGNS):
        return torchtitan_toml.read(texts, asked)
    scripts = {name: text for name, text in texts.items() if PurePath(name).suffix != ".py"}
    command = find_training_command(scripts, asked, is_training) if scripts else Launched({}, {}, 0, 0)
    # Arguments behind a configuration in Python are those of the command that starts it.
    arguments = [word for word in (command.arguments if scripts else asked.arguments) if word not in _SCRIPT_ARGUMENTS]
    words, notes = command_line(arguments), list(command.notes)
    if scripts and len(arguments) < len(command.arguments):  # the arguments passed to the script itself are unknown
        notes.append(say("flags that the script itself is started with are not here"))
    sources = [source_of_text(name, text) for name, text in texts.items() if name not in scripts]
    reader = Reader(sources, dict(command.exported) | dict(asked.variables), UNEXPANDED_FUNCTIONS, MAKERS)
    source, name = _function(words, reader, asked)
    config = config_of(reader.call(source, name, [], {}), f"{source.short}: {name}", _family(source, words.module))
    if any(flag.startswith("optimizer.") for flag in words.given):
        config.faults = [fault for fault in config.faults if not fault.startswith("optimizer ")]
    for flag in words.given:
        config.unread.pop(flag, None)
    settings = Settings(
        IN_PYTHON.plain(config.given | words.given),
        spelled=IN_PYTHON.spelled,
        notes=[*notes, *reader.notes, *config.notes],
        lost=config.lost,
        faults=config.faults,
        overrides=asked.fields,
    )
    settings.faults += IN_PYTHON.faults(config.given | words.given)
    _report_lost(settings)
    settings.faults += [] if asked.cluster.devices else missing_ranks(command)
    result = read_settings(settings, IN_PYTHON, asked, command.nodes, command.devices_per_node)
    tell_unread(settings, IN_PYTHON.plain(config.unread))
    return result


def module_files(texts: Mapping[str, str], asked: Asked) -> list[str]:
    """The ends of the paths of Python files that a launch script names (--module) and that such files import from.
    Raises ShellFault."""
    if any(sign.fit_script(text) for text in [*texts.values()][:1] for sign in torchtitan_toml.SIGNS):
        return []
    scripts = {name: text for name, text in texts.items() if PurePath(name).suffix != ".py"}
    ends = list[str]()
    if scripts:
        arguments = find_training_command(scripts, asked, is_training).arguments
        module = command_line([word for word in arguments if word not in _SCRIPT_ARGUMENTS]).module
        path = module.replace(".", "/").removesuffix(f"/{_REGISTRY}")
        has_python = len(scripts) < len(texts)  # the user says which
        ends += (
            [f"{path}/{_REGISTRY}.py", f"{path}.py"] if path.replace("/", "").isidentifier() and not has_python else []
        )
    for source in [source_of_text(name, text) for name, text in texts.items() if name not in scripts]:
        paths = (path.strip(".").rpartition(".")[0] for path in source.imports.values())
        ends += [f"{path.replace('.', '/')}.py" for path in paths if path.rpartition(".")[2] == _REGISTRY]
    return list(dict.fromkeys(ends))


def _report_lost(settings: Settings) -> None:
    """Report the settings that a job cannot express."""
    settings.lose("model_registry.num_mtp_layers", say("layers that predict further tokens are not in the model here"))
    settings.lose("model_registry.non_blocking_capacity_factor", say("experts take all of their tokens here"))
    settings.lose("parallelism.pipeline_parallel_schedule_csv", say("a schedule of one's own is not read"))


def _function(words: "CommandLine", reader: Reader, asked: Asked) -> tuple[Source, str]:
    """The file and the name of the configuration function. The command names it, or else --set CONFIG=NAME."""
    for flag, text in (("module", words.module), ("config", words.config)):
        if UNKNOWN.search(text):
            ways = " ".join(f"--set {name}=VALUE" for name in unknown_names(text))
            raise ShellFault(
                say("{setting} depends on what nobody has set; say it: {ways}", setting=f"--{flag}", ways=ways)
            )
    if "job.config_file" in words.given:
        raise ShellFault(say("--job.config_file is of torchtitan up to 0.2; name that TOML alone, without the script"))
    name = words.config or asked.variables.get(CONFIG, "")
    if not name:
        names = [name for source in reader.sources for name in source.functions if not name.startswith("_")]
        known = say(" (functions in the files: {names})", names=tuple(names[:20])) if names else ""
        if len(names) != 1:
            raise ShellFault(
                say("nothing names the configuration function{known}; say it with --set CONFIG=NAME", known=known)
            )
        name = names[0]
    source = reader.find(name, words.module)
    if source is None:
        module = words.module[:60]
        path = f"torchtitan/models/{module}/{_REGISTRY}.py"
        raise ShellFault(
            say(
                "the settings are what the Python function {function} of {module} returns, and it is in no file here; "
                "name its file behind the script (plan: --with FILE), such as {path}",
                function=name[:60],
                module=module or say("its module"),
                path=path if module.isidentifier() else say("that of {module}", module=module),
            )
        )
    return source, name


def _family(source: Source, module: str) -> str:
    """The package of models that relative imports refer to: the file's folder, or a part of the module's name."""
    families = {family for family, _ in FLAVORS}
    parts = [PurePath(source.name).parent.name, *reversed(module.split("."))]
    return next((part for part in parts if part in families), module.rpartition(".")[2])


def settings_of(job: JobSpec) -> dict[str, Any]:
    """A job's settings under torchtitan's names."""
    return IN_PYTHON.settings(job)


def write(job: JobSpec) -> dict[str, str]:
    """The launch script and the Python file with its configuration function, by file name."""
    return _files(job, None)


def write_to_run(job: JobSpec, folder: Path, step_s: float) -> dict[str, str]:
    """The launch script and the Python file of a job with its data and with checkpoints. Raises PlanError."""
    return _files(job, run_lines(job, folder, step_s, python_value))


def _files(job: JobSpec, run: RunLines | None) -> dict[str, str]:
    words = [f"--module {_WRITTEN_MODULE}", f"--config {FUNCTION}"]
    exports = {"PYTHONPATH": '"${0%/*}:${PYTHONPATH:-}"'}
    script = script_text(job, "torchtitan", f"-m {program('torchtitan')}", {"CONFIG": words}, exports)
    return {"run.sh": script, f"{_WRITTEN_MODULE}.py": python_text(job, IN_PYTHON.written(job), run)}


_WORDS = {"True": True, "False": False, "None": None}


_POLICY = "activation_checkpoint"


@dataclass
class CommandLine:
    """The module and the name of the configuration function, and settings under the release's names."""

    module: str = ""
    config: str = ""
    given: dict[str, Any] = field(default_factory=dict)


def command_line(words: list[str]) -> CommandLine:
    """Parse the words behind torchtitan.train."""
    flags: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            flags[name] = [value] if equals else []
        elif word.replace("-", "_").startswith(f"{_POLICY}:"):  # the class of a field that has several possible classes
            flags[_POLICY], name = [word.partition(":")[2]], ""
        elif name:
            flags[name].append(word)
    line = CommandLine(" ".join(flags.pop("module", [])), " ".join(flags.pop("config", [])))
    for name, values in flags.items():
        _put(name, values, line.given)
    return line


def _put(name: str, values: list[str], given: dict[str, Any]) -> None:
    section, _, key = name.rpartition(".")
    if not values and key.startswith("no_"):
        given[f"{section}.{key[3:]}"] = False
    elif name == PARTS:
        given[name] = [value.split(",") for value in values]
    elif name.endswith(".betas") and len(values) == 2:
        given |= {f"{name}.{place}": value for place, value in enumerate(values)}
    elif len(values) == 1:
        given[name] = _WORDS.get(values[0], values[0])
    else:
        given[name] = values or True


FACTS = System(
    name="torchtitan",
    place=40,
    title="torchtitan",
    read=read,
    write=write,
    settings=settings_of,
    software="torchtitan-2025",
    written=torchtitan_toml.WRITTEN,
    others={".toml": torchtitan_toml.FACTS.name},
    variables=(CONFIG,),
    signs=SIGNS,
    takes=(),
    modules=module_files,
    run_files=RunFiles(program("torchtitan").replace(".", "/") + ".py", write_to_run),
)
