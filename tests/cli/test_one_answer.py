"""One answer from every command: of the same job and plan all of them say the same seconds and the same bytes.

    python tests/cli/test_one_answer.py --count 2000

holds more jobs against each other than the suite does.
"""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
from click.testing import CliRunner

from fuzz.draw import Fields, draw
from shardwright.cli.main import cli
from shardwright.config import catalog
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.cost.calibration import shipped
from shardwright.cost.from_job import run_of
from shardwright.explain.story import tell
from shardwright.memory.budget import meet_budget
from shardwright.planner.advice.priced_plan import PricedPlan, priced
from shardwright.planner.critical_batch import batch_limits
from shardwright.planner.own_plan import Estimate, estimate
from shardwright.planner.scaling import scaling
from shardwright.planner.search.objectives import Objective
from shardwright.planner.stages.best_layout import best_layout
from shardwright.report import estimate_text
from shardwright.report.estimate_text import estimate_dict
from shardwright.report.explain.story_dict import story_dict
from shardwright.report.layout_text import layout_dict
from shardwright.report.plans_text import plan_dict
from shardwright.report.scaling_report import scaling_dict
from shardwright.report.timeline.job_study import drawn_costs
from shardwright.schedule.job_program import plan_faults
from shardwright.simulate.closed_form import step_time

pytestmark = pytest.mark.usefixtures("searched_once")

IN_SUITE = 16
CLOSE = 1e-9
SOFTWARE = (
    "shardwright", "shardwright", "shardwright", "large-2024", "megatron-core", "nemo", "torchtitan", "megatron-2021",
    "fsdp-2024", "deepspeed-2024",
)  # fmt: skip
DEVICES = (
    "h100-sxm", "h100-sxm", "a100-sxm-80g", "h200-sxm", "v100-sxm-32g", "mi300x", "tpu-v5p", "b200-sxm", "rtx-4090",
)  # fmt: skip
MODELS = (
    "llama3-8b", "llama2-70b", "gpt3-175b", "gpt2-xl", "gemma2-27b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3",
    "gshard-600b", "yi-34b",
)  # fmt: skip


def drawn(number: int) -> Fields:
    """The fields of one job: a draw of all that a plan may say, on a cluster with a calibration, and of more than every
    other the widths are those of a model of the catalog. A function of `number` alone; some are refused."""
    rng = random.Random(f"one answer:{number}")
    fields = draw(31, number)
    while fields["plan"]["pp"] == 1 and rng.random() < 0.6:
        fields = draw(31, rng.randrange(2**30))
    plan = fields["plan"]
    plan["dp"] *= (more := rng.choice([1, 1, 2, 4]))
    plan.pop("memory_limit_gib", None)
    if plan["recompute"] == "budget":
        plan["recompute"] = "none"
    if rng.random() < 0.7:
        fields["model"] = _few_layers(rng, plan)
    world = plan["dp"] * plan["cp"] * plan["tp"] * plan["pp"]
    each = rng.choice([n for n in (1, 2, 4, 8) if world % n == 0])
    batch = fields["batch"]["global_batch_size"] * more * rng.choice([1, 1, 2, 5])
    return {
        "model": fields["model"],
        "plan": plan,
        "precision": fields["precision"],
        "batch": {"global_batch_size": batch},
        "optimizer": {"clip_grad_norm": fields["optimizer"]["clip_grad_norm"]},
        "cluster": {
            "device": rng.choice(DEVICES), "software": rng.choice(SOFTWARE), "devices_per_node": each,
            "nodes": world // each, "inter_node": {"bandwidth_gb_per_s": rng.choice([12.5, 25.0, 50.0])},
            "intra_node": {"bandwidth_gb_per_s": rng.choice([100.0, 300.0])},
        },
    }  # fmt: skip


