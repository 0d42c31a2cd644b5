"""The screen of `plan`: short, as wide as the terminal, coloured where a terminal wants it, and about one plan."""

import re
from dataclasses import replace

import pytest

import shardwright as sw
from shardwright.api.found_plans import FoundPlans
from shardwright.cli import job_options
from shardwright.config.adapter import AdapterSpec
from shardwright.config.phrase import in_language
from shardwright.config.software import software_of
from shardwright.config.software_generations import usual_software
from shardwright.config.software_support import missing_features
from shardwright.cost.calibration import shipped
from shardwright.report.document import part_text
from shardwright.report.plan_screen import nearest_reasons
from shardwright.report.plans_text import layers_words
from shardwright.report.software_beside import software_beside
from shardwright.simulate.full_step import simulated_step
from support.languages import assert_same_in_chinese

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("searched_once")]

QUICK = ["plan.cp=1", "plan.recompute=full", "plan.schedule=1f1b", "plan.microbatch_size=1", "plan.tp=8"]


@pytest.fixture(scope="module")
def plans() -> FoundPlans:
    """Plans of a job with a plan of its own, without which its screen would be shorter."""
    return sw.load("gpt3-175b-1024").plan(keep=QUICK)


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_no_line_is_wider_than_the_terminal(plans: FoundPlans, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for with_details in (False, True):
        assert max(map(len, plans.screen(with_details).splitlines())) <= columns


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_no_plan_is_cut_but_the_one_that_is_told_above(
    plans: FoundPlans, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    cut = [line for line in plans.screen().splitlines() if "\u2026" in line]
    assert all(line.startswith("1  ") for line in cut) and len(cut) <= 1


def test_a_reader_can_count_the_stages() -> None:
    assert layers_words([2] * 3 + [1] + [2] * 33) == "3 stages of 2, 1 of 1, 33 of 2"
    assert layers_words([7, *[14] * 8, 7]) == "1 stage of 7, 8 of 14, 1 of 7"
    assert in_language(layers_words([2] * 3 + [1]), "zh") == "3 个阶段各 2 层、1 个 1 层"
    assert in_language(layers_words([8]), "zh") == "1 个阶段 8 层"


def test_the_answer_is_one_screen(plans: FoundPlans) -> None:
    screen = plans.screen().splitlines()
    assert len(screen) <= 40
    text = " ".join(plans.screen().split())
    assert text.startswith("Predicted, not measured: steps of this runtime")
    assert "Four of five runs like it" in " ".join(screen[:3])
    assert "at $2.70 a device and hour (CoreWeave, on-demand list price of February 2026)" in text
    (best,) = (line for line in screen if line.startswith("Recommended: "))
    (first,) = (line for line in screen if line.startswith("1  "))
    plan = first[first.index("tp ") :].rstrip("\u2026")  # cut where the terminal ends
    assert best.removeprefix("Recommended: ").startswith(plan)  # row 1 is what is recommended
    assert any(line.startswith("why ") and line.endswith("because") for line in screen)
    assert "Why not another" in plans.screen(with_details=True) and "Why not another" not in text


def test_much_to_say_takes_the_place_of_reasons() -> None:
    """A plan of its own that does not fit, and a number of parameters that its layers do not have."""
    whole = {"tp": 4, "pp": 8, "dp": 1, "schedule": "1f1b", "microbatch_size": 1, "recompute": "none", "zero": 0}
    plans = sw.load("gpt-100b-told").plan(keep=[f"plan.{field}={value}" for field, value in whole.items()])
    screen, details = plans.screen(), plans.screen(with_details=True)
    assert len(screen.splitlines()) <= 40
    assert "It does not fit: pp rank 0 needs 656.6 GiB too much." in " ".join(screen.split())
    assert "The nearest plans that fit:" in details and "The nearest plans that fit:" not in screen
    assert len(plans.screen(language="zh").splitlines()) <= 40


def test_the_screen_says_what_is_usual_for_the_state_of_the_job(plans: FoundPlans) -> None:
    usual = "2,927.0 GiB of state are more than a node of 8 holds, so tp, pp or ZeRO-3; this plan agrees."
    assert f"Rule of thumb (`learn choosing`): {usual}" in " ".join(plans.screen().split())
    choosing = plans.dicts()[0]["choosing"]
    assert choosing["agrees"] and choosing["says"].startswith("2,927.0 GiB of state are more than 8 devices of 80.0")


def test_the_same_plans_are_priced_as_software_that_people_run(plans: FoundPlans) -> None:
    screen = plans.screen().splitlines()
    screen_words = " ".join(screen)
    assert usual_software() == ("megatron-core", "torchtitan-2025")
    for name in usual_software():
        clusters = [plan.job.cluster.model_copy(update={"software": name}) for plan in plans.advice.plans]
        as_others = [
            plan.job.model_copy(update={"cluster": cluster})
            for plan, cluster in zip(plans.advice.plans, clusters, strict=True)
        ]
        lacks = [missing_features(software_of(name), as_other) for as_other in as_others]
        if all(lacks):  # a sentence says so, and what
            common = [feature for feature in lacks[0] if all(feature in others for others in lacks)]
            assert f"{name} has none of these plans, for it lacks {' and '.join(common)}." in screen_words
            continue
        (row,) = (line for line in screen if line.startswith(f"{name}  "))
        cells = re.split(r" {2,}", row)[1:]
        assert len(cells) == 5
        for cell, as_other, missing in zip(cells, as_others, lacks, strict=True):
            assert cell == ("lacks it" if missing else f"{simulated_step(as_other, shipped()).total:.3f} s")
    assert re.search(r"megatron-core .* s ", screen_words)
    (heading,) = (line for line in screen if line.startswith("step as"))
    assert re.split(r" {2,}", heading) == ["step as", "plan 1", "plan 2", "plan 3", "plan 4", "plan 5"]
    assert "--as NAME" in " ".join(screen[:4])


def test_the_run_that_a_job_states_is_priced_beside_1e12_tokens() -> None:
    job = sw.load("llama3-8b", "optimizer.steps=250000", devices=8, device="h100-sxm")
    keep = ["plan.tp=2", "plan.pp=1", "plan.microbatch_size=1"]
    text = " ".join(str(job.plan(keep=keep)).split())
    days, money, own_days, own_money = re.search(
        r"1e12 tokens take ([\d,.]+) days and \$([\d,]+), .* The job's own 250,000 steps, 5.24e11 tokens, take "
        r"([\d,.]+) days and \$([\d,]+)\.",
        text,
    ).groups()  # type: ignore[union-attr]
    numbers = [float(number.replace(",", "")) for number in (days, own_days, money, own_money)]
    assert numbers[1] / numbers[0] == pytest.approx(0.524288, rel=5e-3)
    assert numbers[3] / numbers[2] == pytest.approx(0.524288, rel=1e-3)
    whole = sw.load("llama3-8b", devices=8, device="h100-sxm")
    assert "The job's own" not in str(whole.plan(keep=keep))


def test_tokens_that_an_option_states_are_the_run_of_a_model() -> None:
    model = sw.load("llama3-8b", devices=8, device="h100-sxm")
    plans = model.plan(keep=["plan.tp=2", "plan.pp=1", "plan.microbatch_size=1"], tokens=1e11)
    text = str(plans)
    assert "1e11 tokens take" in text and "The job's own" not in text and "1e12" not in text
    assert plans.recommended.spec.tokens_of_run == pytest.approx(1e11, rel=1e-4)


def test_a_run_of_minutes_is_not_told_in_days() -> None:
    model = sw.load("tiny-llama", devices=8, device="h100-sxm")
    text = str(model.plan(keep=["plan.tp=2", "plan.pp=1", "plan.microbatch_size=8"], tokens=1e10))
    assert re.search(r"1e10 tokens take [0-9.]+ min and", text)


def test_software_that_lacks_a_plan_has_no_seconds_for_it_and_other_software_no_rows(plans: FoundPlans) -> None:
    (first, *_) = plans.advice.plans
    twofold = first.job.plan.model_copy(update={"schedule": "dualpipe"})
    lacked = replace(first, job=first.job.model_copy(update={"plan": twofold}))
    part = software_beside([first, lacked])
    assert part is not None
    text = part_text(part, "en")
    assert re.search(r"^step as +plan 1 +plan 2$", text, re.MULTILINE)
    assert re.search(r"^megatron-core +[0-9.]+ s  lacks it$", text, re.MULTILINE)
    text = " ".join(part_text(software_beside([lacked, lacked]), "en").split())
    assert "megatron-core has none of these plans, for it lacks schedule dualpipe." in text and "lacks it" not in text
    other = first.job.cluster.model_copy(update={"software": "nemo"})
    assert software_beside([replace(first, job=first.job.model_copy(update={"cluster": other}))]) is None
    adapted = first.job.model.model_copy(update={"adapter": AdapterSpec(rank=8)})
    assert software_beside([replace(first, job=first.job.model_copy(update={"model": adapted}))]) is None


def test_no_reason_is_a_neighbour_that_is_faster(plans: FoundPlans) -> None:
    step_s, first = 1.0, plans.explained.reasons[0]
    faster = replace(first, field="tp", slower_s=-0.1, excess_bytes=0.0)
    same = replace(first, field="pp", slower_s=1e-6, excess_bytes=0.0)
    slower = replace(first, field="zero", slower_s=0.1, excess_bytes=0.0)
    assert list(nearest_reasons([faster, same, slower], step_s)) == [slower]


def test_colours_are_for_terminals_that_want_them(plans: FoundPlans, monkeypatch: pytest.MonkeyPatch) -> None:
    coloured = plans.screen(coloured=True)
    assert "\x1b[" not in plans.screen() and "\x1b[1;32mRecommended" in coloured
    assert re.sub(r" *\n", "\n", re.sub(r"\x1b\[[\d;]*m", "", coloured)) == plans.screen()

    class Terminal:
        @staticmethod
        def isatty() -> bool:
            return True

    monkeypatch.setattr(job_options.sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert job_options.has_colours()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not job_options.has_colours()
    monkeypatch.undo()
    assert not job_options.has_colours()  # of a pipe


def test_the_screen_is_the_same_in_chinese(plans: FoundPlans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert_same_in_chinese(lambda language: plans.screen(with_details=True, language=language), monkeypatch, 800)


def test_a_colour_stays_where_it_is_in_chinese(plans: FoundPlans) -> None:
    assert "\x1b[1;32m推荐：tp" in plans.screen(coloured=True, language="zh")
