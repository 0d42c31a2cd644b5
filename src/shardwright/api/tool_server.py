"""The predictions as tools of an agent, by the Model Context Protocol (modelcontextprotocol.io): a server on standard
input and output, which a client of that protocol starts as `shardwright mcp`.

A tool reads a job as `load` does and answers in data. A job that is wrong is an answer, too: the text of its faults
with their ways out.
"""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from shardwright import __version__
from shardwright.api.found_plans import PlanQuestion
from shardwright.api.loaded_job import Job, load
from shardwright.api.tool_arguments import tool_arguments
from shardwright.config import catalog
from shardwright.config.base import PlanError, RunError, error_text, shortened, together
from shardwright.config.load import subject_of
from shardwright.config.phrase import say
from shardwright.config.toml_file import TOML_ERRORS, parse_toml, value_faults

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

_SUBJECT = say("job")  # of a text
NUM_PLANS = 3  # an agent reads every one of them
INSTRUCTIONS = (
    "Shardwright predicts memory, time and money of training a transformer on a cluster, and finds the best parallel "
    "plan. Use `catalog` for names of models, devices and jobs, `plan` to choose a plan, `estimate` to judge one, "
    "`explain` to tell a step, `check` for the faults of a job, `import` for a script or configuration of Megatron-LM, "
    "DeepSpeed, torchtitan and others: its `toml`, and the one that `plan` recommends, are a `job` of other tools. "
    "Numbers are predictions: bytes, seconds, US dollars. Messages name options of the command line: --set FIELD=VALUE "
    "is an entry of `overrides` (--devices-per-node 8 is cluster.devices_per_node=8, --as NAME cluster.software=NAME), "
    "--devices, --device and --keep are arguments, and what `shardwright models`, `devices` and `software` list is in "
    "`catalog`."
)

JobName = Annotated[
    str,
    Field(
        description="A name of the catalog (a job, or a model with `devices` and `device`), the path of a TOML file or "
        "of a config.json, or the text of a TOML file, such as the `toml` that `import` answers.",
        examples=["quickstart"],
    ),
]
Overrides = Annotated[
    Sequence[str],
    Field(
        description='Fields in place of the job\'s own, as "section.field=value", such as "plan.tp=4" or '
        '"cluster.software=megatron-2023".',
        examples=["plan.tp=4"],
    ),
]
Devices = Annotated[
    int, Field(description="Number of devices of the cluster; 0 keeps the job's own.", ge=0, examples=[8])
]
Device = Annotated[
    str,
    Field(description='Device of the cluster, such as "h100-sxm"; empty keeps the job\'s own.', examples=["h100-sxm"]),
]
Kept = Annotated[
    Sequence[str], Field(description='Fields of the plan that stay, such as "plan.tp=8".', examples=["plan.tp=8"])
]
Files = Annotated[
    Sequence[str],
    Field(description="Paths of a launch script or configuration of another training system.", examples=["run.sh"]),
]
SystemName = Annotated[
    str,
    Field(description='Its name, such as "megatron"; empty: recognised from the first file.', examples=["megatron"]),
]
ObjectiveName = Annotated[str, Field(description="time, goodput, cost, energy, devices or memory.", examples=["time"])]


def estimate(job: JobName, overrides: Overrides = (), devices: Devices = 0, device: Device = "") -> dict[str, Any]:
    """Predict a job under its plan (without one, under the best): memory of each rank by kind, fit, seconds of a step,
    MFU, money, energy."""
    loaded = _loaded(job, overrides, devices, device)
    answer = loaded.estimate().to_dict()
    return answer | {"notes": [*_assumptions(loaded), *answer["notes"]]}


def plan(
    job: JobName,
    overrides: Overrides = (),
    devices: Devices = 0,
    device: Device = "",
    keep: Kept = (),
    objective: ObjectiveName = "time",
) -> dict[str, Any]:
    """Find the best plans of a job on its cluster, fastest first; the recommended one also as a TOML file, which every
    command of Shardwright reads."""
    options = PlanQuestion(keep=keep, objective=objective).read(_subject(job))
    load_job = partial(_loaded, job, overrides, devices, device)
    loaded, _ = together(_subject(job), load_job, options.constraints)
    plans = loaded.plan(top=NUM_PLANS, keep=keep, objective=objective)
    recommended = None if plans.best is None else plans.recommended.toml()
    return {"notes": list(loaded.notes), "plans": plans.dicts(), "recommended_toml": recommended}


def explain(job: JobName, overrides: Overrides = (), devices: Devices = 0, device: Device = "") -> str:
    """Tell one step of a job: where the batch goes, what each device holds, what crosses which link, how long."""
    loaded = _loaded(job, overrides, devices, device)
    return "\n\n".join([*(f"Note: {note}." for note in _assumptions(loaded)), str(loaded.explain())])