def _few_layers(rng: random.Random, plan: Fields) -> Fields:
    """A model of the catalog with as many layers as the plan's stages ask for, or some more."""
    for name in ("layout", "recompute_layers", "expert_tp", "dispatch", "ep"):
        plan.pop(name, None)
    if plan["recompute"] == "layers":
        plan["recompute"] = "full"
    model = dict(catalog.read("models", rng.choice(MODELS)))
    stages = plan["pp"] * (SCHEDULES[plan["schedule"]].stages_per_rank or plan.get("virtual_stages", 1))
    model["layers"] = stages * rng.choice([1, 2]) + rng.choice([0, 0, 1, 2])
    if stages > 1 and SCHEDULES[plan["schedule"]].stages_per_rank in (0, 1) and rng.random() < 0.4:
        parts = sorted(rng.randint(0, model["layers"] - stages) for _ in range(stages - 1))
        ends = [*parts, model["layers"] - stages]
        plan["layout"] = [1 + end - start for start, end in zip([0, *parts], ends, strict=True)]
    if model.get("moe"):
        ranks = plan["dp"] * plan["cp"]
        plan["ep"] = rng.choice([n for n in (1, 2, 4, 8) if ranks % n == 0])
        model["moe"]["first_dense"] = min(model["moe"].get("first_dense", 0), 1)
    return model


def accepted(count: int) -> Iterator[JobSpec]:
    """The first jobs of those drawn that are legal."""
    number = results = 0
    while results < count:
        try:
            job = make_job(drawn(number), f"job {number}")
            if not plan_faults(job) and has_price(job := meet_budget(job)):
                yield job
                results += 1
        except PlanError:
            pass
        number += 1
        assert number < 50 * count + 100, "hardly any draw is legal"


def has_price(job: JobSpec) -> bool:
    """True if all rates of the device that the plan needs are known; where not, no command says seconds."""
    try:
        step_time(run_of(job), shipped())
    except KeyError:
        assert "step_s" not in estimate_dict(job) and drawn_costs(job, 0.0).step_s is None and tell(job).step is None
        return False
    return True


def answers(job: JobSpec, own: Estimate, plan: PricedPlan) -> tuple[dict[str, float], dict[str, float]]:
    """The answers of each command on a job's own plan: (seconds of a step, bytes of the fullest process)."""
    answer, story = estimate_dict(job), tell(job)
    (strong, weak) = scaling(job, [job.plan.world], batch_limits(job, 0), lambda of: of, shipped())
    rows = scaling_dict(job, (strong, weak), batch_limits(job, 0))
    of_plan = plan_dict(plan, Objective())
    predicted = [float(of.process) for of in story.predicted]
    seconds = {
        "estimate": answer["step_s"],
        "explain": story_dict(story)["step"]["total"],
        "plan": of_plan["step_s"],
        "scale, strong": rows["strong"][0]["step_s"],
        "scale, weak": rows["weak"][0]["step_s"],
        "simulate": drawn_costs(job, 0.0).step_s,
        "simulate, in units": drawn_costs(job, 1.0).step_s,
        "parts of estimate": sum(answer["time"].values()),
    }
    process = {
        "estimate": answer["process_bytes"],
        "explain": max(predicted),
        "plan": of_plan["memory"]["process"],
        "scale": rows["strong"][0]["peak_bytes"],
    }
    return seconds, process


def differences(of: str, by_command: dict[str, float], wanted: float) -> list[str]:
    """Those that are not what `estimate` says."""
    return [
        f"{of}: {command} says {value!r}, and estimate {wanted!r}"
        for command, value in by_command.items()
        if not abs(value - wanted) <= CLOSE * wanted
    ]


def layouts(job: JobSpec) -> list[str]:
    """Differences of `layout` from `estimate`, for the plan that it makes and for layers spread evenly."""
    try:
        result = best_layout(job, shipped())
    except PlanError:  # no layout fits
        return []
    answer = layout_dict(result)
    wrong = differences("layout", {"layout": answer["step_s"]}, float(estimate(result.job).step.total))
    if answer["even_step_s"] is not None:
        even = job.model_copy(update={"plan": job.plan.model_copy(update={"layout": []})})
        wrong += differences("even layout", {"layout": answer["even_step_s"]}, float(estimate(even).step.total))
        assert answer["step_s"] <= answer["even_step_s"]
    return wrong


