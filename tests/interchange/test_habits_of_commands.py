"""Habits of scripts with several training commands, and what is left open by the one that is read."""

from pathlib import Path

import pytest

from interchange.test_habits_of_files import MEGATRON, OPTIONS, faults, script
from interchange.test_trainer_commands import FACTORY, MODEL, job_read
from shardwright.config.base import PlanError
from shardwright.interchange.foreign_job import read_job_of
from shardwright.interchange.imported import Asked
from shardwright.interchange.system import SOURCES

SHARDS = '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'


@pytest.mark.parametrize(
    ("first", "last", "zero"),
    [
        ("deepspeed --num_gpus 2 a.py --deepspeed z.json", "torchrun --nproc_per_node 8 a.py", 0),
        ("deepspeed --num_gpus 2 a.py --deepspeed y.json", "deepspeed --num_gpus 8 a.py --deepspeed z.json", 2),
        ("accelerate launch --config_file z.yaml a.py", "torchrun --nproc_per_node 8 a.py", 0),
    ],
)
def test_a_file_of_another_command_is_left_out(first: str, last: str, zero: int) -> None:
    files = {
        "y_json": SHARDS.replace("2", "3"),
        "z_json": SHARDS,
        "z_yaml": "distributed_type: FSDP\nnum_processes: 4\n",
    }
    named = {name: text for name, text in files.items() if name.replace("_", ".") in first + last}
    job = job_read(script(f"{first} {OPTIONS}", f"{last} {OPTIONS} --max_steps 9", **named) | MODEL)[1]
    assert (job.job.plan.zero, job.job.plan.dp) == (zero, 8)
    others = [name.replace("_", ".") for name in named if name.replace("_", ".") not in last]
    assert [note for note in job.assumed if "is left out" in note] == [
        f"{name} is left out: the training command that is read does not name it" for name in others
    ]


def test_a_file_that_a_file_of_the_last_command_names_counts() -> None:
    accelerate = "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: z.json}\nnum_processes: 8\n"
    first, last = "deepspeed --num_gpus 2 a.py --deepspeed z.json", "accelerate launch --config_file a.yaml a.py"
    texts = script(f"{first} {OPTIONS}", f"{last} {OPTIONS} --max_steps 9", a_yaml=accelerate, z_json=SHARDS)
    assert job_read(texts | MODEL)[1].job.plan.zero == 2


@pytest.mark.parametrize("name", ["z.json", "ds_config.json"])
def test_a_file_that_a_file_of_another_command_names_is_left_out(name: str) -> None:
    """The model's config.json, whose name is the end of another, stays."""
    accelerate = f"distributed_type: DEEPSPEED\ndeepspeed_config: {{deepspeed_config_file: {name}}}\n"
    texts = script(
        f"accelerate launch --config_file a.yaml a.py {OPTIONS}", f"torchrun --nproc_per_node 8 a.py {OPTIONS}"
    )
    answer = job_read(texts | {"a.yaml": accelerate, name: SHARDS} | MODEL)[1]
    assert (answer.job.plan.zero, answer.job.plan.dp) == (0, 8)
    assert sum("is left out" in note for note in answer.assumed) == 2


def test_options_of_another_configuration_are_left_out() -> None:
    other = {"m.yaml": FACTORY["l.yaml"].replace("2048", "512") + "seed: 3\n"}
    run = script("llamafactory-cli train m.yaml", "llamafactory-cli train l.yaml")
    assert job_read(run | other | FACTORY | MODEL, devices=8)[1].job.model.sequence == 2048


def test_alpha_that_nothing_says_follows_the_rank_that_is_given() -> None:
    command = f"deepspeed --num_gpus 8 a.py {OPTIONS} --lora True"
    answer = job_read(script(command) | MODEL, "model.adapter.rank=16", "model.adapter.targets=[query]")[1]
    assert answer.job.model.adapter.alpha == 32.0
    assert any("nothing says alpha of the adapters; 32.0 is taken" in note for note in answer.assumed)
    stated = job_read(script(f"{command} --lora_alpha 8 --lora_r 4") | MODEL, "model.adapter.targets=[query]")[1]
    assert stated.job.model.adapter.alpha == 8.0 and not any("alpha" in note for note in stated.assumed)


