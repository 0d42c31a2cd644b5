"""The command that serves the page to plan a job by hand."""

import os
import sys
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import click

from shardwright.cli.command_language import command_language, tell
from shardwright.cli.job_options import (
    PredictCommand,
    asked_cluster,
    cluster_options,
    expect_many_actions,
    language_option,
    set_option,
)
from shardwright.cli.progress_bar import progress_shown
from shardwright.config.phrase import say

if TYPE_CHECKING:
    from shardwright.config.asked_cluster import AskedCluster

_NEEDED = say("the page takes starlette and uvicorn: pip install 'shardwright[studio]'")


@click.command(cls=PredictCommand)
@click.argument("job", default="gpt3-175b-1024")
@set_option
@cluster_options
@language_option
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of the page.  [default: any free one]")
@click.option("--open/--no-open", "in_browser", default=True, show_default=True, help="Open the page in a browser.")
def studio(
    job: str, overrides: tuple[str, ...], port: int, in_browser: bool, language: str, **cluster_fields: str
) -> None:
    """Plan JOB by hand, on a page of this machine: memory, time, timeline, traffic and money after each change.

    The page is for this machine alone (127.0.0.1), and loads nothing from elsewhere. It ends with Ctrl-C.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        from shardwright.config.base import PlanError

        raise PlanError("studio", [_NEEDED]) from None
    with progress_shown(command_language()):  # for a model, whose best plan is where the page begins
        texts = _state_texts(job, overrides, asked_cluster(dict(cluster_fields)))
    from shardwright.studio.plan_answer import warm_up
    from shardwright.studio.studio_server import listening, server_at

    expect_many_actions()
    warm_up()
    connection = listening(port)
    address = f"http://127.0.0.1:{connection.getsockname()[1]}/#{urlencode(texts)}"
    tell(say("The studio is at {address}\nCtrl-C ends it.", address=address))
    if in_browser and _has_display():
        click.launch(address)
    server_at(connection, texts, language).run(sockets=[connection])
    tell(say("The studio has ended."))


def _has_display() -> bool:
    """True if a browser can open a window here. Elsewhere one in the terminal would start, or none."""
    is_of_x11 = sys.platform not in ("darwin", "win32", "cygwin")
    return not is_of_x11 or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _state_texts(job: str, overrides: tuple[str, ...], cluster: "AskedCluster") -> dict[str, str]:
    """The state with which the page begins: a name of the catalog as it is, a model under its best plan, a file by its
    fields. Raises PlanError."""
    from shardwright.api.asked_job import AskedJob
    from shardwright.config import catalog
    from shardwright.config.device_name import catalog_device
    from shardwright.studio.dropped_file import job_texts
    from shardwright.studio.page_state import PageState

    asked_job = AskedJob(job, overrides, cluster)
    if asked_job.job_fields.is_model and job not in catalog.names("models"):
        job = catalog.asked_model_name(job)  # as people write it: "Llama 3 70B"
    is_model = asked_job.job_fields.is_model and job in catalog.names("models")
    if not is_model and (asked_job.job_fields.is_model or job not in catalog.names("jobs")):
        return job_texts(asked_job.to_predict()[0])
    named = {name: str(value) for name, value in vars(cluster).items() if value}
    if cluster.device:
        named["device"] = catalog_device(cluster.device)
    plan = job_texts(asked_job.to_predict()[0]) if is_model else {}
    best = {key: text for key, text in plan.items() if key.startswith("plan.")}
    pairs = (override.partition("=") for override in overrides)
    return dict(PageState.read({"job": job} | named | best | {key.strip(): text for key, _, text in pairs}).texts)


COMMANDS = (studio,)