def held_together(count: int) -> tuple[list[str], Counter[str]]:
    """All that commands say otherwise than `estimate`, and what was drawn."""
    jobs = list(accepted(count))
    owns = [estimate(job) for job in jobs]
    plans = priced(jobs, shipped())  # at once, as those that a search finds
    wrong: list[str] = []
    seen = Counter[str]()
    for number, (job, own, plan) in enumerate(zip(jobs, owns, plans, strict=True)):
        seconds, process = answers(job, own, plan)
        results = differences("seconds", seconds, own.step.total) + differences("bytes", process, own.memory.process)
        if not job.plan.layout and number % 2 == 0:
            results += layouts(job)
        wrong += [
            f"job {number} ({job.plan.schedule}, {job.cluster.software}, {job.plan.degrees}): {f}" for f in results
        ]
        schedule = job.plan.schedule if job.plan.pp > 1 else "no pipeline"
        seen.update([schedule, job.cluster.software, job.cluster.device, f"zero {job.plan.zero}", job.plan.recompute])
        seen.update(["experts"] * bool(job.model.moe.experts) + ["layout"] * bool(job.plan.layout))
        seen.update(["order"] * (job.plan.block < job.plan.stage_ranks))
    return wrong, seen


def test_all_commands_say_the_same_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the plans beside one that does not fit, which `estimate` names as well: their searches take four fifths
    of the time, and have tests of their own (tests/planner/test_reasons.py)."""
    monkeypatch.setattr(estimate_text, "near_plans", lambda *_: [])
    wrong, seen = held_together(IN_SUITE)
    assert not wrong, "\n".join(wrong)
    assert {"experts", "layout", "order", "zero 3", "no pipeline", "shardwright"} <= set(seen), seen


def typed(*words: str) -> Any:
    """The JSON that a command prints."""
    done = CliRunner().invoke(cli, [*words, "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    return json.loads(done.stdout)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "words",
    [
        ("gpt2-xl", "--devices", "8", "--device", "a100-sxm-40g", "--set", "cluster.software=large-2024"),
        ("mixtral-8x7b", "--devices", "16", "--device", "h100-sxm", "--set", "cluster.software=megatron-core"),
    ],
    ids=lambda words: words[0],
)
def test_commands_that_choose_a_plan_choose_the_same(words: tuple[str, ...], tmp_path: Path) -> None:
    """As typed: what `plan` finds is what `scale` and the commands that take a model tell, to the last digit."""
    kept = ("--keep", "plan.cp=1", "--keep", "plan.microbatch_size=1")
    model, _, devices, _, device = words[:5]
    toml = tmp_path / "job.toml"
    results = typed("plan", *words, *kept, "--toml", str(toml))
    (point,) = typed("scale", model, "--devices", devices, "--device", device, *words[5:], *kept)["strong"]
    assert (point["plan"], point["step_s"]) == (results[0]["plan"], pytest.approx(results[0]["step_s"], rel=CLOSE))
    assert point["peak_bytes"] == pytest.approx(results[0]["memory"]["process"], rel=CLOSE)
    (recommended,) = (plan for plan in results if plan["recommended"])
    answer = typed("estimate", str(toml))
    assert answer["step_s"] == pytest.approx(recommended["step_s"], rel=CLOSE)
    assert answer["process_bytes"] == pytest.approx(recommended["memory"]["process"], rel=CLOSE)
    assert typed("explain", str(toml))["step"]["total"] == pytest.approx(answer["step_s"], rel=CLOSE)
    assert typed("simulate", str(toml))["step_s"] == pytest.approx(answer["step_s"], rel=CLOSE)
    free, of_model = typed("plan", *words), typed("estimate", *words)
    assert any(plan["step_s"] == pytest.approx(of_model["step_s"], rel=CLOSE) for plan in free)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    wrong, seen = held_together(parser.parse_args().count)
    print("\n".join(wrong))
    print(f"{len(wrong)} differences; drawn: {', '.join(f'{name} {n}' for name, n in sorted(seen.items()))}")
    sys.exit(bool(wrong))
