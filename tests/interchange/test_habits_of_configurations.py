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
    model = {} if system == "torchtitan" else {"config.json": CONFIG}
    return job_of_texts(SOURCES[system], {name: text} | model, asked, "a test")


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


def test_parameters_that_older_files_offload_by_a_word_are_offloaded() -> None:
    zero = {"stage": 3, "cpu_offload": True, "cpu_offload_params": True}
    plan = deepspeed(train_micro_batch_size_per_gpu=1, zero_optimization=zero).job.plan
    assert (plan.offload_optimizer, plan.offload_parameters) == (1.0, True)


def test_numbers_of_autocast_are_those_of_compute() -> None:
    precision = deepspeed(train_micro_batch_size_per_gpu=1, torch_autocast={"enabled": True}).job.precision
    assert (precision.compute, precision.gradients) == ("bf16", "float32")


def test_modules_of_other_families_have_adapters() -> None:
    text = FACTORY + "finetuning_type: lora\nlora_target: query_key_value,dense,dense_h_to_4h,dense_4h_to_h\n"
    assert set(read("llamafactory", text).job.model.adapter.targets) >= {"query", "key", "value", "out", "up", "down"}


TITAN = '[model]\nname = "llama3"\nflavor = "8B"\n[fault_tolerance]\nmin_replica_size = 2\n'


def test_groups_of_replicas_are_told_and_those_that_average_weights_are_refused() -> None:
    assert read("torchtitan", TITAN, name="a.toml").job.plan.dp == 8
    assert any(
        "one group of replicas" in note for note in read("torchtitan", TITAN + "enable = true\n", name="a.toml").lost
    )
    own = TITAN + 'enable = true\nsemi_sync_method = "diloco"\n'
    assert any("semi_sync_method = diloco" in fault for fault in faults("torchtitan", own, name="a.toml"))


def test_sections_of_data_and_schedules_of_forks_block_nothing_of_torchtitan() -> None:
    own = "[dataset]\ndata_logical_shards = 768\n[training]\ndecay_steps_perc = 0.1\n"
    assert read("torchtitan", TITAN + own, name="a.toml").job.plan.dp == 8


def test_shares_of_data_and_unsloth_that_is_off_block_nothing() -> None:
    own = "train_size: 0.8\nuse_unsloth: false\nunsloth_configs:\n  load_in_4bit: true\n  max_seq_length: 8\n"
    assert read("llamafactory", FULL + own).job.model.sequence == 64
    assert any("unsloth_configs" in fault for fault in faults("llamafactory", FULL + own.replace("false", "true", 1)))


def test_degrees_of_experts_are_read_under_names_of_older_releases() -> None:
    own = '[model]\nname = "qwen3"\nflavor = "30B-A3B"\n[training]\nexpert_parallel_degree = 4\n'
    assert read("torchtitan", own, name="a.toml").job.plan.ep == 4


def test_experts_of_older_files_of_gpt_neox_are_refused_by_name() -> None:
    shape = "num_layers: 2\nhidden_size: 64\nnum_attention_heads: 4\nseq_length: 32\nmax_position_embeddings: 32\n"
    own = "train_micro_batch_size_per_gpu: 1\nnum_experts: 4\nmoe_type: deepspeed\n"
    with pytest.raises(PlanError) as caught:
        job_of_texts(SOURCES["gpt-neox"], {"a.yml": shape + own}, Asked(cluster=AskedCluster(8)), "a test")
    assert any("num_experts = 4: experts of GPT-NeoX are not read" in fault for fault in caught.value.faults)


OPTIONS = "model_name_or_path: x/y\nlearning_rate: 1.0e-4\nper_device_train_batch_size: 1\nmax_length: 64\n"


def test_names_that_say_another_kind_of_training_are_told() -> None:
    assert any("rm trains a reward by its name" in line for line in read("trl", OPTIONS, name="rm.yaml").lost)
    assert any(
        "reward_model trains a reward" in line for line in read("trl", OPTIONS + "output_dir: a/reward_model\n").lost
    )
    assert not any("by its name" in line for line in read("trl", OPTIONS + "output_dir: a/sft-for-dpo\n").lost)


