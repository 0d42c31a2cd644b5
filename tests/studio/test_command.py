"""The command that serves the planning page: the address that it prints, and what it says without its packages."""

import signal
import sys
from urllib.parse import parse_qsl

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("starlette", reason="the planning page takes shardwright[studio]")

import shardwright as sw
from shardwright.cli.main import cli
from shardwright.config.base import PlanError
from shardwright.config.load import load_job
from shardwright.studio.page_state import PageState
from shardwright.studio.studio_server import StudioServer


def state_of(*words: str) -> dict[str, str]:
    """The state with which the page begins."""
    done = CliRunner().invoke(cli, ["studio", "--no-open", *words])
    assert done.exit_code == 0, done.output
    address, _, state = done.output.split()[4].partition("/#")
    assert address.startswith("http://127.0.0.1:")
    return dict(parse_qsl(state))


@pytest.fixture(autouse=True)
def no_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: [connection.close() for connection in sockets])


def test_a_job_of_the_catalog_begins_as_it_is() -> None:
    assert state_of(
        "gpt3-175b-1024", "--set", "plan.zero=1", "--as", "megatron-core", "--devices", "512", "--memory-gib", "40"
    ) == {
        "job": "gpt3-175b-1024",
        "devices": "512",
        "memory_gib": "40.0",
        "plan.zero": "1",
        "cluster.software": "megatron-core",
    }


def test_a_file_and_a_model_begin_with_their_fields() -> None:
    job = PageState.read(state_of("docs/job.toml")).job()
    expected = load_job("docs/job.toml")
    assert (job.model, job.plan, job.batch) == (expected.model, expected.plan, expected.batch)
    state = state_of("tiny-llama", "--devices", "4", "--device", "h100-sxm", "--set", "plan.tp=2", "--set", "plan.dp=2")
    plan = PageState.read(state).job().plan
    assert (plan.tp, plan.dp, plan.world) == (2, 2, 4)


@pytest.mark.usefixtures("searched_once")
def test_a_model_of_the_catalog_is_known_by_its_name_under_its_best_plan() -> None:
    state = state_of("tiny-llama", "--devices", "2", "--device", "h100-sxm")
    assert (state["job"], state["devices"], state["device"]) == ("tiny-llama", "2", "h100-sxm")
    job, best = PageState.read(state).job(), sw.load("tiny-llama", devices=2, device="h100-sxm").spec
    assert (job.name, job.plan, job.batch, job.model) == ("tiny-llama", best.plan, best.batch, best.model)
    assert PageState.read({"model.name": "tiny-llama"}).asked.subject.endswith("tiny-llama")


def test_without_its_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    done: Result = CliRunner().invoke(cli, ["studio"])
    assert isinstance(done.exception, PlanError)
    assert done.exception.faults == ["the page takes starlette and uvicorn: pip install 'shardwright[studio]'"]


def test_a_second_ctrl_c_ends_the_page_as_the_first_does() -> None:
    """uvicorn's own forced end prints errors of what it leaves, and raises the signal again."""
    server = StudioServer.__new__(StudioServer)
    server.should_exit = server.force_exit = False
    server._captured_signals = []
    for _ in range(2):
        server.handle_exit(signal.SIGINT, None)
    assert (server.should_exit, server.force_exit, server._captured_signals) == (True, False, [])


@pytest.mark.usefixtures("searched_once")
def test_models_and_devices_are_known_as_people_type_them() -> None:
    exact = state_of("llama3-8b", "--devices", "8", "--device", "h100-sxm")
    assert exact["device"] == "h100-sxm"
    assert state_of("Llama 3 8B", "--devices", "8", "--device", "H100") == exact
