"""Files as people have them, made small: each is read with its meaning, or refused with what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from interchange.test_faults import LLAMA as LLAMA_KEYS
from interchange.test_faults import MEGATRON, faults, read
from shardwright.api.asked_job import AskedJob
from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.cost.calibration import shipped
from shardwright.interchange.foreign_job import read_job_of
from shardwright.interchange.imported import Asked, Imported, split_sets
from shardwright.interchange.meaning import differences
from shardwright.interchange.reading.settings import field_of
from shardwright.interchange.system import SYSTEMS
from shardwright.memory.job_memories import fullest
from shardwright.memory.job_memory import job_memory
from shardwright.sharding.stage_parameters import model_parameters, num_parameters

FOLDER = Path(__file__).parent / "as_people_have"
LLAMA = "j0-llama8b/config.json"
A100 = "a100-sxm-80g"


def imported(
    system: str, files: str, *sets: str, devices: int = 0, device: str = A100, arguments: str = ""
) -> Imported:
    variables, overrides = split_sets(sets)
    paths = tuple(str(FOLDER / name) for name in files.split())
    cluster = AskedCluster(devices, device)
    return read_job_of(SYSTEMS[system], paths, Asked(variables, overrides, cluster, tuple(arguments.split())))


def parameters(job: JobSpec) -> int:
    return sum(place.num_elements for place in model_parameters(job.model))


READ: dict[str, tuple[str, tuple[str, ...], int, dict[str, Any]]] = {
    "megatron a1-call.sh a1-inner.sh": ("", (), 0, {"plan.tp": 4, "plan.dp": 2, "plan.recompute": "full"}),
    "megatron a2-tenth.sh": ("1 2 3 4 5 6 7 8 9 2", (), 0, {"plan.tp": 2}),
    "megatron ./a2-tenth.sh": ("", ("10=2",), 0, {"plan.tp": 2}),
    "megatron b1-mpirun.sh": ("", (), 0, {"plan.dp": 16, "cluster.nodes": 4, "cluster.devices_per_node": 8}),
    "megatron b2-no-python.sh": ("", (), 0, {"plan.dp": 16, "cluster.nodes": 4, "cluster.devices_per_node": 8}),
    "megatron c1-quoted-paren.sh": ("", (), 0, {"plan.dp": 8}),
    "megatron c2-underscores.sh": ("", (), 0, {"optimizer.steps": 3815}),
    "megatron c3-submits-itself.sh": ("", (), 0, {"plan.dp": 8, "plan.tp": 2}),
    "megatron c4-parse-args.sh": ("", (), 0, {"model.layers": 16, "plan.tp": 2}),
    "megatron ./c4-parse-args.sh": ("--layers 32 --tp 4", (), 0, {"model.layers": 32, "plan.tp": 4}),
    "megatron d2-deepspeed-experts.sh": (
        "", (), 0, {"model.moe.top_k": 1, "model.moe.every": 2, "model.moe.first_dense": 0, "plan.ep": 16},
    ),
    "megatron d3-deepspeed-offload.sh": ("", (), 0, {"plan.offload_optimizer": 1.0, "plan.zero": 2}),
    "megatron d4-one-key-head.sh": ("", (), 0, {"model.kv_heads": 1}),
    "megatron d5-checkpointing-by-half.sh": ("", (), 0, {"plan.recompute": "none"}),
    "megatron k2-optimizer.sh": ("", (), 0, {"optimizer.name": "adafactor"}),
    f"accelerate h2-shards.yaml h2-arguments.yaml {LLAMA}": (
        "", (), 0, {"plan.microbatch_size": 8, "batch.global_batch_size": 128, "plan.recompute": "full",
                    "model.sequence": 2048},
    ),
    f"accelerate h2-shards.yaml i1-adapter.sh {LLAMA}": (
        "", (), 8, {"model.adapter.rank": 32, "model.adapter.base": "nf4", "plan.zero": 3},
    ),
    "nemo h3-child.yaml h3-base.yaml": (
        "", ("model.vocab=50304",), 32, {"model.layers": 32, "model.hidden": 4096, "plan.tp": 4, "plan.pp": 2},
    ),
    "nemo k1-schedule.yaml": (
        "", ("model.vocab=50304",), 0, {"optimizer.warmup_steps": 62, "optimizer.schedule": "cosine"},
    ),
    "torchtitan h4/config_registry.py": (
        "", ("CONFIG=harbour_8b",), 16,
        {"model.sequence": 8192, "plan.microbatch_size": 2, "batch.global_batch_size": 16},
    ),
}  # fmt: skip


@pytest.mark.parametrize("command", READ)
def test_a_file_is_read_with_its_meaning(command: str) -> None:
    arguments, sets, devices, wanted = READ[command]
    system, _, files = command.partition(" ")
    job = imported(system, files, *sets, devices=devices, arguments=arguments).job
    assert {name: field_of(job, name) for name in wanted} == wanted


REFUSED = {
    "megatron d1-experts-of-a-fork.sh": ("--moe-num-experts 32", ("--set moe-num-experts=ignore",)),
    "megatron e1-encoder.sh": ("pretrain_bert.py trains an encoder (BERT)", ()),
    "megatron e2-mamba.sh": ("pretrain_mamba.py trains state spaces (Mamba)", ()),
    "megatron f1-own-merges.sh": (
        "--vocab-file words/harbour-131072/vocab.json is not GPT-2's",
        ("--set model.vocab=N",),
    ),
    f"accelerate h1-other-trainer.yaml {LLAMA}": (
        "is a configuration of axolotl by its keys, and none of Accelerate",
        (),
    ),
    "nemo h3-child.yaml": ("begins from h3-base.yaml (Hydra's defaults)", ()),
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_would_be_read_wrongly_is_refused(command: str) -> None:
    start, ways = REFUSED[command]
    system, _, files = command.partition(" ")
    with pytest.raises(PlanError) as caught:
        imported(system, files, devices=8)
    assert any(start in fault and all(way in fault for way in ways) for fault in caught.value.faults)


def test_a_setting_that_is_left_out_is_told() -> None:
    names = ("moe-num-experts", "moe-top-k", "moe-capacity-factor", "moe-expert-model-parallelism")
    result = imported("megatron", "d1-experts-of-a-fork.sh", *(f"{name}=ignore" for name in names))
    assert "--moe-num-experts 32: left out, as --set says" in result.lost
    with pytest.raises(PlanError, match="--set moe-tops=ignore: no setting in the files is called so"):
        imported("megatron", "d4-one-key-head.sh", "moe-tops=ignore")


def test_experts_of_a_fork_are_counted_with_its_defaults() -> None:
    job = imported("megatron", "d2-deepspeed-experts.sh").job
    assert round(parameters(job) / 1e9) == 10


def test_a_device_without_flash_attention_keeps_its_scores() -> None:
    job = imported("megatron", "g1-no-flash.sh", device="v100-sxm-32g").job
    assert job.cluster.software == "megatron-2022"
    assert imported("megatron", "g1-no-flash.sh").job.cluster.software == "megatron-core+plain-loss"


def test_one_configuration_of_zero_is_one_job() -> None:
    by_deepspeed = imported("deepspeed", f"l1-shards.json {LLAMA}", devices=8).job
    by_accelerate = imported("accelerate", f"h2-shards.yaml {LLAMA}").job
    different = {name for name, *_ in differences(by_deepspeed, by_accelerate)}
    assert not any(name.startswith(("plan.", "precision.", "model.")) for name in different)


NOTED = {
    "j1-gpt2": "n_special, predict_special_tokens", "j2-llama-extras": "is_llama_config, max_sequence_length",
    "j3-qwen3-experts": "shared_expert_intermediate_size", "j6-image-and-text": "vision_config of the model is not",
    "j8-quantised": "quantization_config is ignored",
}  # fmt: skip


@pytest.mark.parametrize("name", NOTED)
def test_a_configuration_is_taken_with_a_note_on_what_is_not(name: str) -> None:
    job = AskedJob(str(FOLDER / name), cluster=AskedCluster(8, "h100-sxm"))
    assert any(NOTED[name] in note for note in job.notes)
    assert job.to_plan().job.model.layers


def test_weights_without_masters_are_eight_bytes_a_parameter_and_fit() -> None:
    """Llama 3 8B with training.dtype = bfloat16 on one A100 of 80 GB, which torchtitan can train."""
    job = imported("torchtitan", "l2-titan.toml", devices=1).job
    assert (job.precision.master, job.precision.gradient_number, job.precision.moments) == ("none", "bf16", "bf16")
    memory = fullest(job, shipped())
    assert 8 * 8.03e9 < memory.total < 76 * 2**30
    (account,) = job_memory(job)
    assert account.state_bytes == 8 * num_parameters(job.model)


def test_the_first_of_steps_and_tokens_ends_a_run_of_megatron_deepspeed() -> None:
    script = MEGATRON + "--deepspeed --zero-stage 1 --train-tokens 1280 --no-pipeline-parallel"
    assert read("megatron", run_sh=script).job.optimizer.steps == 5
    assert read("megatron", run_sh=script.replace("1280", "12800")).job.optimizer.steps == 10


def test_blocks_of_no_layers_recompute_nothing() -> None:
    flags = "--recompute-granularity full --recompute-method block --recompute-num-layers 0"
    assert read("megatron", run_sh=MEGATRON + flags).job.plan.recompute == "none"


OPTIONS = (
    "model_name_or_path: some/llama\nfinetuning_type: full\nstage: sft\ndeepspeed: conf/ds.json\ncutoff_len: 32\n"
    "per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\nmax_steps: -1\npacking: true\n"
)
ZERO = json.dumps({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"})


def test_options_in_a_file_of_their_own_are_read_with_the_configuration_that_they_name() -> None:
    files = {"sft_yaml": OPTIONS, "ds_json": ZERO, "config_json": json.dumps(LLAMA_KEYS)}
    job = read("deepspeed", devices=8, **files).job
    assert (job.plan.zero, job.plan.microbatch_size, job.batch.global_batch_size) == (3, 2, 64)
    assert job.model.sequence == 32
    for more, word in (("finetuning_type: freeze", "frozen"), ("beta: 0.1", "preferences"), ("stage: dpo", "DPO")):
        changed = files | {"sft_yaml": OPTIONS.replace(more.split()[0], "old_" + more.split()[0]) + more + "\n"}
        assert any(word in fault for fault in faults("deepspeed", devices=8, **changed))


PROGRAM = MEGATRON.partition("pretrain_gpt.py")[2]
STARTS = {
    "srun -N 2 --ntasks-per-node 4 python": (2, 4),
    "mpirun -np 16 -ppn 4 python -u": (4, 4),
    "mpiexec -n 8 python": (1, 8),
    "mpirun -np 2 -npernode 1 torchrun --nproc_per_node 8": (2, 8),
    "srun --nodes=2 torchrun --nproc_per_node=4": (2, 4),
    "mpirun --map-by ppr:4:node -np 8 python": (2, 4),
    "#SBATCH --ntasks=16\n#SBATCH --nodes=2\nsrun python": (2, 8),
    "#PBS -l select=2:ncpus=64:ngpus=4:mpiprocs=4\nmpiexec -n 8 python": (2, 4),
    "#SBATCH --gpus=16 -N 2\n#SBATCH --nodes=2\nsrun singularity exec img python": (2, 8),
}


@pytest.mark.parametrize("start", STARTS)
def test_ranks_are_those_that_the_launcher_starts(start: str) -> None:
    cluster = read("megatron", run_sh=f"{start} pretrain_gpt.py {PROGRAM} --global-batch-size 16").job.cluster
    assert (cluster.nodes, cluster.devices_per_node) == STARTS[start]


def test_ranks_that_nobody_states_are_asked_for() -> None:
    (fault,) = faults("megatron", run_sh=f"python pretrain_gpt.py {PROGRAM}")
    assert "nothing says how many GPUs there are; say it with --devices, such as 8" in fault
