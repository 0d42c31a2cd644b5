"""Habits of public files: how scripts say what they need, which program they start, what options mean there."""

import pytest

from interchange.test_trainer_commands import MODEL, job_read
from shardwright.config.base import PlanError
from shardwright.interchange.imported import Imported
from shardwright.interchange.recognised import system_name_of

MEGATRON = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --train-iters 10 --lr 1e-4 --vocab-size 128 "
)
OPTIONS = "--model_name_or_path me/mine --per_device_train_batch_size 2 --learning_rate 1e-4 --output_dir x "


def script(*lines: str, **files: str) -> dict[str, str]:
    """A script of some lines, and further files by name, with _ before their suffix."""
    named = {name.replace("_json", ".json").replace("_yaml", ".yaml"): text for name, text in files.items()}
    return {"run.sh": "\n".join(("#!/bin/bash", *lines, ""))} | named


def megatron(*lines: str, flags: str = "") -> Imported:
    return job_read(script(*lines, MEGATRON + flags))[1]


def faults(texts: dict[str, str], *sets: str) -> list[str]:
    with pytest.raises(PlanError) as caught:
        job_read(texts, *sets)
    return caught.value.faults


@pytest.mark.parametrize("line", [': "${SIZE:=16}"', ": ${SIZE:=16}", "echo ${SIZE:=16}"])
def test_a_default_that_is_assigned_in_a_word_is_kept(line: str) -> None:
    assert megatron(line, flags="--global-batch-size $SIZE").job.batch.global_batch_size == 16


def test_arithmetic_that_cannot_be_known_is_asked_for_only_where_it_counts() -> None:
    lines = ("left=(`squeue -h`)", "MINUTES=$((left[0]*60 - 15))", "SIZE=$((GPUS * 2))")
    assert megatron(*lines, flags="--exit-duration-in-mins $MINUTES").job.plan.dp == 8
    (fault,) = faults(script(*lines, MEGATRON + "--global-batch-size $SIZE"))
    assert "--global-batch-size by GPUS" in fault


def test_a_loop_over_arguments_that_nobody_gives_does_nothing() -> None:
    loop = 'while [[ "$1" != "" ]]; do case $1 in --size) shift; SIZE=$1 ;; esac; shift; done'
    assert megatron("SIZE=32", loop, flags="--global-batch-size $SIZE").job.batch.global_batch_size == 32


def test_a_program_of_python_in_a_word_is_no_shell() -> None:
    assert megatron("python3 -u -c 'for line in iter(input, 0): print(line)' | tee log").job.plan.dp == 8


def test_options_behind_a_comment_are_no_options_of_the_command() -> None:
    lines = ("deepspeed --num_gpus 2 finetune.py \\", "    # which model", f"    {OPTIONS} --deepspeed z.json")
    (fault,) = faults(script(*lines, z_json="{}") | MODEL)
    assert "line 4: --model_name_or_path begins a command of its own" in fault


@pytest.mark.parametrize(
    ("launcher", "shape"),
    [
        ("deepspeed --include localhost:0,1,4", (1, 3)),
        ("deepspeed --include a:0,1@b:2,3", (2, 2)),
        ("msrun --worker_num 16 --local_worker_num 8 python", (2, 8)),
    ],
)
def test_ranks_of_more_launchers_are_counted(launcher: str, shape: tuple[int, int]) -> None:
    zero = '{"zero_optimization": {"stage": 2}}'
    line = f"{launcher} finetune.py {OPTIONS} --deepspeed z.json"
    cluster = job_read(script(line, z_json=zero) | MODEL)[1].job.cluster
    assert (cluster.nodes, cluster.devices_per_node) == shape


# A line of a script -> the system whose program it starts.
STARTED = {
    "accelerate": (
        f"torchrun --nproc_per_node 4 train.py {OPTIONS} --fsdp 'full_shard auto_wrap'",
        f"# deepspeed --deepspeed z.json\npython train.py {OPTIONS}",
        f"accelerate launch --config_file a.yaml train.py {OPTIONS} --deepspeed z.json",
    ),
    "deepspeed": (
        f"torchrun train.py {OPTIONS} --deepspeed $CONFIG",
        f"deepspeed main.py {OPTIONS} --zero_stage 2 --deepspeed",
    ),
    "llamafactory": ("accelerate launch --config_file a.yaml src/train.py sft.yaml",),
    "megatron": (MEGATRON + "--deepspeed --deepspeed_config z.json",),
}


@pytest.mark.parametrize(("system", "line"), [(name, line) for name, lines in STARTED.items() for line in lines])
def test_a_script_is_known_by_its_command(system: str, line: str) -> None:
    assert system_name_of("run.sh", f"#!/bin/bash\n{line}\n") == system


@pytest.mark.parametrize(
    ("line", "title"),
    [
        ("torchrun --nproc_per_node 8 -m verl.trainer.fsdp_sft_trainer data.x=1", "verl"),
        ("read -r -d '' C <<EOF\nopenrlhf.cli.train_sft\nEOF\ndeepspeed --module $C", "OpenRLHF"),
        ("python scripts/performance/run_script.py --model_recipe_name a", "Megatron-Bridge's scripts"),
    ],
)
def test_programs_that_are_not_read_are_refused_by_name(line: str, title: str) -> None:
    with pytest.raises(PlanError, match=title):
        system_name_of("run.sh", f"#!/bin/bash\n{line}\n")
