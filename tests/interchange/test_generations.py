"""A script is priced as the oldest generation of software that its flags belong to and that has its plan."""

import json

import pytest

from interchange.test_faults import LLAMA, MEGATRON, read
from shardwright.api.plans_of_system import held_to
from shardwright.config.load import load_job
from shardwright.interchange.exported import exported
from shardwright.interchange.system import SYSTEMS
from shardwright.planner.search.constraints import Constraints

OLD = " --DDP-impl local --tensor-model-parallel-size 2"


@pytest.mark.parametrize(
    ("flags", "software"),
    [
        ("", "megatron-2021"), ("--sequence-parallel", "megatron-2022"),
        ("--use-distributed-optimizer", "megatron-2022"),
        ("--context-parallel-size 2", "megatron-core"), ("--overlap-grad-reduce", "large-2024"),
    ],
)  # fmt: skip
def test_the_generation_has_all_that_the_script_uses(flags: str, software: str) -> None:
    result = read("megatron", run_sh=MEGATRON + OLD + f" {flags}")
    assert result.job.cluster.software == software
    assert any(f"priced as {software} software" in line for line in result.assumed)


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        ("", "+plain-loss"), ("--overlap-grad-reduce", "+overlap-dp+plain-loss"),
        ("--cross-entropy-loss-fusion", "+compiled-loss"),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", ""),
    ],
)  # fmt: skip
def test_flags_of_today_are_priced_as_today(flags: str, changes: str) -> None:
    """Megatron-LM's loss is not fused unless a flag says so, and keeps float32 beside each logit."""
    assert read("megatron", run_sh=f"{MEGATRON} {flags}").job.cluster.software == f"megatron-core{changes}"


@pytest.mark.parametrize("changes", ["", "+overlap-dp", "+overlap-dp+plain-loss"])
def test_a_script_that_is_written_has_the_overlaps_and_the_loss_of_its_job(changes: str) -> None:
    software = f"megatron-core{changes}"
    sets = ["cluster.nodes=1", "plan.dp=8", "plan.zero=1", f"cluster.software={software}"]
    job = load_job("llama3-8b", [*sets, "cluster.device=h100-sxm", "batch.global_batch_size=8"])
    script = exported(SYSTEMS["megatron"], job).files["run.sh"]
    assert read("megatron", run_sh=script).job.cluster.software == software


def test_sequence_parallel_that_does_nothing_is_told() -> None:
    result = read("megatron", run_sh=MEGATRON + "--sequence-parallel")
    assert any("--sequence-parallel is off" in line for line in result.assumed)
    assert not result.job.plan.sequence_parallel


@pytest.mark.parametrize(
    ("system", "engine", "software"),
    [
        ("deepspeed", {"ds_json": '{"train_micro_batch_size_per_gpu": 1}'}, "deepspeed-2025"),
        ("accelerate", {"a_yaml": "distributed_type: DEEPSPEED\nmixed_precision: bf16\n"}, "deepspeed-2025"),
        ("accelerate", {"a_yaml": "distributed_type: FSDP\nmixed_precision: bf16\n"}, "transformers-2025"),
    ],
)
def test_an_engine_is_priced_as_itself(system: str, engine: dict[str, str], software: str) -> None:
    result = read(system, devices=8, config_json=json.dumps(LLAMA), **engine)
    assert result.job.cluster.software == software
    assert any(f"priced as {software} software" in line for line in result.assumed)


@pytest.mark.parametrize(
    ("software", "zero", "sequence"),
    [("megatron-2021", (0,), (False,)), ("megatron-core", (0, 1), None), ("fsdp-2024", (0, 1), None)],
)
def test_changes_are_held_to_what_the_generation_has(software: str, zero: tuple[int], sequence: object) -> None:
    among = held_to(SYSTEMS["megatron"], software, Constraints()).among
    assert (among["zero"], among.get("sequence_parallel")) == (zero, sequence)
