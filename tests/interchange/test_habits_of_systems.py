"""Whose file it is where keys are few, and what scripts leave to their environment: nodes, ranks, what they submit."""

from pathlib import Path

import pytest

from interchange.test_habits_of_files import MEGATRON, OPTIONS, faults, script
from interchange.test_habits_of_recipes import recipe
from interchange.test_trainer_commands import MODEL, TRL, job_read
from interchange.test_wrapped_commands import read
from shardwright.config.base import PlanError
from shardwright.interchange.make_recipes import recipes_script
from shardwright.interchange.recognised import system_name_of

SWIFT = "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-8B --dataset d --global_batch_size 32 "
UNREAD = {
    "LLaMA-Factory 1.0": ("a.yaml", "model: me/mine\nmodel_class: llm\ndist_config: {name: fsdp2}\nbf16: false\n"),
    "qlora-pipe": ("a.toml", "model_dir = 'm'\npipeline_stages = 2\n[[datasets]]\ndataset_path = 'd'\n"),
    "Colossal-AI": ("a.sh", "#!/bin/bash\ncolossalai run --nproc_per_node 8 own.py --lora_rank 16\n"),
    "verl": ("a.sh", "#!/bin/bash\ntorchrun -m mine.fsdp_sft_trainer data.x=1 model.partial_pretrain=m\n"),
    "verl by its YAML": ("a.yaml", "defaults: [base, _self_]\nmodel: {partial_pretrain: m}\ntrainer: {logger: a}\n"),
    "HALOs": ("a.sh", "#!/bin/bash\naccelerate launch launch.py loss=dpo model=llama ++model.name_or_path=m\n"),
}


@pytest.mark.parametrize("title", UNREAD)
def test_systems_are_refused_by_their_own_name(title: str) -> None:
    with pytest.raises(PlanError, match=f"(of|starts) {title.partition(' by')[0]}"):
        system_name_of(*UNREAD[title])


@pytest.mark.parametrize(
    "text",
    [
        "model: {name: gpt, d_model: 256, n_layers: 4}\ntrainer: {max_steps: 50, micro_batch_size: 4}\nrun: {a: 1}\n",
        "trainer: {name: own}\nloss: {beta: 0.1}\n",
    ],
)
def test_a_section_called_trainer_makes_no_file_of_nemo(text: str) -> None:
    with pytest.raises(PlanError, match="no system is known to write such a file"):
        system_name_of("a.yaml", text)


@pytest.mark.parametrize(
    "text",
    [
        "trainer: {devices: 8}\nmodel: {num_layers: 4}\n",
        "trainer: {precision: bf16}\nexp_manager: {name: a}\nmodel: {mcore_gpt: true}\n",
        "run: {name: a, results_dir: b}\ntrainer: {max_steps: 9}\n",
    ],
)
def test_files_of_nemo_are_known_by_what_no_other_has(text: str) -> None:
    assert system_name_of("a.yaml", text) == "nemo"


def test_a_training_of_flagscale_that_begins_from_another_is_no_file_of_nemo() -> None:
    assert system_name_of("a.yaml", "defaults: [base]\nsystem: {a: 1}\nmodel: {seq_length: 64}\ndata: {b: 1}\n") == (
        "flagscale"
    )


def test_a_task_of_flagscale_that_trains_by_rewards_asks_for_no_further_file() -> None:
    text = "defaults: [{rl: 0_6b}, _self_]\nexperiment: {exp_name: a, task: {type: rl, backend: verl}}\n"
    (fault,) = faults({"a.yaml": text})
    assert fault.startswith("its task is rl with verl")


@pytest.mark.parametrize("words", ["model.layers=48", "++trainer.batch_size=32", "x=1 model.lora_r=8"])
def test_words_of_hydra_behind_a_program_of_its_own_are_no_words_to_pass_over(words: str) -> None:
    line = f"accelerate launch --num_processes 4 train.py {OPTIONS}{words}"
    name = words.split()[-1].lstrip("+").partition("=")[0]
    assert any(f"--{name}" in fault for fault in faults(script(line) | MODEL))
    assert any(name.replace("_", "-") in fault for fault in faults(script(MEGATRON + words)))


def test_a_value_of_an_option_is_no_word_of_hydra() -> None:
    line = f"accelerate launch --num_processes 4 --rdzv_conf layers=48,batch_size=2 train.py {OPTIONS}"
    assert job_read(script(line) | MODEL)[1].job.plan.dp == 4


