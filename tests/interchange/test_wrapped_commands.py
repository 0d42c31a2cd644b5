"""Commands within manifests and tasks are read as scripts, and systems that are not read are refused by their names."""

import time
from pathlib import Path

import pytest

from interchange.test_habits_of_files import MEGATRON, OPTIONS, faults, megatron, script
from interchange.test_trainer_commands import MODEL, job_read
from interchange.wrapped_files import LAUNCH, WRAPPED
from shardwright.api.file_check import file_check
from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError
from shardwright.interchange.foreign_job import job_of_texts, read_job_of
from shardwright.interchange.imported import Asked, Imported
from shardwright.interchange.recognised import JOB, system_name_of
from shardwright.interchange.system import SOURCES

H100 = AskedCluster(0, "h100-sxm")


def read(folder: Path, name: str, text: str) -> Imported:
    (folder / name).write_text(text, encoding="utf-8")
    return read_job_of(SOURCES[system_name_of(name, text)], (str(folder / name),), Asked(cluster=H100))


@pytest.mark.parametrize("name", WRAPPED)
def test_the_command_of_a_manifest_or_a_task_is_read_with_its_nodes(name: str, tmp_path: Path) -> None:
    answer = read(tmp_path, name, WRAPPED[name])
    job = answer.job
    assert (job.cluster.nodes, job.cluster.devices_per_node, job.plan.tp, job.plan.dp) == (2, 8, 4, 4)
    assert (job.plan.microbatch_size, job.batch.global_batch_size, job.model.layers) == (2, 32, 8)
    assert f"the command in {tmp_path / name} is read as a script" in answer.assumed


def test_a_manifest_is_known_by_its_keys_whatever_its_suffix(tmp_path: Path) -> None:
    text = WRAPPED["volcano.yaml"].replace("replicas: 2", 'replicas: "${NODES}"')
    assert system_name_of("job.yaml-template", text) == "megatron"
    assert read(tmp_path, "job.yaml-template", text).job.cluster.nodes == 2  # as torchrun says


def test_what_a_manifest_leaves_open_is_asked_for(tmp_path: Path) -> None:
    text = WRAPPED["sky.yaml"].replace("size=4", "size=$TP")
    with pytest.raises(PlanError, match="--set TP=VALUE"):
        read(tmp_path, "sky.yaml", text)


@pytest.mark.parametrize(
    "text",
    [
        "apiVersion: v1\nkind: Service\nspec: {ports: [{port: 1}]}\n",
        "type: service\ncommands: []\n",
        "resources: {accelerators: 'H100:8'}\nrun: [1]\n",
        "resources: 3\nnum_nodes: [2]\nenvs: 5\nrun: 7\n",
        "apiVersion: v1\nkind: Pod\nspec: {containers: [{command: {}, env: 4, resources: 5}]}\n",
    ],
)
def test_a_manifest_without_a_command_is_a_fault_with_its_kind(text: str) -> None:
    with pytest.raises(PlanError, match="no command in it trains"):
        system_name_of("job.yaml", text)


def test_a_manifest_is_checked_as_a_file_of_its_system(tmp_path: Path) -> None:
    (tmp_path / "dstack.yml").write_text(WRAPPED["dstack.yml"], encoding="utf-8")
    check = file_check(str(tmp_path / "dstack.yml"), (), H100)
    assert (check.system, check.legal) == ("megatron", True)


UNREAD = {
    "NeMo RL": ("a.yaml", "policy: {train_global_batch_size: 8, megatron_cfg: {enabled: true}}\n"),
    "Lingua": ("a.yaml", "grad_acc_steps: 1\noptim: {lr: 1.0e-3}\ndistributed: {fsdp_type: full_shard}\n"),
    "Levanter": ("a.yaml", "data: !include d.yaml\ntrainer: {train_batch_size: 8, num_train_steps: 10}\n"),
    "OLMo": ("a.yaml", "max_duration: 1ep\nglobal_train_batch_size: 8\ntokenizer: {identifier: a.json}\n"),
    "LLM Foundry": ("a.yaml", "max_duration: 1ep\nglobal_train_batch_size: 8\ntokenizer: {name: a}\n"),
    "Modalities": ("a.yaml", "settings: {referencing_keys: {a: b}, cuda_env: {rank: 0}}\n"),
    "prime-rl": ("a.toml", "[data]\nbatch_size = 8\nmicro_batch_size = 1\n[optim]\nlr = 1e-5\n"),
    "OLMo-core": ("a.py", "from olmo_core.config import DType\ndef build():\n    return 1\n"),
    "NeMo 2": ("a.py", "from nemo.collections import llm\ndef recipe():\n    return 1\n"),
    "Unsloth": ("a.py", "from unsloth import FastLanguageModel\n"),
    "transformers' Trainer": (
        "a.py",
        "from transformers import (\n    AutoTokenizer,\n    Trainer,\n)\ndef main():\n    1\n",
    ),
    "Modal or Ray": ("a.py", "import modal\napp = modal.App()\ndef train():\n    1\n"),
    "slime": ("a.sh", "#!/bin/bash\npython train.py --rollout-batch-size 8 --actor-num-gpus-per-node 8\n"),
    "torchtune": ("a.yaml", "num_nodes: 1\nresources: {accelerators: 'H100:8'}\nrun: |\n  tune run x --config y\n"),
}


