"""Lines of settings that a faster plan changes."""

import shlex
from dataclasses import replace

import pytest

from shardwright.config.load import make_job
from shardwright.cost.calibration import shipped
from shardwright.interchange.job_files import JobFiles
from shardwright.interchange.system import SYSTEMS
from shardwright.planner.advice.priced_plan import priced
from shardwright.report.flag_changes import BetterPlan, SettingChange, _line, _times, changes_text


@pytest.mark.parametrize("value", ["Ett|ttL", "Et*3|t*3L", "plain"])
def test_a_flag_can_be_pasted_into_a_shell(value: str) -> None:
    line = _line("--", SettingChange("pipeline-model-parallel-layout", None, value))
    assert shlex.split(line) == ["+", "--pipeline-model-parallel-layout", value]
    assert ("'" in line) == (value != "plain")


def test_a_setting_of_a_file_stays_as_it_is() -> None:
    assert _line("", SettingChange("parallelism.layout", "a|b", "c|d")) == "  parallelism.layout a|b -> c|d"


def test_a_job_that_does_not_fit_is_not_said_to_need_no_change() -> None:
    job = make_job({"cluster": {"device": "h100-sxm", "devices_per_node": 1, "software": "megatron-core"}}, "mine")
    (own,) = priced([job], shipped())
    stays, misses = (changes_text(JobFiles(SYSTEMS["megatron"]), replace(own, fits=fits), []) for fits in (True, False))
    assert "nothing has to be changed" in stays
    assert (
        "nothing has to be changed" not in misses and "no plan that Megatron-LM has and that fits was found" in misses
    )


def test_a_flag_that_goes_is_named_as_the_script_writes_it() -> None:
    """Not by a name under which the script does not have it."""
    job = make_job({"cluster": {"device": "h100-sxm", "devices_per_node": 1, "software": "megatron-core"}}, "mine")
    (own,) = priced([job], shipped())
    changes = (SettingChange("recompute-granularity", "selective", None), SettingChange("micro-batch-size", 1, 2))
    plan = BetterPlan(own, 1.2, changes, ("--recompute-activations",))
    origin = JobFiles(SYSTEMS["megatron"], frozenset({"micro-batch-size"}))
    lines = [line.strip() for line in changes_text(origin, own, [plan]).splitlines()]
    assert lines[-2:] == ["--micro-batch-size 1 -> 2", "- --recompute-activations"]
    unwritten = changes_text(origin, own, [replace(plan, superseded=())])
    assert "- --recompute-granularity selective  (by another name there, or a default)" in unwritten


@pytest.mark.parametrize("times", [0.8, 1.2])
def test_a_plan_that_mends_a_job_is_said_to_fit(times: float) -> None:
    assert _times(times, own_fits=False).endswith("times as fast, and it fits")
    assert _times(times, own_fits=True).endswith("times as fast")


def test_changes_are_told_in_chinese() -> None:
    job = make_job({"cluster": {"device": "h100-sxm", "devices_per_node": 1, "software": "megatron-2021"}}, "mine")
    (own,) = priced([job], shipped())
    plan = BetterPlan(own, 1.2, (SettingChange("lr", "x", None),))

    def told(*better: BetterPlan, is_lacking: bool = False) -> str:
        text = changes_text(JobFiles(SYSTEMS["megatron"]), own, [*better], "zh", is_lacking=is_lacking)
        return "".join(text.split())  # lines may end at any space

    assert told(plan).startswith("按现有设置，Megatron-LM一步要") and "改动限于megatron-2021所支持的" in told(plan)
    assert "1.速度是现在的1.20倍：一步" in told(plan) and "---lrx（原文件里用的是别的名字，或是默认值）" in told(plan)
    assert told().endswith("不用改动。")
    assert told(is_lacking=True).endswith("不用改动。下面推荐的方案要用其他系统。")
