"""Playable figures say what commands say, for every choice of their controls."""

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from click.testing import CliRunner

from shardwright.cli.main import cli
from shardwright.config.units import bytes_text, memory_text, seconds_text
from shardwright.learn.idea_figures import FIGURES
from shardwright.learn.playable_figure import PLAYER_WORDS, FigureFrame, FigureJob, script_of
from shardwright.learn.playable_figures import PLAYABLE
from shardwright.learn.site_build import PLAYER
from shardwright.learn.system_figures import BETWEEN, EXPOSED, INSIDE, SYSTEM_PLANS, axis_traffic, tracks_of
from support.languages import words_of_picture
from support.learn_pages import figure_file


def frame(name: str, *values: str) -> FigureFrame:
    return PLAYABLE[name].frame(*values)


def answer(command: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli, [*command.split()[1:], "--json"], catch_exceptions=False)
    return json.loads(result.stdout)


def test_each_replaces_a_picture() -> None:
    assert set(PLAYABLE) <= set(FIGURES)
    for figure in PLAYABLE.values():
        assert all(0 <= control.start < len(control.values) for control in figure.controls)


def test_the_player_has_the_words_that_it_uses() -> None:
    scripts = "".join(file.read_text(encoding="utf-8") for file in PLAYER.glob("*.js"))
    assert set(re.findall(r"\bwords\.(\w+)", scripts)) == set(PLAYER_WORDS)


def test_bars_are_those_of_estimate() -> None:
    for name, values in (("zero", ("8",)), ("recomputation", ("8,192",)), ("context-parallel", ("65,536",))):
        shown = frame(name, *values)
        printed = answer(shown.command.splitlines()[-1])
        total = max(rank["total_bytes"] for rank in printed["memory"])
        last = shown.picture["rows"][-1]
        assert last["total"] == f"{memory_text(total)}, {seconds_text(printed['step_s'])}"
        assert sum(part[1] for part in last["parts"]) == total


def test_a_picture_searches_for_no_field() -> None:
    """Its rows differ in what their labels say: without ZeRO the optimizer's state is whole, and on the device."""
    plan = FigureJob("llama3-8b", 8, "h100-sxm", ("plan.dp=8", "plan.zero=0"))
    (rank,) = answer(plan.command("estimate"))["memory"]
    assert rank["host_bytes"] == 0 and rank["optimizer_bytes"] > 12 * 8e9
    words = words_of_picture(figure_file("zero", "en").read_text(encoding="utf-8"))
    assert memory_text(rank["total_bytes"]) in words


def test_steps_of_tensor_parallel_are_those_of_estimate() -> None:
    shown = frame("tensor-parallel", "h100-pcie")
    printed, row = answer(shown.command.splitlines()[2]), shown.picture["rows"][2]
    assert row["label"] == "tp 4" and row["total"] == seconds_text(printed["step_s"])
    assert sum(part[1] for part in row["parts"]) == pytest.approx(printed["step_s"])
    nvlink = frame("tensor-parallel", "h100-sxm").picture["rows"][2]
    waits = [dict(part[:2] for part in one["parts"])["tensor parallel"] for one in (row, nvlink)]
    assert waits[0] > 4 * waits[1]  # PCIe


def test_the_best_interval_loses_the_least_time() -> None:
    shown = frame("checkpoint-interval", "100", "50,000")
    printed = answer(shown.command)
    lost = [sum(part[1] for part in row["parts"]) for row in shown.picture["rows"]]
    assert min(lost) == lost[2] == pytest.approx(1 - printed["goodput"]["training"])
    checkpoints, lost_work = ([row["parts"][place][1] for row in shown.picture["rows"]] for place in (0, 1))
    assert sorted(checkpoints, reverse=True) == checkpoints and sorted(lost_work) == lost_work


def test_a_branch_is_that_of_explain() -> None:
    shown = frame("choosing-branch", "llama3-405b", "gb200-nvl72")
    printed = answer(shown.command.splitlines()[1])
    assert dict(shown.numbers)["branch"] == printed["choosing"]["says"]
    state, _, node = (row["parts"][0][1] for row in shown.picture["rows"])
    assert state < node and "fit 64 devices" in printed["choosing"]["says"]  # one rack, which no node of 8 would be
    assert "are more than 8 devices" in dict(frame("choosing-branch", "llama3-405b", "b200-sxm").numbers)["branch"]


def test_a_timeline_is_that_of_simulate() -> None:
    shown = frame("pipeline-1f1b", "1f1b", "4", "8")
    printed = answer(shown.command)
    assert dict(shown.numbers)["step"] == seconds_text(printed["step_s"])
    assert [len(blocks) for blocks in shown.picture["ranks"]] == [16] * 4
    assert shown.picture["end"] / shown.picture["ticks"] == pytest.approx(printed["makespan"], abs=1e-4)
    for blocks in shown.picture["ranks"]:
        assert all(before[1] <= after[0] for before, after in pairwise(blocks))