@pytest.mark.parametrize("title", UNREAD)
def test_systems_that_are_not_read_are_refused_by_name_with_a_way_out(title: str) -> None:
    with pytest.raises(PlanError) as caught:
        system_name_of(*UNREAD[title])
    (fault,) = caught.value.faults
    assert f"of {title}" in fault or f"starts {title}" in fault
    assert "say it as a job: shardwright estimate MODEL" in fault


def test_a_script_beside_says_whose_program_is_started() -> None:
    with pytest.raises(PlanError, match="it starts Megatron-Bridge's scripts"):
        system_name_of("run.sh", "#!/bin/bash\n./inner.sh\n", "python scripts/performance/run_script.py\n")


def test_a_configuration_that_begins_from_others_is_a_fault_with_their_names() -> None:
    with pytest.raises(PlanError, match=r"gpt\.yaml, optim/adam\.yaml.*such as nemo"):
        system_name_of("a.yaml", "defaults: [_self_, gpt, {optim@model.optim: adam}]\n")


@pytest.mark.parametrize(
    "line", ["sbatch --nodes=1 --job-name=a inner.sbatch", "./inner.sh", "bash -c 'cd x; ./inner.sh'"]
)
def test_scripts_that_begin_a_command_or_have_options_before_are_read(line: str, tmp_path: Path) -> None:
    inner = "inner.sbatch" if "sbatch" in line else "inner.sh"
    (tmp_path / inner).write_text(f"#!/bin/bash\n{' '.join(LAUNCH)}\n", encoding="utf-8")
    assert read(tmp_path, "run.sh", f"#!/bin/bash\n{line}\n").job.plan.tp == 4


def test_options_of_a_branch_that_does_not_run_are_none() -> None:
    lines = ("LOAD=none", "if [ $LOAD != none ]; then", '  load=" --load $LOAD"', "fi")
    answer = megatron("\n".join(lines), flags="--bf16 ${load} --lr 1e-4")
    assert answer.job.precision.compute == "bf16"
    with pytest.raises(PlanError, match="load"):
        megatron('if [ "$LOAD" != none ]; then\n  load=" --load $LOAD"\nfi', flags="--bf16 ${load}")


def test_layers_that_do_not_divide_into_stages_are_told() -> None:
    answer = megatron(flags="--pipeline-model-parallel-size 4 --num-layers 6")
    assert any("layers do not divide into 4 stages, where Megatron-LM stops" in line for line in answer.lost)


def test_picotrons_script_asks_for_its_configuration() -> None:
    line = "torchrun --nproc_per_node 4 /picotron/train.py --config conf/a.json"
    assert system_name_of("run.sh", f"#!/bin/bash\n{line}\n") == "picotron"


def test_nodes_that_no_yaml_of_nemo_says_are_told() -> None:
    text = (
        "trainer: {devices: 8, precision: bf16}\nmodel: {micro_batch_size: 1, global_batch_size: 16, num_layers: 4,\n"
    )
    text += "  hidden_size: 512, num_attention_heads: 8, encoder_seq_length: 128}\n"
    for nodes, is_told in (("", True), ("trainer: {num_nodes: 2, devices: 8, precision: bf16}\n", False)):
        own = nodes + text.partition("\n")[2] if nodes else text
        answer = job_of_texts(SOURCES["nemo"], {"a.yaml": own}, Asked(overrides=("model.vocab=1000",)), "a.yaml")
        assert any("nothing says trainer.num_nodes" in line for line in answer.assumed) is is_told


@pytest.mark.parametrize("option", ["--grad_accum 16", "--gradient_accumulation_steps 16", "--accumulation_steps=16"])
def test_accumulated_batches_are_read_by_the_names_of_peoples_own_programs(option: str) -> None:
    line = f"accelerate launch --num_processes 2 train.py --model_name me/mine --batch_size_per_device 2 {option}"
    job = job_read(script(f"{line} --learning_rate 1e-4 --shards_file data/a.jsonl") | MODEL)[1].job
    assert (job.plan.microbatch_size, job.batch.global_batch_size) == (2, 64)


