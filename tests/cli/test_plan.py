"""The command `plan`, as it is typed: what it takes, what it refuses, and what it answers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import shardwright as sw
from shardwright.cli.checked_job import load_to_run
from shardwright.cli.main import cli
from shardwright.config.base import PlanError
from shardwright.config.toml_text import JOB_BEGINNING

pytestmark = pytest.mark.usefixtures("searched_once")

# Few plans, which are soon priced.
QUICK = tuple(
    word
    for field in ("cp=1", "recompute=full", "schedule=1f1b", "microbatch_size=1")
    for word in ("--keep", f"plan.{field}")
)
OTHER_SIZE = ("--set", "cluster.nodes=16")


def typed(*words: str) -> Result:
    done = CliRunner().invoke(cli, [*words], catch_exceptions=False)
    assert done.exit_code == 0
    return done


def printed(*words: str) -> str:
    """The text that a command prints, with its lines joined."""
    return " ".join(typed(*words).stdout.split())


def plans(*words: str) -> list[dict[str, Any]]:
    return list(json.loads(typed(*words, "--json").stdout))


def refusal(*words: str) -> PlanError:
    with pytest.raises(PlanError) as refused:
        typed(*words)
    return refused.value


# --- a plan of its own that the cluster does not allow ---


def test_degrees_of_another_cluster_do_not_matter() -> None:
    asked = ("plan", "yi-34b", *OTHER_SIZE, *QUICK, "--keep", "plan.tp=8")
    results = plans(*asked)
    assert results and all(plan["num_devices"] == 128 for plan in results)
    text = printed(*asked)
    assert "The job's own plan (tp 8, pp 2, dp 32, 1f1b, mb 1, zero 1, sequence_parallel) is not legal here" in text
    assert "512 ranks, and cluster 'a800-512' has 16 nodes x 8 devices = 128; use dp 8" in text
    legal = plans(*asked, "--set", "plan.dp=8")
    assert [plan["plan"] for plan in legal] == [plan["plan"] for plan in results]


def test_an_own_plan_that_the_software_lacks_is_told_so() -> None:
    kept = ("cp=2", "recompute=none", "schedule=interleaved-1f1b", "microbatch_size=1", "tp=8", "pp=16")
    asked = ("plan", "llama3-405b-16k", *(word for field in kept for word in ("--keep", f"plan.{field}")))
    reason = "It needs ZeRO-2, which megatron-core+overlap-dp lacks, so it is not among the plans searched."
    assert reason in printed(*asked, "--for", "megatron")
    assert "which megatron-core+overlap-dp lacks" not in printed(*asked, "--for", "megatron", "--set", "plan.zero=1")
    assert "not among the plans searched" not in printed(*asked)


@pytest.mark.parametrize("command", ["plan", "layout"])
def test_a_file_that_would_be_lost_is_refused_before_the_search(tmp_path: Path, command: str) -> None:
    own = tmp_path / "mine.toml"
    own.write_text('[model]\nname = "llama3-8b"\n')
    fault = refusal(command, "no-such-job", "--toml", str(own))
    assert fault.faults[0].startswith(f"--toml {own} is there, and is no file that --toml wrote: it would be lost")
    own.write_text(f"{JOB_BEGINNING}\n")
    assert "no-such-job" in refusal(command, "no-such-job", "--toml", str(own)).faults[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "override", ["plan.tp=3", "plan.pp=61", "plan.layout=[1]", "plan.zero_ranks=7", "plan.expert_tp=8", "plan.ep=2"]
)
def test_no_fault_of_the_own_plan_keeps_others_from_being_found(override: str) -> None:
    assert "is not legal here" in printed("plan", "yi-34b", "--set", override, *QUICK)


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("model.hidden=30", "does not split into 56 heads"),
        ("cluster.device=h1000", "not in the catalog of devices"),
        ("plan.tp=0", "it should be greater than 0"),
        ("plan.compress_rank=3", "has no rank"),  # every plan that is found would have it
        ("optimizer.warmup_steps=10000000", "never reached"),
    ],
)
def test_what_is_wrong_with_the_rest_is_refused(override: str, fault: str) -> None:
    assert fault in str(refusal("plan", "yi-34b", "--set", "plan.tp=3", "--set", override, *QUICK))


# --- a model of the catalog ---

ON_64 = ("llama3-8b", "--devices", "64", "--device", "h100-sxm")
ON_16 = ("gpt2", "--devices", "16", "--device", "h100-sxm")
UNPIPED = (*QUICK, "--keep", "plan.pp=1")


def test_a_model_is_planned_on_so_many_devices() -> None:
    result = plans("plan", *ON_64, *UNPIPED)
    assert result and result[0]["num_devices"] == 64 and result[0]["global_batch_size"] == 256
    text = printed("plan", *ON_64, *UNPIPED)
    assert "Note: a step has 256 sequences, 2,097,152 tokens" in text and "it is computed in bf16" in text
    assert "450 GB/s within a node of 8 and 50 GB/s between nodes of 8" in text
    assert plans("plan", *ON_64, "--set", "batch.global_batch_size=64", *UNPIPED)[0]["global_batch_size"] == 64


def test_other_commands_tell_its_best_plan_or_the_users() -> None:
    best = plans("plan", *ON_16, "--top", "1")[0]
    done = typed("estimate", *ON_16, "--json")
    answer = json.loads(done.stdout)
    assert answer["step_s"] == pytest.approx(best["step_s"], rel=0.1)
    assert answer["fits"] is True and "Note: the plan is what `plan` recommends" in " ".join(done.stderr.split())
    few = ("gpt2", "--devices", "2", "--device", "h100-sxm")  # which are soon searched
    assert "the plan is what `plan` recommends" in printed("explain", *few)
    assert "the plan is what `plan` recommends" in printed("simulate", *few, "--no-colour")
    rows = json.loads(typed("scale", "llama3-8b", "--devices", "8,16", "--device", "h100", *UNPIPED, "--json").stdout)
    assert [row["devices"] for row in rows["weak"]] == [8, 16]
    assert rows["weak"][1]["global_batch_size"] == 2 * rows["weak"][0]["global_batch_size"]


def test_a_job_that_is_silent_on_its_plan_is_estimated_under_the_best(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('[model]\nname = "tiny-llama"\n[cluster]\ndevice = "h100-sxm"\nnodes = 1\ndevices_per_node = 8\n')
    text = printed("estimate", str(job))
    assert "the plan is what `plan` recommends" in text and "8 ranks" in text
    with_a_plan = f"{job.read_text()}[plan]\ntp = 2\n"
    job.write_text(with_a_plan)
    assert "use dp 4" in str(refusal("estimate", str(job)))
    job.write_text(with_a_plan.replace('device = "h100-sxm"\n', "").replace("tp = 2\n", ""))
    assert "use dp 8" in str(refusal("estimate", str(job)))  # of an unknown device no plan has a price


HALF = ("--set", "plan.tp=4", "--set", "plan.pp=2", "--set", "plan.bucket_mib=32")


def test_half_a_plan_is_completed_with_the_best_rest_in_every_command(tmp_path: Path) -> None:
    """Fields that `--set` gives are kept, and all others are those that `plan` recommends beside them."""
    best = plans("plan", *ON_16, "--keep", "plan.tp=4", "--keep", "plan.pp=2", "--set", "plan.bucket_mib=32")[0]
    assert plans("plan", *ON_16, *HALF)[0]["plan"] == best["plan"]
    done = typed("estimate", *ON_16, *HALF, "--json")
    assert json.loads(done.stdout)["step_s"] == pytest.approx(best["step_s"])
    note = " ".join(done.stderr.split())
    assert "what `plan` recommends with plan.tp=4, plan.pp=2: tp 4, pp 2, dp 2, " in note
    model = '[model]\nname = "gpt2"\n[cluster]\ndevice = "h100-sxm"\nnodes = 2\ndevices_per_node = 8\n'
    job = tmp_path / "job.toml"
    job.write_text(model + f"[batch]\nglobal_batch_size = {best['global_batch_size']}\n[precision]\ncompute = 'bf16'\n")
    overrides = HALF[1::2]
    assert load_to_run(str(job), overrides).plan.model_dump() == best["plan"]
    assert sw.load(str(job), *overrides).spec.plan.model_dump() == best["plan"]
    job.write_text(job.read_text() + "[plan]\ndp = 16\n")  # a plan of its own, in which fields are overridden
    assert load_to_run(str(job), ("plan.tp=4", "plan.dp=4")).plan.zero == 0


def test_half_a_plan_that_nothing_completes_is_told_with_defaults() -> None:
    text = printed("estimate", "llama3-405b", "--devices", "8", "--device", "h100-sxm", "--set", "plan.zero=0")
    assert "no plan with plan.zero=0 fits on 8 h100-sxm; the rest has its defaults" in text
    assert "It does not fit one h100-sxm" in text
    assert "contradict each other" in str(refusal("plan", *ON_16, *HALF, "--keep", "plan.tp=2"))


def test_the_cluster_of_a_job_is_replaced() -> None:
    result = plans("plan", "yi-34b", "--devices", "64", "--device", "h200-sxm", *QUICK)
    assert result[0]["num_devices"] == 64 and result[0]["global_batch_size"] == 1024


def test_a_name_that_is_nothing_lists_near_ones() -> None:
    text = str(refusal("plan", "llama-8b", "--devices", "64", "--device", "h100-sxm"))
    assert "did you mean llama3-8b (a model), " in text
    assert "no plan of llama3-405b fits on 8 h100-sxm" in str(
        refusal("estimate", "llama3-405b", "--devices", "8", "--device", "h100-sxm")
    )
    assert "say --devices, such as --devices 8, or" in str(refusal("plan", "llama3-8b", "--device", "h100-sxm"))


# --- a run's days and money ---


def test_days_and_money_of_a_run_are_those_of_its_steps() -> None:
    for options, tokens in (((), 1e12), (("--tokens", "3e11"), 3e11)):
        for plan in plans("plan", *ON_64, *UNPIPED, *options):
            run, steps = plan["run"], tokens / (256 * 8192)
            assert run["tokens"] == tokens
            assert run["days"] == pytest.approx(steps * plan["step_s"] / 86400)
            assert run["device_hours"] == pytest.approx(24 * run["days"] * 64)
            assert run["usd"] == pytest.approx(6.16 * run["device_hours"])
    assert plans("plan", "yi-34b", *QUICK)[0]["run"]["usd"] is None
    assert "tokens too" in str(refusal("plan", *ON_64, "--days", "3"))


def test_sizes_that_an_objective_compared_are_shown() -> None:
    small = ("gpt2", *ON_64[1:], *UNPIPED)
    deadline = ("--objective", "devices", "--tokens", "1e11", "--days", "1")
    text = printed("plan", *small, *deadline)
    (result, *_) = plans("plan", *small, *deadline)
    assert 8 < result["num_devices"] < 64 and result["run"]["days"] <= 1
    table = text[text.index("at each size that was compared") :]
    assert "too slow" in table and table.count("chosen") == 1 and f"{result['num_devices']} " in table
    cheap = printed("plan", *small, "--objective", "cost")
    assert "at each size that was compared" in cheap and "too slow" not in cheap
    assert "at each size" not in printed("plan", *small)
    saving = printed("plan", *small, "--objective", "energy")
    tables = [text[text.index("at each size") :].split("\n\n")[0] for text in (cheap, saving)]
    assert tables[0] == tables[1] and "money kWh" in tables[0]


def test_a_plan_that_is_as_fast_as_the_fastest_is_not_said_to_be_slower() -> None:
    """On one device ZeRO-1 shares nothing, so its step is that of no ZeRO to the last bit: the simpler one is first."""
    words = ["plan", "tiny-llama", "--devices", "1", "--device", "rtx-4090", "--top", "1"]
    printed = CliRunner().invoke(cli, words, catch_exceptions=False).output
    assert re.search(r"Recommended: tp 1, pp 1, dp 1, mb \d+, zero 0", printed)
    assert "Simpler" not in printed and "0.0 % slower" not in printed


def test_a_deadline_that_is_missed_names_whole_nodes() -> None:
    words = ["plan", "gpt2", "--devices", "16", "--device", "h100-sxm", "--objective", "devices", "--tokens", "1e12"]
    with pytest.raises(PlanError, match="--devices, or cluster") as error:
        CliRunner().invoke(cli, [*words, "--days", "1"], catch_exceptions=False)
    (printed,) = re.findall(r"use more than ([\d,]+) devices", str(error.value))
    assert int(printed.replace(",", "")) % 8 == 0


# --- clusters side by side ---


def test_clusters_are_compared() -> None:
    keep = [word for field in ("tp=1", "pp=1", "microbatch_size=1") for word in ("--keep", f"plan.{field}")]
    words = ("compare", "tiny-llama", "--on", "h100-sxm:8", "--on", "a100-sxm-80g:16", "--tokens", "1e9", *keep)
    comparison = sw.load("tiny-llama", devices=8, device="h100-sxm").compare(
        ["h100-sxm:8", "a100-sxm-80g:16"], tokens=1e9, keep=keep[1::2]
    )
    assert typed(*words).stdout == f"{comparison}\n"
    assert json.loads(typed(*words, "--json").stdout) == json.loads(json.dumps(comparison.to_dict()))
    assert [row["plan.num_devices"] for row in comparison.rows()] == [8, 16]


def test_a_table_of_too_many_plans_is_refused_at_once() -> None:
    done = CliRunner().invoke(cli, ["plan", "tiny-llama", "--top", "1000000"])
    assert done.exit_code == 2 and "1000000 is not in the range 1<=x<=100" in done.output
