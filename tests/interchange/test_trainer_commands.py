"""Scripts that start a program with its own configuration, options in two places, and models in folders."""

from pathlib import Path
from typing import Any

import pytest

from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError
from shardwright.interchange.foreign_job import job_of_texts, read_job_of
from shardwright.interchange.imported import Asked, Imported, split_sets
from shardwright.interchange.recognised import system_name_of
from shardwright.interchange.system import SOURCES

FOLDER = Path(__file__).parent / "other_trainers"
MODEL = {"config.json": (FOLDER / "config.json").read_text(encoding="utf-8")}
AXOLOTL = {
    "a.yaml": "base_model: me/mine\nsequence_len: 8192\nmicro_batch_size: 1\ngradient_accumulation_steps: 8\n"
    "datasets: [{path: letters}]\nlearning_rate: 2e-5\nbf16: auto\n"
}
FACTORY = {
    "l.yaml": "model_name_or_path: me/mine\nstage: sft\ndo_train: true\nfinetuning_type: full\ntemplate: llama3\n"
    "cutoff_len: 2048\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 2\nbf16: true\n"
}
TRL = {
    "t.yaml": "model_name_or_path: me/mine\noutput_dir: x\nmax_length: 4096\nper_device_train_batch_size: 16\n"
    "gradient_accumulation_steps: 4\nlearning_rate: 1e-5\nbf16: true\n"
}
SHARDS = {"z.yaml": "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_machines: 2\nnum_processes: 16\n"}
CLM = (
    "deepspeed --num_gpus 8 run_clm.py --per_device_train_batch_size 4 --block_size 1024 --deepspeed ds.json "
    "--learning_rate 1e-4 --output_dir x "
)
ZERO = {"ds.json": '{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}'}


def job_read(texts: dict[str, str], *sets: str, devices: int = 0) -> tuple[str, Imported]:
    """The system that the first file is recognised as, and its job."""
    name, text = next(iter(texts.items()))
    system = system_name_of(name, text)
    variables, overrides = split_sets(sets)
    return system, job_of_texts(SOURCES[system], texts, Asked(variables, overrides, AskedCluster(devices)), name)


# The script and the other files -> system, devices, microbatch, batch, tokens.
STARTED: tuple[tuple[str, dict[str, str], tuple[Any, ...]], ...] = (
    ("accelerate launch --num_processes 4 -m axolotl.cli.train a.yaml", AXOLOTL, ("axolotl", 4, 1, 32, 8192)),
    ("CUDA_VISIBLE_DEVICES=0,1 axolotl train x/a.yaml --micro-batch-size 4", AXOLOTL, ("axolotl", 2, 4, 64, 8192)),
    ("axolotl train a.yaml --launcher torchrun -- --nproc_per_node=8 --nnodes=2", AXOLOTL,
     ("axolotl", 16, 1, 128, 8192)),
    ("#SBATCH --nodes=2\n#SBATCH --gpus-per-node=8\naxolotl train a.yaml", AXOLOTL, ("axolotl", 16, 1, 128, 8192)),
    ("NNODES=2 NPROC_PER_NODE=8 llamafactory-cli train l.yaml", FACTORY, ("llamafactory", 16, 1, 32, 2048)),
    ("export CUDA_VISIBLE_DEVICES=0,1\nllamafactory-cli train l.yaml per_device_train_batch_size=4 cutoff_len=512",
     FACTORY, ("llamafactory", 2, 4, 16, 512)),
    ("torchrun --nproc-per-node 8 --nnodes 2 src/train.py x/l.yaml", FACTORY, ("llamafactory", 16, 1, 32, 2048)),
    ("trl sft --config t.yaml --accelerate_config z.yaml --max_length 512", TRL | SHARDS, ("trl", 16, 16, 1024, 512)),
    ("accelerate launch --config_file z.yaml sft.py t.yaml --per_device_train_batch_size=2", SHARDS | TRL,
     ("accelerate", 16, 2, 128, 4096)),
)  # fmt: skip