@pytest.mark.parametrize("use", ["echo $NNODES", 'if [ "${NNODES}" -gt 1 ]; then echo many; fi'])
@pytest.mark.parametrize(
    "command",
    [SWIFT, "NPROC_PER_NODE=8 swift sft --model me/mine --train_type full --gradient_accumulation_steps 4 "],
)
def test_nodes_that_a_script_takes_from_its_environment_are_asked_for(use: str, command: str) -> None:
    texts = script(use, f"{command}--max_length 512") | MODEL
    assert any("--set NNODES=VALUE" in fault for fault in faults(texts))
    assert job_read(texts, "NNODES=2")[1].job.plan.world == 16


@pytest.mark.parametrize("use", ["echo ${NNODES:-1}", "# $NNODES of them", "export NNODES=1; echo $NNODES", "echo a"])
def test_nodes_that_a_script_says_or_does_not_use_are_one(use: str) -> None:
    assert job_read(script(use, SWIFT) | MODEL)[1].job.plan.world == 8


def test_further_arguments_of_megatron_in_an_object_hold_over_the_others() -> None:
    line = SWIFT + """--tensor_model_parallel_size 4 --megatron_extra_kwargs '{"tensor_model_parallel_size": 2}'"""
    assert job_read(script(line) | MODEL)[1].job.plan.tp == 2
    line = SWIFT + """--megatron_extra_kwargs '{"profile": true}'"""
    assert job_read(script(line) | MODEL)[1].unknown == ()


@pytest.mark.parametrize(
    "value", ["""'{"mystery_layers": 3}'""", '''"{'tensor_model_parallel_size': 2}"''', '''"{'mystery_layers': $N}"''']
)
def test_an_object_whose_keys_could_matter_is_a_fault(value: str) -> None:
    name = "mystery" if value.startswith("'{") else "megatron_extra_kwargs"
    assert any(name in fault for fault in faults(script(SWIFT + f"--megatron_extra_kwargs {value}") | MODEL))
    line = f"torchrun --nproc_per_node 4 train.py {OPTIONS}--own_kwargs {value}"
    assert any("--own_kwargs" in fault for fault in faults(script(line) | MODEL))


RANKS = "case ${lrank} in\n[0])\n  SIZE=16\n  %s\n  ;;\n[1])\n  SIZE=32\n  %s\n  ;;\nesac"


def test_of_a_case_on_the_rank_that_of_the_first_is_followed() -> None:
    command = MEGATRON + "--global-batch-size $SIZE"
    answer = job_read(script("lrank=$OMPI_COMM_WORLD_LOCAL_RANK", RANKS % (command, command)))[1]
    assert answer.job.batch.global_batch_size == 16
    assert any("part of rank 0 is followed (OMPI_COMM_WORLD_LOCAL_RANK)" in note for note in answer.assumed)


def test_a_case_on_what_is_no_rank_is_left_open() -> None:
    command = MEGATRON + "--global-batch-size $SIZE"
    (fault,) = faults(script("lrank=$SIZE_OF_IT", RANKS % (command, "")))
    assert "no command in it trains" in fault


@pytest.mark.parametrize("line", ["JOB=$(sbatch --parsable inner.sbatch)", 'echo "$(sbatch inner.sbatch)"'])
def test_a_script_that_is_submitted_for_its_number_is_followed(line: str, tmp_path: Path) -> None:
    (tmp_path / "inner.sbatch").write_text(f"#!/bin/bash\n#SBATCH --nodes=1\n{MEGATRON}\n", encoding="utf-8")
    assert read(tmp_path, "run.sh", f"#!/bin/bash\n{line}\n").job.plan.dp == 8


def test_a_command_that_is_submitted_in_a_word_is_followed() -> None:
    lines = (f'CMD="srun {MEGATRON}--bf16"', 'OUT=$(sbatch --nodes 1 --gpus-per-node 8 --wrap "$CMD")')
    assert job_read(script(*lines))[1].job.precision.compute == "bf16"
    line = 'OUT=$(sbatch --wrap "srun own-tool fit --config c.yaml")'
    (fault,) = faults(script(line, "while [ $S ]; do S=$(x); done"))
    assert "srun own-tool fit" in fault


def test_weights_that_are_loaded_in_bfloat16_have_no_copy_without_an_engine() -> None:
    text = TRL["t.yaml"] + "torch_dtype: bfloat16\nbf16: true\nadam_beta2: 0.95\n"
    precision = job_read({"t.yaml": text} | MODEL, devices=8)[1].job.precision
    assert (precision.master, precision.gradients, precision.moments) == ("none", "compute", "bf16")
    with_copy = job_read({"t.yaml": text} | MODEL, "precision.master=float32", devices=8)[1]
    assert with_copy.job.precision.master == "float32"
    answer = job_read({"t.yaml": text.replace("adam_beta2: 0.95\n", "")} | MODEL, devices=8)[1]
    assert (answer.job.precision.master, answer.job.precision.moments) == ("none", "float32")
    assert any("moments of AdamW are bfloat16 there" in line for line in answer.lost)
    assert any("without a copy (--set precision.master=float32)" in note for note in answer.assumed)