def test_waits_beside_a_slow_rank_are_those_of_schedule() -> None:
    shown = frame("slow-rank", "2", "1.5", "8")
    printed, numbers = answer(shown.command), dict(shown.numbers)
    assert numbers["step"] == f"{printed['makespan']:g}"
    waits = [sum(by_cause.values()) for by_cause in printed["idle"]]
    assert [numbers[f"rank {rank} waits"].split()[0] for rank in range(4)] == [f"{wait:g}" for wait in waits]
    assert dict(frame("slow-rank", "2", "1", "8").numbers)["longer than with equal ranks"] == "0.0 %"


def test_a_collective_ends_with_the_sum_on_all_ranks() -> None:
    shown = frame("ring-all-reduce", "all-reduce", "4")
    printed = answer(shown.command)
    (ring,) = (row for row in printed["algorithms"] if row["name"] == printed["drawn"])
    assert dict(shown.numbers)["sent by the busiest rank, of 1 GB"] == bytes_text(round(ring["inside_bytes"]))
    assert len(shown.picture["moves"]) == 6 and len(shown.picture["states"]) == 7
    assert all(row == [[f"S{piece}", 1.0] for piece in range(4)] for row in shown.picture["states"][-1])


def test_the_exposed_part_of_an_exchange_sticks_out_of_computing() -> None:
    few, many = (frame("data-parallel", replicas, "1").picture["rows"] for replicas in ("8", "256"))
    for computing, exchange in (few, many):
        hidden, exposed = (part[1] for part in exchange["parts"])
        assert exchange["offset"] + hidden == pytest.approx(max(hidden, computing["parts"][0][1]))
        assert exposed > 0
    assert many[1]["parts"][1][1] > 3 * few[1]["parts"][1][1]


def test_the_mesh_has_each_place_once_and_says_what_leaves_a_node() -> None:
    inner, outer = (frame("mesh", "4", "2", order) for order in ("dp-pp", "pp-dp"))
    assert inner.picture["places"] != outer.picture["places"]
    assert sorted(inner.picture["places"]) == sorted(outer.picture["places"])
    assert len(set(map(tuple, inner.picture["places"]))) == 32
    along_pp = [dict(shown.numbers)["sent by a rank along pp"] for shown in (inner, outer)]
    assert along_pp[0].endswith("between nodes") and along_pp[1].endswith("inside a node")


@pytest.mark.parametrize(("name", "value"), [("fsdp", "32"), ("deepspeed", "3")])
def test_a_system_under_another_choice_sends_the_bytes_of_explain(name: str, value: str) -> None:
    shown = frame(name, value)
    printed = answer(shown.command)
    sent = [(one["sent"], one["exposed_s"]) for one in printed["crossings"] if one["phase"] != "end of step"]
    tracks = [row["tracks"] for row in shown.picture["rows"]]
    for kind, place in ((INSIDE, "inside"), (BETWEEN, "between")):
        assert sum(dict(sizes["parts"])[kind] for sizes, _ in tracks) == pytest.approx(
            sum(one[place] for one, _ in sent)
        )
    waits = sum(dict(seconds["parts"])[EXPOSED] for _, seconds in tracks)
    assert waits == pytest.approx(sum(exposed_s for _, exposed_s in sent))
    assert dict(shown.numbers)["step"] == seconds_text(printed["step"]["total"])


def test_a_system_begins_with_the_plan_of_its_picture() -> None:
    for name, plan in SYSTEM_PLANS.items():
        (control,) = PLAYABLE[name].controls
        rows, step_s = axis_traffic(plan.spec)
        shown = frame(name, control.values[control.start])
        assert dict(shown.numbers)["step"] == seconds_text(step_s)
        assert [row["tracks"][0]["text"] for row in shown.picture["rows"]] == [tracks_of(row)[0].text for row in rows]


def test_scripts_have_the_same_numbers_in_both_languages() -> None:
    figure = PLAYABLE["ring-all-reduce"]
    english, chinese = (
        json.loads(script_of("x", figure.data(), language).partition(" = ")[2].rstrip(";\n"))
        for language in ("en", "zh")
    )
    assert english["title"] != chinese["title"]
    assert english["frames"].keys() == chinese["frames"].keys()
    for key, shown in english["frames"].items():
        other = chinese["frames"][key]
        assert shown["picture"] == other["picture"] and shown["command"] == other["command"]
        assert [text for _, text in shown["numbers"]] == [text for _, text in other["numbers"]]
