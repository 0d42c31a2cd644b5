"""The second process of the studio: its answers are those of the first one, in an order that suits the page."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the planning page takes shardwright[studio]")

from shardwright.report.plan_parts import PARTS, Part, PredictedPlan
from shardwright.studio.page_state import PageState
from shardwright.studio.part_process import AFTER_STEP, PART, PartProcess
from shardwright.studio.plan_answer import PlanAnswers
from shardwright.studio.studio_server import FurtherPart, _lines_of_both

STATE = PageState({"job": "quickstart", "device": "h100-sxm", "devices": "4"})


@pytest.mark.processes
def test_it_answers_as_the_server_does_until_it_ends() -> None:
    async def asked() -> list[bytes]:
        other = PartProcess()
        assert not other.is_ready and await other.ask(STATE, {}) == b""
        async with other.running():
            while not other.is_ready:
                await asyncio.sleep(0.05)
            left = [other.ask(PageState({"job": "quickstart", "plan.tp": str(2**n)}), {}) for n in range(2)]
            await asyncio.sleep(0)  # the first is asked, the second waits
            for one in left:
                one.cancel()
            lines = [await other.ask(STATE, {}), await other.ask(PageState({"job": "quickstart", "plan.tp": "3"}), {})]
            lines.append(await other.ask(STATE, {PART: json.loads(lines[0])["key"]}))
            assert all(one.cancelled() for one in left)
        assert not other.is_ready
        return lines

    line, faulty, known = asyncio.run(asked())
    expected = next(PlanAnswers().parts(STATE, (PART,)))
    assert json.loads(line) == json.loads(json.dumps(expected))
    assert faulty == b"" and json.loads(known) == {"part": PART, "key": expected["key"]}


@pytest.mark.processes
def test_its_traffic_takes_the_step_of_who_asks() -> None:
    """Of a step that is told it makes none of its own: one of another length changes the shares of links."""
    answers = PlanAnswers()
    assert answers.known_step(STATE) is None
    list(answers.parts(STATE, ("step",)))
    step = answers.known_step(STATE)
    assert step is not None
    longer = replace(step, total=2 * step.total)

    async def asked() -> list[bytes]:
        other = PartProcess()
        async with other.running():
            while not other.is_ready:
                await asyncio.sleep(0.05)
            first = await other.ask(PageState(dict(STATE.texts) | {"optimizer.steps": "7"}), {}, AFTER_STEP, longer)
            return [await other.ask(STATE, {}, AFTER_STEP, step), first]

    line, of_longer = asyncio.run(asked())
    assert json.loads(line) == json.loads(json.dumps(next(answers.parts(STATE, (AFTER_STEP,)))))
    assert json.loads(of_longer)["step_s"] == 2 * json.loads(line)["step_s"]


@pytest.mark.parametrize("memory_after", ["step", "timeline", "", "end"])
@pytest.mark.parametrize("wanted", ["values job step timeline", "values timeline", "values faults", ""])
def test_traffic_is_made_once_by_the_process_that_is_free_first(wanted: str, memory_after: str) -> None:
    """The other process is asked once the step is made and it has no memory to make; a plan with faults has none."""

    names = wanted.split()

    async def lines() -> list[str]:
        sent, made = list[str](), list[str]()
        memory: asyncio.Future[bytes] | None = asyncio.get_running_loop().create_future() if memory_after else None

        def parts() -> Iterator[Part]:
            for name in names:
                made.append(name)
                yield {"part": name}

        def traffic() -> "asyncio.Future[bytes]":
            assert "step" in made and (memory is None or memory.done())
            made.append("asked")
            future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            future.set_result(b'{"part":"links"}')
            return future

        def here() -> Iterator[Part]:
            assert made == names
            yield {"part": "links"}

        async for line in _lines_of_both(parts(), memory, FurtherPart(traffic, here())):
            sent.append(json.loads(line)["part"])
            if memory and not memory.done() and (sent[-1] == memory_after or "links" in sent):
                memory.set_result(b'{"part":"memory"}')
        return sent

    sent = asyncio.run(lines())
    further = ["links"] + ["memory"] * bool(memory_after)
    assert sorted(sent) == sorted(names + further * ("faults" not in names))


def merged(names: list[str], wait_for: str) -> list[str]:
    """The names of the lines of parts, while that of another process is there when `wait_for` has been sent."""

    async def lines() -> list[str]:
        other: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        sent = []
        if not wait_for:
            other.set_result(b'{"part":"memory"}')

        def parts() -> Iterator[Part]:
            for name in names:
                yield {"part": name}

        async for line in _lines_of_both(parts(), other):
            sent.append(json.loads(line)["part"])
            if sent[-1] == wait_for:
                other.set_result(b'{"part":"memory"}')
        return sent

    return asyncio.run(lines())


@pytest.mark.parametrize(
    ("wait_for", "expected"),
    [
        ("", "values job step memory links timeline"),
        ("timeline", "values job step links timeline memory"),
    ],
)
def test_memory_comes_after_the_step_as_soon_as_it_is_there(wait_for: str, expected: str) -> None:
    sent: Any = merged(["values", "job", "step", "links", "timeline"], wait_for)
    assert sorted(sent) == sorted(expected.split())
    assert sent.index("memory") > sent.index("step")
    assert wait_for == "" or sent[-1] == "memory"


def test_a_plan_with_faults_has_no_memory() -> None:
    assert merged(["values", "faults"], "") == ["values", "faults"]


def unasked(*_: Any) -> None:
    raise AssertionError("it is not needed")


def test_memory_of_this_runtime_waits_for_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = PARTS[PART](PredictedPlan(STATE.job()))
    monkeypatch.setattr("shardwright.report.plan_parts.simulated_step", unasked)
    assert PARTS[PART](PredictedPlan(STATE.job())) == expected and expected["fits"]


def test_memory_of_other_software_takes_no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    state = PageState(dict(STATE.texts) | {"cluster.software": "megatron-core"})
    monkeypatch.setattr("shardwright.report.plan_parts.job_accounts", unasked)
    memory = PARTS[PART](PredictedPlan(state.job()))
    assert memory["fits"] and memory["ranks"][0]["process_bytes"] > 0


def test_the_timeline_takes_the_prices_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PredictedPlan(STATE.job())
    expected = PARTS["timeline"](plan)
    again = PredictedPlan(STATE.job())
    assert not isinstance(again.step, str)
    monkeypatch.setattr("shardwright.simulate.closed_form.Costing.of", unasked)
    assert PARTS["timeline"](again) == expected