@pytest.mark.parametrize(
    ("more", "files"),
    [
        ("", {"ds.json": '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'}),
        ("", {"f.yaml": "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config: {fsdp_version: 2}\n"}),
        ("use_peft: true\nlora_r: 8\nlora_alpha: 16\nlora_target_modules: [q_proj]\n", {}),
    ],
)
def test_weights_in_bfloat16_have_a_copy_where_an_engine_or_peft_makes_one(more: str, files: dict[str, str]) -> None:
    text = TRL["t.yaml"] + more + "torch_dtype: bfloat16\nbf16: true\n"
    named = "deepspeed: ds.json\n" if "ds.json" in files else ""
    assert job_read({"t.yaml": text + named} | files | MODEL, devices=8)[1].job.precision.master == "float32"


@pytest.mark.parametrize("line", ["training_stage: sft", "training_stage: pretrain", "parallel_mode: data_parallel"])
def test_words_for_what_is_counted_are_no_faults(line: str) -> None:
    job_read({"t.yaml": TRL["t.yaml"] + line + "\n"} | MODEL, devices=8)


@pytest.mark.parametrize("line", ["training_stage: dpo", "train_stage: rm", "parallel_mode: dist_flash_attn"])
def test_words_for_what_is_not_counted_are_faults(line: str) -> None:
    assert line.partition(":")[2].strip() in " ".join(faults({"t.yaml": TRL["t.yaml"] + line + "\n"} | MODEL))


CHOICES = """include common.mk
MODE ?= small
ifeq ($(MODE),big)
  SIZE = 64
else ifeq "$(MODE)" "middle"
  SIZE = 48
else
  SIZE = 32
endif
ifneq ($(MODE),small)
FLAGS = --bf16 --seed 1
endif
train:
ifdef DEBUG
\techo hi
endif
\t{}--global-batch-size $(SIZE) $(COMMON) $(FLAGS)
"""


@pytest.mark.parametrize(
    ("mode", "size", "number"), [("small", 32, "float32"), ("big", 64, "bf16"), ("middle", 48, "bf16")]
)
def test_conditions_of_a_makefile_choose_its_variables(mode: str, size: int, number: str, tmp_path: Path) -> None:
    (tmp_path / "common.mk").write_text("COMMON = --num-layers 6 --weight-decay 0.3\n", encoding="utf-8")
    text = CHOICES.format(MEGATRON).replace("small\nifeq", f"{mode}\nifeq")
    job = recipe(tmp_path, "Makefile", text, "train").job
    assert (job.batch.global_batch_size, job.model.layers, job.precision.compute) == (size, 6, number)


@pytest.mark.parametrize(
    ("given", "size"), [("", 32), ("SIZE = 64\n", 64), ("SIZE =\n", 32), ("SIZE = 8 # few\nSIZE = 64\n", 64)]
)
def test_a_variable_that_a_makefile_does_not_set_is_empty(given: str, size: int, tmp_path: Path) -> None:
    text = given + "ifeq ($(SIZE),)\nSIZE = 32\nendif\ntrain:\n\t" + MEGATRON + "--global-batch-size $(SIZE)\n"
    assert recipe(tmp_path, "Makefile", text, "train").job.batch.global_batch_size == size
    text = text.replace("ifeq ($(SIZE),)", "ifneq '' '$(SIZE)'\nelse")
    assert recipe(tmp_path, "Makefile", text, "train").job.batch.global_batch_size == size


def test_a_condition_on_what_a_makefile_does_not_say_is_told_and_a_missing_file_asked_for(tmp_path: Path) -> None:
    text = f"ifeq ($(MODE),big)\nSIZE = 64\nelse\nSIZE = 32\nendif\ntrain:\n\t{MEGATRON}--global-batch-size $(SIZE)\n"
    answer = recipe(tmp_path, "Makefile", text, "train")
    assert answer.job.batch.global_batch_size == 32
    assert any("--set MODE=VALUE" in note for note in answer.assumed)
    text = text.replace("ifeq", "include lacks.mk\nifeq").replace("SIZE =", "OTHER =")
    with pytest.raises(PlanError, match="SIZE"):
        recipe(tmp_path, "Makefile", text, "train")


@pytest.mark.parametrize("text", ["ifeq (a,b\nA = 1\n", "else\nendif\nendif\n", "ifeq\nifdef\n" * 40, "include \n"])
def test_conditions_that_are_no_conditions_end_nothing(text: str) -> None:
    assert recipes_script("Makefile", text + "t:\n\techo hi\n").count("\n") >= text.count("\n")
