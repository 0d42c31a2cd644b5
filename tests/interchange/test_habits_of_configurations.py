"""Habits of public configurations: sizes that have to agree, and settings that mean nothing where others are off."""

import json
from typing import Any

import pytest

from interchange.test_adapter_settings import AXOLOTL, CONFIG
from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError
from shardwright.interchange.foreign_job import job_of_texts
from shardwright.interchange.imported import Asked, Imported
from shardwright.interchange.system import SOURCES


def read(system: str, text: str, devices: int = 8, name: str = "job.yaml") -> Imported:
    asked = Asked(cluster=AskedCluster(devices, "h100-sxm"))
    return job_of_texts(SOURCES[system], {name: text, "config.json": CONFIG}, asked, "a test")


def faults(system: str, text: str, devices: int = 8, name: str = "job.yaml") -> list[str]:
    with pytest.raises(PlanError) as caught:
        read(system, text, devices, name)
    return caught.value.faults


def deepspeed(devices: int = 8, **settings: Any) -> Imported:
    return read("deepspeed", json.dumps(settings), devices, "ds.json")


@pytest.mark.parametrize(
    ("settings", "microbatch_size", "num_microbatches"),
    [
        ({"train_batch_size": 64}, 8, 1),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, 2, 4),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, 2, 4),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, 2, 4),
        ({"train_micro_batch_size_per_gpu": 2}, 2, 1),
    ],
)
def test_sizes_of_a_batch_follow_from_one_another(
    settings: dict[str, int], microbatch_size: int, num_microbatches: int
) -> None:
    job = deepspeed(**settings).job
    assert (job.plan.microbatch_size, job.num_microbatches) == (microbatch_size, num_microbatches)


def test_sizes_of_a_batch_that_disagree_are_a_fault_with_the_devices_they_are_for() -> None:
    sizes = {"train_batch_size": 576, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1}
    (fault,) = faults("deepspeed", json.dumps(sizes), name="ds.json")
    assert (
        "= 576 is not train_micro_batch_size_per_gpu = 3 x gradient_accumulation_steps = 1 x 8 replicas = 24" in fault
    )
    assert "--devices 192" in fault
    assert deepspeed(192, **sizes).job.num_microbatches == 1
    (fault,) = faults("deepspeed", '{"train_batch_size": 32, "gradient_accumulation_steps": 32}', name="ds.json")
    assert "--devices 1," in fault


FACTORY = (
    "model_name_or_path: x/y\nstage: sft\ndo_train: true\ncutoff_len: 64\nper_device_train_batch_size: 1\n"
    "template: default\ndataset: letters\nlearning_rate: 1.0e-4\nmax_steps: 30\nbf16: true\n"
)
SHARDED = "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\nfsdp_config:\n"

FULL = FACTORY + "finetuning_type: full\n"
SWITCHED_OFF = {
    "adapters": ("llamafactory", FULL + "lora_rank: 8\nlora_target: all\nadditional_target: lm_head\n"),
    "frozen layers": ("llamafactory", FULL + "freeze_trainable_layers: 2\nfreeze_extra_modules: norm\n"),
    "projections": ("llamafactory", FULL + "galore_rank: 8\nbadam_mode: layer\nquantization_method: bnb\n"),
    "preferences": ("llamafactory", FULL + "pref_beta: 0.1\nref_model: x/y\n"),
    "generation": ("llamafactory", FULL + "vllm_maxlen: 4096\nexport_size: 5\nsplit_special_tokens: true\n"),
    "data": ("llamafactory", FULL + "preprocessing_batch_size: 1000\n"),
    "axolotl": ("axolotl", AXOLOTL + "adapter:\nlora_r: 8\nlora_target_linear: true\npeft_use_dora: true\n"),
    "packing": ("axolotl", AXOLOTL + "sample_packing_bin_size: 200\nexcess_length_strategy: drop\n"),
}


@pytest.mark.parametrize("name", SWITCHED_OFF)
def test_what_another_setting_switches_off_blocks_nothing(name: str) -> None:
    job = read(*SWITCHED_OFF[name]).job
    assert job.model.adapter.rank == 0 and job.plan.dp == 8


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("finetuning_type: lora\nadditional_target: lm_head\n", "additional_target = lm_head"),
        ("finetuning_type: lora\nuse_llama_pro: true\n", "use_llama_pro = True"),
        ("finetuning_type: full\nuse_galore: true\n", "use_galore = True"),
        ("finetuning_type: full\nuse_kt: true\n", "use_kt = True"),
        ("finetuning_type: freeze\nfreeze_trainable_layers: 2\n", "freeze_trainable_layers = 2"),
    ],
)
def test_what_is_switched_on_and_changes_the_job_is_refused_by_name(settings: str, words: str) -> None:
    assert any(words in fault for fault in faults("llamafactory", FACTORY + settings))


def test_keys_of_fsdp_config_may_lack_their_prefix() -> None:
    own = "  sharding_strategy: SHARD_GRAD_OP\n  offload_params: true\n  activation_checkpointing: true\n"
    plan = read("accelerate", SHARDED + own, 0).job.plan
    assert (plan.zero, plan.offload_optimizer, plan.recompute) == (2, 1.0, "full")


def test_names_of_fields_and_sections_that_are_off_are_known_of_deepspeed() -> None:
    zero = {"stage": 3, "prefetch_bucket_size": 1000, "param_persistence_threshold": 0}
    off = {
        "sparse_attention": {"mode": "fixed", "block": 16},
        "curriculum_learning": {"enabled": False, "max_seq_len": 8},
    }
    result = deepspeed(train_micro_batch_size_per_gpu=1, zero_optimization=zero, zero3_init_flag=True, **off)
    assert result.job.plan.zero == 3 and any("sparse_attention.mode" in note for note in result.lost)
    own = {"curriculum_learning": {"enabled": True, "max_seq_len": 8}, "train_micro_batch_size_per_gpu": 1}
    (fault,) = faults("deepspeed", json.dumps(own), name="ds.json")
    assert "curriculum_learning.max_seq_len = 8" in fault


def test_weights_without_a_copy_in_float32_are_read_of_deepspeed() -> None:
    numbers = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    adam = {"type": "AdamW", "params": {"betas": [0.9, 0.95]}}
    precision = deepspeed(train_micro_batch_size_per_gpu=1, bf16=numbers, optimizer=adam).job.precision
    assert (precision.master, precision.gradients, precision.moments) == ("none", "compute", "bf16")