@pytest.mark.parametrize(("script", "files", "expected"), STARTED)
def test_a_script_starts_a_program_with_its_configuration(
    script: str, files: dict[str, str], expected: tuple[Any, ...]
) -> None:
    system, result = job_read({"run.sh": f"#!/bin/bash\n{script}\n"} | files | MODEL)
    job = result.job
    batch = job.batch.global_batch_size
    assert (system, job.plan.world, job.plan.microbatch_size, batch, job.model.sequence) == expected


@pytest.mark.parametrize(
    ("script", "files", "words"),
    [
        ("axolotl train a.yaml", {}, "a.yaml has the options"),
        ("axolotl train a.yaml", AXOLOTL, "how many GPUs"),
        ("NNODES=$N llamafactory-cli train l.yaml", FACTORY, "how many GPUs"),
        ("NPROC_PER_NODE=2 axolotl train a.yaml --adapter qlora", AXOLOTL, "adapter = qlora"),
        ("trl dpo --config t.yaml", TRL, "preferences"),
        ("trl sft --config t.yaml --gradient_accumulation_steps auto --num_processes 2", TRL, "steps = auto"),
        ("accelerate launch --num_processes 8 sft.py --config t.yaml --learning_rate 1", {}, "t.yaml is a file"),
        ("accelerate launch --config_file z.yaml sft.py --config t.yaml",
         SHARDS | {"t.yaml": TRL["t.yaml"] + "model_init_kwargs: {num_hidden_layers: 2}\n"}, "num_hidden_layers"),
    ],
)  # fmt: skip
def test_a_script_that_is_understood_in_part_is_refused(script: str, files: dict[str, str], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        job_read({"run.sh": f"#!/bin/bash\n{script}\n"} | files | MODEL)


@pytest.mark.parametrize(
    ("options", "layers", "hidden"),
    [
        ("--model_type gpt2 --config_overrides n_embd=1600,n_head=25,n_layer=48", 48, 1600),
        ("--model_type gpt2", 12, 768),
        ("--model_name_or_path gpt2 --config_name gpt2-xl", 48, 1600),
    ],
)
def test_a_new_model_is_that_of_its_type_and_overrides(options: str, layers: int, hidden: int) -> None:
    model = job_read({"run.sh": CLM + options} | ZERO)[1].job.model
    assert (model.layers, model.hidden) == (layers, hidden)


def test_the_model_is_read_from_a_folder_that_the_file_names(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "config.json").write_text(MODEL["config.json"])
    (tmp_path / "a.yaml").write_text(AXOLOTL["a.yaml"].replace("me/mine", "./models"))
    asked = Asked(cluster=AskedCluster(8))
    result = read_job_of(SOURCES["axolotl"], (str(tmp_path / "a.yaml"),), asked)
    assert result.job.model.hidden == 4096
    assert "models/config.json" in result.assumed[0]


LIGHTNING = """import lightning as L
trainer = L.Trainer(devices=8, precision="bf16-true", strategy=STRATEGY)
model = AutoModelForCausalLM.from_pretrained("mine")
loader = DataLoader(data, batch_size=2)
"""


@pytest.mark.parametrize(("strategy", "master"), [("deepspeed_stage_3_offload", "float32"), ("fsdp", "none")])
def test_deepspeed_keeps_masters_whatever_lightning_calls_the_precision(strategy: str, master: str) -> None:
    texts = {"train.py": LIGHTNING.replace("STRATEGY", f'"{strategy}"')} | MODEL
    assert job_read(texts)[1].job.precision.master == master


@pytest.mark.parametrize(
    "line",
    [
        "for weight in model.layers.parameters(): weight.requires_grad = False",
        "model.embed.requires_grad_(False)",
        "model = get_peft_model(model, LoraConfig(r=8))",
        "config = BitsAndBytesConfig(load_in_4bit=True)",
    ],
)
def test_python_that_trains_a_part_of_the_model_is_refused(line: str) -> None:
    with pytest.raises(PlanError, match="adapters"):
        job_read({"train.py": LIGHTNING.replace("STRATEGY", '"fsdp"') + line + "\n"} | MODEL)


def test_the_data_of_nemos_fine_tuning_says_the_batch_and_the_length() -> None:
    text = (
        "trainer: {devices: 8, precision: bf16}\nmodel:\n  micro_batch_size: 2\n  global_batch_size: 256\n"
        "  encoder_seq_length: 4096\n  num_layers: 4\n  hidden_size: 512\n  num_attention_heads: 8\n"
        "  data: {train_ds: {micro_batch_size: 1, global_batch_size: 128, max_seq_length: 2048}}\n"
    )
    job = job_read({"sft.yaml": text}, "model.vocab=32000")[1].job
    assert (job.plan.microbatch_size, job.batch.global_batch_size, job.model.sequence) == (1, 128, 2048)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("gradient_checkpointing: true\n", ("full", 1, False)),
        ("activation_checkpointing: true\nactivation_checkpointing_kwargs: {every_n_layers: 2}\n", ("full", 2, False)),
        ("gradient_checkpointing: true\ngradient_checkpointing_kwargs: {use_reentrant: false, offload: true}\n",
         ("full", 1, True)),
        ("gradient_checkpointing: true\nactivation_checkpointing: false\n", ("none", 1, False)),
    ],
)  # fmt: skip
def test_both_names_of_checkpointing_say_which_layers(options: str, expected: tuple[Any, ...]) -> None:
    plan = job_read({"t.yaml": TRL["t.yaml"] + options} | SHARDS | MODEL)[1].job.plan
    assert (plan.recompute, plan.recompute_every, plan.offload_activations) == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("NPROC_PER_NODE=8 swift rlhf --rlhf_type dpo --model me/mine", "ms-swift's training by preferences"),
        ("python3 -m verl.trainer.main_ppo trainer.nnodes=1", "verl"),
        ("tune run --nproc_per_node 2 full_finetune_distributed --config c", "torchtune"),
    ],
)
def test_a_script_of_a_program_that_is_not_read_is_refused_by_name(line: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        system_name_of("run.sh", f"#!/bin/bash\n{line}\n")


@pytest.mark.parametrize(
    "options", ["--group_by_length --include_num_input_tokens_seen true", "--fsdp_transformer_layer_cls_to_wrap Block"]
)
def test_options_of_the_trainer_that_change_no_plan_are_no_faults(options: str) -> None:
    plan = job_read({"run.sh": f"{CLM} --model_name_or_path gpt2 {options}"} | ZERO)[1].job.plan
    assert (plan.zero, plan.world) == (3, 8)


def test_a_model_with_a_tower_for_images_is_refused() -> None:
    with pytest.raises(PlanError, match="vision_tower"):
        job_read({"run.sh": f"{CLM} --model_name_or_path gpt2 --vision_tower clip"} | ZERO)


def test_sections_of_flagscale_are_recognised_without_data() -> None:
    text = "system: {tensor_model_parallel_size: 4}\nmodel: {num_layers: 4, hidden_size: 512}\n"
    assert system_name_of("train.yaml", text) == "flagscale"


def test_the_old_name_of_accumulation_counts_in_gpt_neox() -> None:
    texts = {name: (FOLDER / name).read_text(encoding="utf-8") for name in ("neox.yml", "neox-data.yml")}
    texts["neox.yml"] = texts["neox.yml"].replace('"gradient_accumulation_steps": 8', '"gas": 4')
    assert job_read(texts, devices=16)[1].job.batch.global_batch_size == 64  # 4 each of 4, four times


@pytest.mark.parametrize("after", ["--do_train False --do_eval True", "--do_predict", "--do_eval --do_train=false"])
def test_a_command_that_evaluates_after_training_is_not_the_one_that_trains(after: str) -> None:
    own = "torchrun --nproc_per_node 2 run_clm.py --model_name_or_path me/mine --learning_rate 1e-4 --output_dir x "
    lines = (
        f"{own} --per_device_train_batch_size 3 --do_train --do_eval",
        f"{own} --per_device_train_batch_size 9 {after}",
    )
    answer = job_read({"run.sh": "\n".join(["#!/bin/bash", *lines])} | MODEL)[1]
    assert answer.job.plan.microbatch_size == 3
    alone = "\n".join(["#!/bin/bash", f"{own} --per_device_train_batch_size 9"])
    assert job_read({"run.sh": alone} | MODEL)[1].job.plan.microbatch_size == 9
