"""The tools of an agent, asked by the protocol's own client: the answers of the Python API, and faults as text."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import shardwright as sw
from shardwright.api.tool_server import NUM_PLANS, TOOLS, tool_server
from support.ranks import PATIENCE_S

pytestmark = pytest.mark.usefixtures("searched_once")

ON_8 = {"devices": 8, "device": "h100-sxm"}
KEEP = ["plan.tp=2", "plan.pp=1", "plan.microbatch_size=1"]  # of few plans the best is soon found


def asked(server: Any, name: str, arguments: Mapping[str, Any]) -> tuple[bool, Any]:
    """(true if it failed, the answer) of one call of a tool."""

    from mcp import Client  # which takes a second, in each process that collects tests

    async def call() -> tuple[bool, Any]:
        async with Client(server) as client:
            result = await client.call_tool(name, dict(arguments))
            text = result.content[0].text
            return result.is_error, text if result.is_error or name == "explain" else json.loads(text)

    return asyncio.run(call())


def test_every_tool_describes_itself_and_its_arguments() -> None:
    from mcp import Client

    async def listed() -> list[Any]:
        async with Client(tool_server()) as client:
            return list((await client.list_tools()).tools)

    tools = {tool.name: tool for tool in asyncio.run(listed())}
    assert tools.keys() == TOOLS.keys()
    for tool in tools.values():
        assert tool.description and tool.annotations.read_only_hint
        assert all(argument.get("description") for argument in tool.input_schema["properties"].values()), tool.name


@pytest.mark.long
def test_answers_are_those_of_the_python_api() -> None:
    job = sw.load("tiny-llama", "plan.zero=1", **ON_8)
    question = {"job": "tiny-llama", "overrides": ["plan.zero=1"], **ON_8}
    server = tool_server()
    failed, estimate = asked(server, "estimate", question)
    own = json.loads(json.dumps(job.estimate().to_dict()))
    assumed = list(job.to_predict()[1])
    assert any("sequences" in note for note in assumed) and any("the plan is what" in note for note in assumed)
    assert not failed and estimate == own | {"notes": [*assumed, *own["notes"]]}
    failed, plans = asked(server, "plan", {"job": "tiny-llama", **ON_8, "keep": KEEP})
    assert not failed and len(plans["plans"]) == NUM_PLANS
    best = sw.load("tiny-llama", **ON_8).plan(keep=KEEP).recommended
    assert plans["recommended_toml"] == best.toml()
    failed, story = asked(server, "explain", question)
    assert not failed and story.endswith(str(job.explain())) and all(f"Note: {note}." in story for note in assumed)
    assert "tiny-llama" in asked(server, "catalog", {})[1]["models"]


def test_faults_of_a_job_are_answers() -> None:
    server = tool_server()
    wrong = {"job": "quickstart", "overrides": ["plan.tp=3"]}
    with pytest.raises(sw.PlanError) as refused:
        _ = sw.load("quickstart", "plan.tp=3").spec
    assert asked(server, "check", wrong) == (
        False,
        {"is_legal": False, "faults": list(refused.value.faults), "fits": None},
    )
    failed, text = asked(server, "estimate", wrong)
    assert failed and all(fault in text for fault in refused.value.faults)
    too_large = ["plan.dp=8", "plan.zero=0", "plan.offload_optimizer=0.0"]
    assert asked(server, "check", {"job": "llama3-8b", "overrides": too_large, **ON_8})[1]["fits"] is False
    failed, text = asked(server, "estimate", {"job": "no-such-model"})
    assert failed and "no-such-model" in text


def test_a_script_of_another_system_becomes_a_job_of_the_other_tools(tmp_path: Path) -> None:
    script, server = str(Path(__file__).parents[2] / "docs" / "pretrain.sh"), tool_server()
    failed, answer = asked(server, "import", {"files": script, "device": "a100-sxm-80g"})
    assert not failed and answer["system"] == "megatron" and answer["assumed"] and answer["job"]["plan"]
    job = tmp_path / "job.toml"
    job.write_text(answer["toml"])
    estimate = asked(server, "estimate", {"job": str(job)})
    assert estimate[1]["step_s"] > 0
    assert asked(server, "estimate", {"job": answer["toml"]}) == estimate  # for an agent that writes no files
    assert asked(server, "check", {"job": answer["toml"]})[1]["is_legal"]
    for broken in ("[model]\nlayers = \n", "a = 1" + "0" * 30 + "\n", "[" * 99 + "\n"):
        failed, text = asked(server, "estimate", {"job": broken})
        assert failed and "job: 1 fault" in text
    named = asked(server, "import", {"files": [script], "system": "megatron", "device": "a100-sxm-80g"})
    assert named == (False, answer)
    failed, text = asked(server, "import", {"files": [script], "system": "megatrn"})
    assert failed and "neither a system nor a file; did you mean megatron" in text
    failed, text = asked(server, "import", {"files": [], "device": "h100-sxm"})
    assert failed and "files is empty" in text
    failed, text = asked(server, "estimate", {"job": script})
    assert failed and "looks like a file of Megatron-LM" in text


def test_a_device_without_a_usual_node_is_said_by_a_field() -> None:
    server, asking = tool_server(), {"job": "tiny-llama", "devices": 4, "device": "rtx-4090"}
    failed, text = asked(server, "estimate", asking)
    assert failed and "nothing is known of the usual node of rtx-4090" in text
    answer = asked(server, "estimate", asking | {"overrides": ["cluster.devices_per_node=4"]})
    own = sw.load("tiny-llama", devices=4, device="rtx-4090", devices_per_node=4)
    assert not answer[0] and answer[1]["step_s"] == own.estimate().step_s
    assert (own.spec.cluster.nodes, own.spec.cluster.devices_per_node) == (1, 4)


def test_an_argument_that_a_tool_does_not_have_is_refused() -> None:
    failed, text = asked(tool_server(), "estimate", {"job": "quickstart", "gpu": "h100-sxm"})
    assert (
        failed and text == "tool estimate: 1 fault\n  1. no argument is named gpu; use job, overrides, devices, device"
    )


def test_arguments_of_the_wrong_types_are_one_list_of_faults() -> None:
    server = tool_server()
    wrong = {"gpu": 1, "devices": "many", "device": 7, "overrides": [1]}
    assert asked(server, "estimate", wrong) == (
        True,
        "tool estimate: 5 faults\n"
        "  1. no argument is named gpu; use job, overrides, devices, device\n"
        "  2. job is missing; it is a text, such as 'quickstart'\n"
        "  3. overrides is [1]; use texts, such as ['plan.tp=4']\n"
        "  4. devices is 'many'; use a whole number, 0 or more\n"
        "  5. device is 7; use a text, such as 'h100-sxm'",
    )
    assert asked(server, "fly", {})[1] == "no tool is named fly; use estimate, plan, explain, check, import, catalog"
    as_text = {"job": "quickstart", "devices": "8", "device": "h100-sxm", "overrides": "plan.tp=3"}
    failed, answer = asked(server, "check", as_text)
    assert not failed and "plan.tp 3 does not divide 8 heads" in answer["faults"][0]


@pytest.mark.processes
def test_the_command_speaks_with_a_client_over_its_standard_streams() -> None:
    from mcp import StdioServerParameters

    command = StdioServerParameters(command=sys.executable, args=["-m", "shardwright", "mcp"], env=dict(os.environ))
    assert asked(command, "check", {"job": "quickstart"}) == (False, {"is_legal": True, "faults": [], "fits": None})


@pytest.mark.processes
def test_who_starts_it_by_hand_is_told_what_does() -> None:
    """In a terminal; a client's pipe gets nothing but the protocol."""
    import pty

    words = [sys.executable, "-m", "shardwright", "mcp"]
    for in_terminal in (True, False):
        terminal, stdin_of_process = pty.openpty()
        stdin = stdin_of_process if in_terminal else subprocess.DEVNULL
        with subprocess.Popen(words, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stderr is not None
            if in_terminal:
                assert "A client of the Model Context Protocol starts this command" in process.stderr.readline()
                process.kill()
            else:
                assert process.communicate(timeout=PATIENCE_S) == ("", "")
        os.close(terminal)
        os.close(stdin_of_process)
