"""Settings that files of other systems leave out have those systems' defaults; one that decides and is not read is
asked for."""

import json
import tomllib
from typing import Any

import pytest

from interchange.test_faults import LLAMA, MEGATRON, faults, read
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.yaml_text import yaml_text
from shardwright.interchange.imported import Imported
from shardwright.interchange.meaning import unread_of_optimizer
from shardwright.report.toml_files import job_toml

MODEL = json.dumps(LLAMA)
TRAIN = "train.py --per_device_train_batch_size 1 --max_steps 10"


def accelerate(own: dict[str, Any], *sets: str, **files: str) -> Imported:
    return read("accelerate", *sets, acc_yaml=yaml_text(own), config_json=MODEL, **files)


def deepspeed(own: dict[str, Any], *sets: str, **files: str) -> Imported:
    return read("deepspeed", *sets, devices=4, ds_json=json.dumps(own), config_json=MODEL, **files)


def test_megatron_fsdp_shards_nothing_unless_it_is_told_to() -> None:
    result = read("megatron", run_sh=MEGATRON + "--use-megatron-fsdp --use-distributed-optimizer")
    assert result.job.plan.zero == 0 and any("no_shard is its default" in line for line in result.assumed)
    strategy = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads"
    assert read("megatron", run_sh=MEGATRON + strategy).job.plan.zero == 2