@pytest.mark.parametrize(
    ("path", "is_told"),
    [
        ("examples/rwkv/conf/train/3b.yaml", True),
        ("recipes/dpo/full.yaml", True),
        ("t5.yaml", True),
        ("recipes/dpo/sft/full.yaml", False),
        ("/home/rwkv/3b.yaml", False),
        ("conf/train/3b.yaml", False),
    ],
)
def test_a_folder_that_is_called_after_other_training_is_told(path: str, is_told: bool) -> None:
    answer = job_read({path: FACTORY["l.yaml"].replace("stage: sft\n", "")} | MODEL, devices=8)[1]
    assert any("next tokens are counted here" in line for line in answer.lost) is is_told


def test_a_configuration_without_its_experiment_says_that_the_program_is_taken() -> None:
    training = (
        "system: {tensor_model_parallel_size: 1, precision: {bf16: true}}\ndata: {tokenizer: {vocab_size: 128}}\n"
    )
    training += "model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, seq_length: 32, train_iters: 9, "
    training += "max_position_embeddings: 32, micro_batch_size: 1, global_batch_size: 8, optimizer: {lr: 1e-4}}\n"
    note = "no file of an experiment names the program that trains; that of GPT is taken"
    assert note in job_read({"t.yaml": training}, devices=8)[1].assumed
    named = training + "experiment: {task: {type: train, entrypoint: flagscale/train/train_gpt.py}}\n"
    assert note not in job_read({"t.yaml": named}, devices=8)[1].assumed


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/data/models/Qwen3-8B", "qwen3-8b"),
        ("$HUB/Qwen/Qwen3-8B/", "qwen3-8b"),
        ("/models/LLM-Research/Llama-3___2-3B-Instruct", "llama3.2-3b"),
        ("/hub/models--Qwen--Qwen3-8B/snapshots/" + "0a" * 20, "qwen3-8b"),
        ("/data/models/Qwen3-8B-of-mine", ""),
        ("/data/Qwen3-8B/mine", ""),
    ],
)
def test_a_folder_that_is_called_as_a_model_of_the_hub_is_taken_for_it(path: str, model: str) -> None:
    options = OPTIONS.replace("me/mine", path)
    texts = script(f"torchrun --nproc_per_node 8 a.py {options}")
    if not model:
        with pytest.raises(PlanError, match="is not in the catalog"):
            job_read(texts)
        return
    answer = job_read(texts)[1]
    assert answer.job.model.name == model
    assert any(f"the catalog's {model}, by the folder" in note for note in answer.assumed)


@pytest.mark.parametrize("line", ["template_json=t.json", "TEMPLATE=conf/t.json", "T=$PWD; B=1"])
def test_a_configuration_is_made_of_a_file_beside_the_script(line: str, tmp_path: Path) -> None:
    source = {"template_json=t.json": "${template_json}", "TEMPLATE=conf/t.json": '"$TEMPLATE"'}.get(line, "t.json")
    template = tmp_path / ("conf/t.json" if "conf" in line else "t.json")
    template.parent.mkdir(exist_ok=True)
    template.write_text('{"zero_optimization": {"stage": ZERO_STAGE}, "train_micro_batch_size_per_gpu": 2}')
    made = f"sed 's/ZERO_STAGE/2/' {source} | sed 's/x/y/' > made.json"
    flags = "--no-pipeline-parallel --global-batch-size 16 --deepspeed --deepspeed_config made.json"
    (tmp_path / "run.sh").write_text("\n".join(("#!/bin/bash", line, made, MEGATRON + flags)))
    assert read_job_of(SOURCES["megatron"], (str(tmp_path / "run.sh"),), Asked()).job.plan.zero == 2
    template.unlink()
    with pytest.raises(PlanError, match=r"changes made\.json"):
        read_job_of(SOURCES["megatron"], (str(tmp_path / "run.sh"),), Asked())