def test_an_unknown_option_about_accumulating_is_a_fault() -> None:
    line = f"accelerate launch --num_processes 2 train.py {OPTIONS} --accum_over 4"
    assert any("--accum_over = 4: this is not known here" in fault for fault in faults(script(line) | MODEL))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fsdp_config.json", '{"sharding_strategy": "FULL_SHARD", "backward_prefetch": "backward_pre"}'),
        ("a.json", '{"model": {"name": "auto"}, "hardware": {"num_gpus": "auto"}}'),
        ("a.toml", "[tool.ruff]\nline-length = 120\n"),
        ("a.yaml", "method: bayes\nmetric: {goal: maximize}\n"),
    ],
)
def test_a_file_that_is_neither_a_job_nor_a_model_is_a_fault_with_a_way_out(name: str, text: str) -> None:
    with pytest.raises(PlanError, match=r"no system is known.*shardwright estimate MODEL"):
        system_name_of(name, text)


@pytest.mark.parametrize(
    ("name", "text"),
    [("config.json", "{}"), ("a.json", '{"n_embd": 8}'), ("a.toml", "[plann]\ntp = 2\n"), ("a.toml", "[model]\n")],
)
def test_a_job_or_a_model_with_faults_has_the_faults_of_its_own_reader(name: str, text: str) -> None:
    assert system_name_of(name, text) == JOB


def test_a_yaml_of_a_program_of_the_trainer_is_known_by_its_arguments() -> None:
    assert system_name_of("a.yaml", "model: me/mine\noutput_dir: x\nnum_train_epochs: 1\nbf16: true\n") == "trl"


def test_kinds_of_gpus_of_a_cluster_are_counted(tmp_path: Path) -> None:
    text = WRAPPED["inner.yaml"].replace("nvidia.com/gpu: 8", "cpu: 2, nvidia.com/a100: 8")
    assert read(tmp_path, "job.yaml", text).job.cluster.devices_per_node == 8


@pytest.mark.parametrize(
    ("lines", "start", "shape"),
    [
        ("#BSUB -nnodes 4\n#BSUB -gpu 'num=6:mode=exclusive_process'", "python", (4, 6)),
        ('#BSUB -n 16\n#BSUB -R "span[ptile=8]"\n#BSUB -gpu num=8', "torchrun --nproc_per_node 8", (2, 8)),
        ("#BSUB -nnodes 2", "jsrun -n12 -r6 -a1 -g1 python", (2, 6)),
        ("#BSUB -nnodes 2", "jsrun --nrs 8 --rs_per_host 4 python", (2, 4)),
        ("", "mpirun -np16 -ppn 8 python", (2, 8)),
    ],
)
def test_ranks_of_lsf_are_counted(lines: str, start: str, shape: tuple[int, int]) -> None:
    command = MEGATRON.replace("torchrun --nproc_per_node 8", start)
    answer = job_read({"run.sh": f"#!/bin/bash\n{lines}\n{command}\n"})[1]
    cluster = answer.job.cluster
    assert (cluster.nodes, cluster.devices_per_node) == shape


@pytest.mark.parametrize(
    ("option", "is_fault"), [("--tp 2", True), ("--tp 1", False), ("--vpp 4", True), ("--sp a.model", False)]
)
def test_a_short_name_of_a_degree_that_nobody_reads_is_a_fault(option: str, is_fault: bool) -> None:
    texts = script(f"torchrun --nproc_per_node 4 finetune.py {OPTIONS} {option}") | MODEL
    if is_fault:
        assert any(f"{option.replace(' ', ' = ')}: this is not known here" in fault for fault in faults(texts))
    else:
        assert job_read(texts)[1].job.plan.dp == 4


def test_what_neither_deepspeed_nor_a_plan_knows_of_is_no_fault() -> None:
    files = {"z.json": '{"zero_optimization": {"stage": 2}, "gradient_checkpointing": true}'} | MODEL
    line = f"deepspeed --num_gpus 4 train.py {OPTIONS} --deepspeed z.json --resume_lora_training True"
    assert job_read(script(line) | files)[1].job.plan.zero == 2


def test_a_file_of_many_comments_is_read_in_a_time_that_grows_no_faster_than_it(tmp_path: Path) -> None:
    begin = time.process_time()
    assert read(tmp_path, "job.yaml", "#\n\n   \n---\n" * 5000 + WRAPPED["volcano.yaml"]).job.plan.tp == 4
    with pytest.raises(PlanError, match="no system is known"):
        system_name_of("a.yaml", "# x\n\n" * 20_000 + "a: 1\n")
    with pytest.raises(PlanError, match="no system is known"):
        system_name_of("a.py", "from transformers import (a\n" * 4000)
    assert time.process_time() - begin < 20