def test_deepspeed_by_accelerate_has_stage_2_unless_another_is_said() -> None:
    own: dict[str, Any] = {"distributed_type": "DEEPSPEED", "num_processes": 4}
    assert accelerate(own | {"deepspeed_config": {}}).job.plan.zero == 2
    assert accelerate(own | {"deepspeed_config": {"zero_stage": 0}}).job.plan.zero == 0
    named = own | {"deepspeed_config": {"deepspeed_config_file": "conf/x.json"}}
    (fault,) = faults("accelerate", acc_yaml=yaml_text(named), config_json=MODEL)
    assert "conf/x.json is a file that is not read" in fault and "name it too" in fault
    ds = json.dumps({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    assert accelerate(named, x_json=ds).job.plan.zero == 3


@pytest.mark.parametrize(
    ("system", "option"), [("deepspeed", "--deepspeed zero.json"), ("accelerate", "--config_file a.yaml"),
                           ("accelerate", "--fsdp --fsdp_config f.json")]
)  # fmt: skip
def test_a_configuration_that_a_script_names_and_that_is_not_there_is_a_fault(system: str, option: str) -> None:
    results = faults(system, devices=4, run_sh=f"{system} {TRAIN} {option}", config_json=MODEL)
    assert any(option.split()[-1] in fault and "name it too" in fault for fault in results)


@pytest.mark.parametrize(
    ("strategy", "zero", "ranks"),
    [("FULL_SHARD", 3, 0), (1, 3, 0), (2, 2, 0), (3, 0, 0), (4, 3, 4), ("5", 2, 4), ("HYBRID_SHARD_ZERO2", 2, 4)],
)
@pytest.mark.parametrize("key", ["fsdp_sharding_strategy", "fsdp_reshard_after_forward"])
def test_strategies_of_fsdp_are_read_by_name_and_by_number(key: str, strategy: object, zero: int, ranks: int) -> None:
    own = {"distributed_type": "FSDP", "num_processes": 8, "num_machines": 2, "fsdp_config": {key: strategy}}
    plan = accelerate(own).job.plan
    assert (plan.zero, plan.zero_ranks) == (zero, ranks)


@pytest.mark.parametrize(
    ("words", "zero", "offload"),
    [
        ('"full_shard auto_wrap"', 3, False),
        ("shard_grad_op", 2, False),
        ("", 3, False),
        ('"full_shard offload"', 3, True),
    ],
)
def test_the_option_fsdp_of_the_program_is_read(words: str, zero: int, offload: bool) -> None:
    result = read("accelerate", run_sh=f"torchrun --nproc_per_node 8 {TRAIN} --fsdp {words}", config_json=MODEL)
    assert (result.job.plan.dp, result.job.plan.zero, result.job.plan.offload_parameters) == (8, zero, offload)
    assert not any("--fsdp" in name for names in result.without_effect.values() for name in names)


def test_the_file_of_fsdp_and_hybrid_shards_of_the_program_are_read() -> None:
    script = f"torchrun --nproc_per_node 4 --nnodes 2 {TRAIN} --fsdp hybrid_shard --fsdp_config f.json"
    result = read("accelerate", run_sh=script, f_json='{"activation_checkpointing": true}', config_json=MODEL)
    assert (result.job.plan.zero, result.job.plan.zero_ranks, result.job.plan.recompute) == (3, 4, "full")
    assert faults(
        "accelerate", run_sh=script.replace("hybrid_shard", "shards"), f_json='{"version": 1}', config_json=MODEL
    )


@pytest.mark.parametrize("number", ["fp16", "bf16"])
def test_number_types_of_the_program_are_read(number: str) -> None:
    result = read("accelerate", devices=4, run_sh=f"torchrun {TRAIN} --{number}", config_json=MODEL)
    assert result.job.precision.compute == number


def test_numbers_that_are_left_to_a_program_that_is_not_there_are_told() -> None:
    own = {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}, "gradient_clipping": 0.5}
    result = deepspeed(own)
    assert result.job.precision.compute == "float32"
    assert any(line.startswith("bf16.enabled is auto") and "precision.compute=bf16" in line for line in result.assumed)
    assert not any("is auto" in line for line in deepspeed(own, "precision.compute=bf16").assumed)
    script = deepspeed(own, run_sh=f"deepspeed {TRAIN} --bf16")
    assert script.job.precision.compute == "bf16" and not any("is auto" in line for line in script.assumed)


def test_rates_of_deepspeed_have_its_defaults() -> None:
    own: dict[str, Any] = {"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLR"}, "train_batch_size": 4}
    result = deepspeed(own, "optimizer.steps=2000")
    assert result.job.optimizer.learning_rate == 1e-3
    assert any("warmup_type is log" in line for line in result.lost)
    assert any("gradient_clipping" in line for line in result.assumed)
    steps = {"optimizer": {}, "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 5000}}}
    optimizer = deepspeed(own | steps).job.optimizer
    assert (optimizer.warmup_steps, optimizer.min_learning_rate_ratio, optimizer.steps) == (1000, 0.0001, 5000)
    by_program = own | {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}
    assert deepspeed(by_program).job.optimizer.learning_rate == 5e-5
    assert (
        deepspeed(own | {"scheduler": {"type": "WarmupDecayLR"}, "optimizer": {}}).job.optimizer.learning_rate == 1e-3
    )


def test_a_microbatch_that_is_left_to_the_program_has_its_default() -> None:
    result = deepspeed({"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"})
    assert (result.job.plan.microbatch_size, result.job.batch.global_batch_size) == (8, 32)
    assert any("8, the program's default, is taken" in line for line in result.assumed)


def test_a_schedule_or_an_optimizer_that_is_not_known_is_told_and_does_not_block_a_plan() -> None:
    own = {"scheduler": {"type": "OneCycle"}, "optimizer": {"type": "Prodigy"}, "train_batch_size": 4}
    result = deepspeed(own)
    assert any("OneCycle" in line for line in result.lost) and any("Prodigy" in line for line in result.lost)
    settled = deepspeed(own, "optimizer.schedule=cosine", "optimizer.name=adafactor")
    assert (settled.job.optimizer.schedule, settled.job.optimizer.name) == ("cosine", "adafactor")
    assert not any("OneCycle" in line or "Prodigy" in line for line in settled.lost)


NEMO = (
    "trainer: {devices: 4, num_nodes: 2, max_steps: 10}\nmodel:\n  num_layers: 4\n  hidden_size: 64\n"
    "  num_attention_heads: 4\n  ffn_hidden_size: 256\n  encoder_seq_length: 32\n  micro_batch_size: 1\n"
    "  global_batch_size: 8\n  tokenizer: {library: megatron, type: GPT2BPETokenizer}\n"
)


def test_nemo_has_the_precision_of_lightning_unless_another_is_said() -> None:
    result = read("nemo", conf_yaml=NEMO)
    assert result.job.precision.compute == "float32" and any("32-true" in line for line in result.assumed)


def test_devices_of_nemo_that_are_no_number_are_asked_for() -> None:
    assert read("nemo", conf_yaml=NEMO.replace("num_nodes: 2", 'num_nodes: "2"')).job.plan.dp == 8
    for word in ("-1", "auto"):
        with pytest.raises(PlanError, match=f"trainer.devices = {word} does not say how many"):
            read("nemo", conf_yaml=NEMO.replace("devices: 4", f"devices: {word}"))


def test_hybrid_shards_of_nemo_are_those_of_a_node() -> None:
    result = read("nemo", conf_yaml=NEMO + "  fsdp: true\n  fsdp_sharding_strategy: hybrid\n")
    assert (result.job.plan.zero, result.job.plan.zero_ranks) == (3, 4)


@pytest.mark.parametrize(
    "key", ["activations_checkpoint_layers_per_pipeline", "num_micro_batches_with_partial_activation_checkpoints"]
)
def test_recomputation_that_differs_by_stage_or_microbatch_is_told(key: str) -> None:
    assert any(key in line for line in read("nemo", conf_yaml=NEMO + f"  {key}: 1\n").lost)


@pytest.mark.parametrize(
    ("kind", "scaling"), [("", "yarn"), ("--rope-type yarn", "yarn"), ("--rope-type rope", "none")]
)
def test_angles_of_latent_attention_are_of_their_kind(kind: str, scaling: str) -> None:
    flags = f"--multi-latent-attention --position-embedding-type rope --rotary-scaling-factor 40 {kind}"
    assert read("megatron", run_sh=MEGATRON + flags).job.model.rotary_scaling.kind == scaling


@pytest.mark.parametrize("option", ["--hostfile hosts", "--include a@b:0,1", "--exclude b"])
def test_nodes_that_a_file_says_are_asked_for(option: str) -> None:
    files = {"run_sh": f"deepspeed --num_gpus 8 {option} {TRAIN}", "config_json": MODEL}
    (fault, *_) = faults("deepspeed", **files)
    assert option.split()[0] in fault and "--devices" in fault
    assert read("deepspeed", devices=16, **files).job.plan.dp == 16
    both = files | {"run_sh": files["run_sh"].replace("--num_gpus", "--num_nodes 2 --num_gpus")}
    assert read("deepspeed", **both).job.plan.dp == 16


def test_what_changes_memory_time_or_learning_and_is_not_counted_is_told() -> None:
    flags = "--fp8-param-gather --main-params-dtype fp16 --tp-comm-overlap --reset-attention-mask --log-interval 1"
    result = read("megatron", run_sh=MEGATRON + flags)
    assert "--fp8-param-gather, --main-params-dtype fp16: this changes memory, which is not counted" in result.lost
    assert any("the time of a step" in line and "--tp-comm-overlap" in line for line in result.lost)
    assert any("what is learned" in line and "--reset-attention-mask" in line for line in result.lost)
    assert set(result.without_effect) == {"logs"}
    usual = read("megatron", run_sh=MEGATRON + "--attention-backend flash")
    assert usual.without_effect == {"what is taken anyway": ("--attention-backend",)}
    assert any(
        "--attention-backend unfused: " in one
        for one in read("megatron", run_sh=MEGATRON + "--attention-backend unfused").lost
    )
    own = {
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": 5e8,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    }
    lost = deepspeed(own | {"train_batch_size": 4}).lost
    assert any("prefetch" in line and "memory" in line for line in lost) and not any("16bit" in line for line in lost)


def test_the_stage_of_a_configuration_of_deepspeed_is_read_where_no_flag_says_it() -> None:
    script = MEGATRON + "--deepspeed --deepspeed_config conf/ds.json"
    (fault,) = faults("megatron", run_sh=script)
    assert "conf/ds.json" in fault and "--set plan.zero=STAGE" in fault
    assert read("megatron", run_sh=script, ds_json='{"zero_optimization": {"stage": 2}}').job.plan.zero == 2
    assert read("megatron", "plan.zero=1", run_sh=script).job.plan.zero == 1
    assert read("megatron", run_sh=script + " --zero-stage 1").job.plan.zero == 1
    written = 'cat <<EOT > conf/ds.json\n{"zero_optimization": {"stage": 3}}\nEOT\n'
    assert read("megatron", run_sh=written + script).job.plan.zero == 3


@pytest.mark.parametrize("line", ["  activation: mish\n", "trainer.precision: 64-true\n"])
def test_a_word_of_nemo_that_stands_for_nothing_here_is_a_fault(line: str) -> None:
    (fault,) = faults("nemo", conf_yaml=NEMO + line)
    assert line.partition(": ")[2].strip() in fault and "use one of" in fault


def test_a_recipe_of_torchtitan_that_is_unknown_is_a_fault() -> None:
    toml = (
        '[model]\nname = "llama3"\nflavor = "8B"\nconverters = ["float8"]\n[training]\nsteps = 10\nseq_len = 4096\n'
        '[float8]\nrecipe_name = "columnwise"\n'
    )
    (fault,) = faults("torchtitan-0.2", devices=8, job_toml=toml)
    assert "columnwise can't be said here; use one of tensorwise, rowwise, rowwise_with_gw_hp" in fault


def test_numbers_in_which_deepspeed_alone_sends_gradients_are_told() -> None:
    own = {"train_batch_size": 4, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    sent = deepspeed(own | {"communication_data_type": "bf16"})
    assert any("communication_data_type = bf16" in line for line in sent.lost)
    same = deepspeed(own | {"communication_data_type": "fp32"})
    assert not any("communication_data_type" in line for line in same.lost)
    wider = deepspeed(own | {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "bf16"}})
    assert wider.job.precision.reduce == "float32"


@pytest.mark.parametrize("name", ["adam", "sgd", "lion", "muon"])
def test_a_job_has_only_fields_that_its_optimizer_its_rate_and_its_plan_read(name: str) -> None:
    flags = f"--optimizer {name} --sgd-momentum 0.8 --muon-momentum 0.7 --adam-beta2 0.99 --lr-decay-style constant"
    run = MEGATRON + flags + " --min-lr 1e-5 --lr 1e-4 --context-parallel-size {cp} --cp-comm-type all_gather"
    job = read("megatron", run_sh=run.format(cp=1)).job
    unread = {f"optimizer.{field}" for field in unread_of_optimizer(job)} | {"plan.cp_method"}
    assert "optimizer.min_learning_rate_ratio" in unread and not unread & written(job)
    assert ("optimizer.momentum" in written(job)) == (name in ("sgd", "muon"))
    assert "plan.cp_method" in written(read("megatron", devices=2, run_sh=run.format(cp=2)).job)
    stated = read("megatron", "optimizer.momentum=0.6", run_sh=run.format(cp=1)).job
    assert stated.optimizer.momentum == 0.6


def written(job: JobSpec) -> set[str]:
    """The full names of fields that the job's file has."""
    sections = tomllib.loads(job_toml(job))
    return {f"{section}.{name}" for section in ("optimizer", "plan") for name in sections.get(section, {})}