def test_files_that_arguments_of_a_script_name_are_read(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/z2.json").write_text('{"zero_optimization": {"stage": 2}}')
    command = MEGATRON + "--global-batch-size 16 --deepspeed --deepspeed_config $1"
    (tmp_path / "run.sh").write_text("\n".join(("#!/bin/bash", command)))
    job = read_job_of(SOURCES["megatron"], (str(tmp_path / "run.sh"),), Asked(arguments=("conf/z2.json",))).job
    assert job.plan.zero == 2


@pytest.mark.parametrize(
    "flags", ["--context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 2", "--cp-comm-type a2a+p2p"]
)
def test_a_ring_over_ranks_that_trade_heads_is_refused_by_name(flags: str) -> None:
    texts = script(f"{MEGATRON} --global-batch-size 16 --context-parallel-size 4 {flags}")
    (fault,) = faults(texts)
    assert fault.startswith(flags.replace(" --", ", --")) and "a plan has one of both" in fault
    answer = job_read(texts, "plan.cp_method=ulysses")[1]
    assert (answer.job.plan.cp, answer.job.plan.cp_method) == (4, "ulysses")
    assert any("a plan has one of both" in line for line in answer.lost)


@pytest.mark.parametrize("line", ["cd /home/me/work/engine/", "pushd engine", 'cd "$HERE/engine"'])
def test_a_file_below_the_folder_that_a_script_goes_to_is_read(line: str, tmp_path: Path) -> None:
    (tmp_path / "engine/conf").mkdir(parents=True)
    (tmp_path / "engine/conf/z.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    (tmp_path / "jobs").mkdir()
    file = tmp_path / "jobs/run.sh"
    options = OPTIONS.replace("me/mine", "Qwen/Qwen3-8B")
    command = f"torchrun --nproc_per_node 8 a.py {options} --deepspeed conf/z.json"
    file.write_text(f"#!/bin/bash\n{line}\n{command}\n")
    assert read_job_of(SOURCES["deepspeed"], (str(file),), Asked()).job.plan.zero == 3
    file.write_text(f"#!/bin/bash\ncd /home/me/other\n{command}\n")
    with pytest.raises(PlanError, match=r"conf/z\.json is a file that is not read"):
        read_job_of(SOURCES["deepspeed"], (str(file),), Asked())


@pytest.mark.parametrize(
    ("launcher", "devices"),
    [("accelerate launch", 1), ("torchrun --nproc_per_node 1", 1), ("srun python", 4)],
)
def test_tasks_of_a_batch_system_count_where_something_starts_them(launcher: str, devices: int) -> None:
    batch = '#SBATCH --ntasks=4\n#SBATCH --gres="gpu:a6000:1"\n'
    options = OPTIONS.replace("me/mine", "Qwen/Qwen3-8B")
    texts = {"t.sh": f"#!/bin/bash\n{batch}{launcher} a.py {options} --fsdp full_shard\n"}
    assert job_read(texts)[1].job.plan.world == devices


def test_a_configuration_of_the_program_is_asked_for_whatever_else_is_said() -> None:
    texts = script("accelerate launch --num_processes 8 a.py --mode main --config_file conf/main.yaml")
    asked = faults(texts, "plan.zero=2", "model.name=qwen3-8b")
    assert asked == ["conf/main.yaml has the options of the program, and is not read: name it too"]
    options = OPTIONS.replace("me/mine", "Qwen/Qwen3-8B")
    beside = script(f"accelerate launch --num_processes 8 a.py {options} --config_file conf/main.yaml")
    assert job_read(beside, "plan.zero=2")[1].job.plan.zero == 2


def test_a_stage_that_is_auto_is_asked_for() -> None:
    options = OPTIONS.replace("me/mine", "Qwen/Qwen3-8B")
    engine = '{"zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "auto"}}}'
    texts = script(f"torchrun --nproc_per_node 8 a.py {options} --deepspeed z.json") | {"z.json": engine}
    (fault,) = faults(texts)
    assert "zero_optimization.stage = auto: the launcher fills it in" in fault
    answer = job_read(texts, "plan.zero=2")[1]
    assert (answer.job.plan.zero, answer.job.plan.offload_optimizer) == (2, 0.0)
    assert any("offload_optimizer.device = auto: nothing is offloaded" in note for note in answer.assumed)