def test_an_algorithm_of_next_tokens_needs_no_strength_of_preferences() -> None:
    assert read("trl", OPTIONS + "algorithm: sft\nbeta: 0.1\n").job.plan.dp == 8
    assert any("cpo trains" in fault for fault in faults("trl", OPTIONS + "algorithm: cpo\n"))
    assert any("beta = 0.1" in fault for fault in faults("trl", OPTIONS + "beta: 0.1\n"))


@pytest.mark.parametrize(
    "name", ["ref_model_path", "ref_model", "reward_model_path", "dpo_alpha", "precompute_ref_log_probs"]
)
def test_what_trains_by_preferences_stays_refused_where_it_is_left_out(name: str) -> None:
    """A further model is in the program, whatever the user leaves out of the job."""
    asked = Asked(cluster=AskedCluster(8, "h100-sxm"), variables={name: "ignore"})
    files = {"job.yaml": f"{OPTIONS}{name}: x\n", "config.json": CONFIG}
    with pytest.raises(PlanError, match=f"{name} = x: training by preferences"):
        job_of_texts(SOURCES["trl"], files, asked, "a test")
    assert read("trl", f"{OPTIONS}{name}: null\n").job.plan.dp == 8


def test_the_word_no_is_a_word_of_accelerate() -> None:
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: NO\nnum_processes: 1\nmixed_precision: no\n"
    job = read("accelerate", text, 0).job
    assert (job.plan.world, job.precision.compute) == (1, "float32")


def test_numbers_that_are_left_to_a_program_are_told_behind_accelerate_too() -> None:
    texts = {
        "a.yaml": "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n  deepspeed_config_file: z.json\n",
        "z.json": '{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}}',
        "config.json": CONFIG,
    }
    result = job_of_texts(SOURCES["accelerate"], texts, Asked(), "a test")
    assert any("bf16.enabled is auto" in note for note in result.assumed)


def test_quantizers_of_sound_are_no_quantised_weights() -> None:
    own = '[model]\nname = "llama3"\nflavor = "8B"\nnum_quantizers = 4\n'
    (fault,) = faults("torchtitan", own, name="a.toml")
    assert "model.num_quantizers = 4: this is not known here" in fault


def test_a_rank_may_be_called_r_beside_a_switch() -> None:
    adapter = read("trl", OPTIONS + "lora: true\nr: 32\nlora_alpha: 64\ntarget_modules: all-linear\n").job.model.adapter
    assert (adapter.rank, adapter.alpha) == (32, 64.0)


def test_tensor_parallelism_of_its_own_kind_is_read_of_accelerate() -> None:
    text = "distributed_type: TP\nnum_processes: 2\nmixed_precision: bf16\ntp_config:\n  tp_size: 2\n"
    assert read("accelerate", text, 0).job.plan.tp == 2


def test_norms_behind_layers_are_refused_of_forks_of_gpt_neox() -> None:
    shape = "num_layers: 2\nhidden_size: 64\nnum_attention_heads: 4\nseq_length: 32\nmax_position_embeddings: 32\n"
    own = "train_micro_batch_size_per_gpu: 1\npostnorm: true\n"
    with pytest.raises(PlanError) as caught:
        job_of_texts(SOURCES["gpt-neox"], {"a.yml": shape + own}, Asked(cluster=AskedCluster(8)), "a test")
    assert any("postnorm = True: this is not known here" in fault for fault in caught.value.faults)


@pytest.mark.parametrize(("name", "words"), [("grpo_config.yaml", "by rewards"), ("mine.yaml", "neither the system's")])
def test_options_of_another_kind_of_training_are_refused_by_their_name(name: str, words: str) -> None:
    start = f"accelerate launch --config_file a.yaml train.py --config {name}"
    own = {"a.yaml": "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config: {zero_stage: 1}\n"}
    texts = {"run.sh": f"{start}\n"} | own | {name: "model: {name: me/mine}\ngroup: {size: 4}\n"}
    with pytest.raises(PlanError) as caught:
        job_of_texts(SOURCES["accelerate"], texts, Asked(), "run.sh")
    assert words in caught.value.faults[0]
