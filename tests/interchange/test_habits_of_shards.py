"""Shards and copies that a file says beside how many devices there are, adapters of what is no layer, and files that
look like another system's."""

import json

import pytest

from interchange.test_habits_of_files import script
from interchange.test_trainer_commands import MODEL, job_read
from shardwright.config.adapter import TARGETS
from shardwright.config.base import PlanError
from shardwright.interchange.recognised import system_name_of

AXOLOTL = (
    "base_model: me/mine\nsequence_len: 512\nmicro_batch_size: 2\ndatasets: [{path: a}]\nlearning_rate: 2e-5\n"
    "bf16: true\n"
)
SHARDS = "fsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n"
ADAPTER = "adapter: lora\nlora_r: 8\nlora_alpha: 16\n"


def refused(texts: dict[str, str], devices: int = 0) -> list[str]:
    """The faults of files on so many devices."""
    with pytest.raises(PlanError) as caught:
        job_read(texts, devices=devices)
    return caught.value.faults


@pytest.mark.parametrize(
    ("sizes", "devices", "zero_ranks"),
    [
        ("dp_shard_size: 2\n", 2, 0),
        ("dp_shard_size: 2\ndp_replicate_size: 4\n", 8, 2),
        ("dp_shard_size: 2\ndp_replicate_size: 2\ntensor_parallel_size: 2\n", 8, 2),
        ("dp_replicate_size: 4\n", 8, 2),
        ("dp_shard_size: 2\ncontext_parallel_size: 4\n", 8, 0),
        ("", 8, 0),
    ],
)
def test_shards_that_are_the_ranks_are_read(sizes: str, devices: int, zero_ranks: int) -> None:
    plan = job_read({"a.yaml": AXOLOTL + SHARDS + sizes} | MODEL, devices=devices)[1].job.plan
    assert (plan.world, plan.zero, plan.zero_ranks) == (devices, 3, zero_ranks)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ("dp_shard_size: 2\n", "= 2 x 1 copies is 2 ranks, and 8 ranks have samples of their own; say --devices 2"),
        ("dp_shard_size: 8\ndp_replicate_size: 2\n", "= 8 x 2 copies is 16 ranks"),
        ("dp_replicate_size: 3\n", "= 3 does not divide 8, the ranks with samples of their own (8 / 3 = 2.67)"),
        ("dp_shard_size: 2\ntensor_parallel_size: 2\n", "and 4 ranks have samples of their own; say --devices 4"),
    ],
)
def test_shards_that_are_not_the_ranks_are_refused(sizes: str, words: str) -> None:
    (fault,) = refused({"a.yaml": AXOLOTL + SHARDS + sizes} | MODEL, devices=8)
    assert words in fault


def test_accelerates_shards_are_held_against_its_processes() -> None:
    text = (
        "distributed_type: FSDP\nnum_processes: {}\nmixed_precision: bf16\nfsdp_config: {{fsdp_version: 2}}\n"
        "parallelism_config: {{parallelism_config_dp_shard_size: 4}}\n"
    )
    assert job_read({"a.yaml": text.format(4)} | MODEL)[1].job.plan.dp == 4
    (fault,) = refused({"a.yaml": text.format(8)} | MODEL)
    assert "is 4 ranks, and 8 ranks have samples of their own" in fault


@pytest.mark.parametrize("module", ["embed_tokens", "lm_head", "wte"])
def test_an_adapter_of_what_is_no_layer_is_refused_beside_all_maps(module: str) -> None:
    text = f"{AXOLOTL}{ADAPTER}lora_target_linear: true\nlora_target_modules: [q_proj, {module}]\n"
    (fault,) = refused({"a.yaml": text} | MODEL, devices=8)
    assert f"names {module}" in fault
    way_out = "model.adapter.targets=[query, value]"
    assert job_read({"a.yaml": text} | MODEL, way_out, devices=8)[1].job.model.adapter.targets == ("query", "value")


def test_a_further_map_of_a_layer_adds_nothing_beside_all_of_them() -> None:
    text = f"{AXOLOTL}{ADAPTER}lora_target_linear: true\nlora_target_modules: [q_proj, w1, W_pack]\n"
    assert len(job_read({"a.yaml": text} | MODEL, devices=8)[1].job.model.adapter.targets) == len(TARGETS)


def test_sections_that_flagscale_shares_with_peoples_own_files_are_not_its_own() -> None:
    sections = {"system": {"device": "cuda"}, "model": {"num_layers": 4}, "data": {"num_workers": 2}}
    assert system_name_of("t.json", json.dumps(sections)) == "flagscale"
    own = json.dumps(sections | {"training": {"batch_size": 4}, "experiment_name": "a"})
    with pytest.raises(PlanError, match="no system is known to write such a file"):
        system_name_of("t.json", own)


def test_primus_is_named_where_its_program_is_started() -> None:
    line = "torchrun --nproc_per_node=8 primus/cli/main.py train pretrain --config $EXP --global_batch_size=64"
    with pytest.raises(PlanError, match="starts Primus's programs"):
        job_read(script(line))


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("relora_steps: 100\n", "relora_steps = 100: this changes what is learned"),  # as of 2024, without a switch
        ("relora: true\njagged_restart_steps: 50\n", "relora = True, jagged_restart_steps = 50: this changes what"),
        ("relora: false\njagged_restart_steps: 50\nrelora_prune_ratio: 0.1\n", ""),
        ("relora_steps:\n", ""),
    ],
)
def test_restarts_of_adapters_are_told_where_they_are_on(lines: str, told: str) -> None:
    text = f"{AXOLOTL}{ADAPTER}lora_target_linear: true\n{lines}"
    answer = job_read({"a.yaml": text} | MODEL, devices=8)[1]
    of_restarts = [line for line in (*answer.lost, *answer.unknown) if "relora" in line or "jagged" in line]
    assert len(of_restarts) == bool(told) and all(told in line for line in of_restarts)


def test_a_batch_that_axolotl_is_given_twice_is_refused() -> None:
    (fault,) = refused({"a.yaml": f"{AXOLOTL}batch_size: 64\ngradient_accumulation_steps: 2\n"} | MODEL, devices=8)
    assert "gradient_accumulation_steps, batch_size are both there" in fault
    for line in (
        "batch_size: 8\n",
        "gradient_accumulation_steps: 4\n",
        "gradient_accumulation_steps: 4\nbatch_size:\n",
    ):
        assert job_read({"a.yaml": AXOLOTL + line} | MODEL, devices=8)[1].job.batch.global_batch_size == 2 * 4 * 8