def check(job: JobName, overrides: Overrides = (), devices: Devices = 0, device: Device = "") -> dict[str, Any]:
    """Check a job and its plan: every fault with its way out. `fits` is null on a device of unknown memory."""
    try:
        fits = _loaded(job, overrides, devices, device).estimate().fits
    except PlanError as error:
        return {"is_legal": False, "faults": list(error.faults), "fits": None}
    return {"is_legal": True, "faults": [], "fits": fits}


def import_files(
    files: Files, system: SystemName = "", overrides: Overrides = (), devices: Devices = 0, device: Device = ""
) -> dict[str, Any]:
    """Read the job of another training system. `toml` is a job for the other tools, as it is. The rest is what was
    assumed, and what of the files the job lacks. Nothing of the files is run."""
    from shardwright.api.asked_job import planned
    from shardwright.api.imported_job import imported_job, system_and_files
    from shardwright.config.asked_cluster import AskedCluster
    from shardwright.report.imported_text import imported_dict
    from shardwright.report.toml_files import job_toml

    if not files:
        raise PlanError("tool import", [say("files is empty; name a launch script or a configuration")])
    words = (system, *files) if system else tuple(files)
    name, paths = system_and_files(words)
    imported = imported_job(name, paths, tuple(overrides), AskedCluster(device=device, devices=devices))
    planned(say("job {name}", name=imported.job.name), imported.job)
    return {"system": name, "toml": job_toml(imported.job)} | imported_dict(imported)


def catalog_names() -> dict[str, list[str]]:
    """The names that jobs may use: jobs, models, devices, clusters, software."""
    return {kind: catalog.names(kind) for kind in ("jobs", "models", "devices", "clusters", "software")}


TOOLS: dict[str, Callable[..., Any]] = {
    "estimate": estimate,
    "plan": plan,
    "explain": explain,
    "check": check,
    "import": import_files,
    "catalog": catalog_names,
}


def tool_server() -> "MCPServer[Any]":
    """The server with all tools. RunError if the package `mcp` is missing."""
    try:
        from mcp.server.mcpserver import MCPServer
        from mcp.types import ToolAnnotations
    except ImportError:
        raise RunError(
            say("mcp needs the package mcp, which is not installed: `pip install 'shardwright[mcp]'`")
        ) from None
    from mcp.server.mcpserver.exceptions import ToolError

    class StrictServer(MCPServer[Any]):
        """A server that refuses a call by all faults of its arguments: the protocol's own drops those that a tool does
        not have."""

        async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
            if name not in TOOLS:
                raise ToolError(f"no tool is named {shortened(name, 80)}; use {', '.join(TOOLS)}")
            try:
                taken = tool_arguments(TOOLS[name], name, arguments)
            except PlanError as error:
                raise ToolError(str(error)) from None
            return await super().call_tool(name, taken, context)

    server = StrictServer("shardwright", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING")
    reads_only = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)
    for name, tool in TOOLS.items():
        server.tool(name, annotations=reads_only)(_with_faults_as_text(tool))
    return server


def _with_faults_as_text(tool: Callable[..., Any]) -> Callable[..., Any]:
    """The tool, whose PlanError and RunError reach the client as the text that a command prints."""
    from mcp.server.mcpserver.exceptions import ToolError

    @wraps(tool)
    def answer(*args: Any, **kwargs: Any) -> Any:
        try:
            return tool(*args, **kwargs)
        except (PlanError, RunError) as error:
            raise ToolError(str(error)) from None

    return answer


def _assumptions(job: Job) -> tuple[str, ...]:
    """Sentences on values that nobody stated, such as the batch of a model and the plan of a job without one."""
    return job.to_predict()[1]


def _loaded(job: str, overrides: Sequence[str], devices: int, device: str) -> Job:
    return load(_fields(job) if "\n" in job else job, *overrides, devices=devices, device=device)


def _fields(text: str) -> dict[str, Any]:
    """The fields of a job's TOML text. Raises PlanError."""
    try:
        fields = parse_toml(text)
    except TOML_ERRORS as error:
        fault = say("the text is not valid TOML: {reason}; mend it, or give a name or a path", reason=error_text(error))
        raise PlanError(_SUBJECT, [fault]) from None
    if faults := value_faults(fields):
        raise PlanError(_SUBJECT, faults[:1])
    return fields


def _subject(job: str) -> str:
    """The subject of a message about a job, which need not have a name."""
    return _SUBJECT if "\n" in job else subject_of(job)
