"""Habits of people's own programs and launchers: adapters by own switches, files that nothing turns on, loops that
count, services, and files that are no jobs."""

import json
from pathlib import Path
from typing import Any

import pytest

from interchange.test_habits_of_files import MEGATRON, OPTIONS, faults, megatron, script
from interchange.test_started_configurations import FILES
from interchange.test_trainer_commands import FOLDER, MODEL, TRL, job_read
from interchange.test_wrapped_commands import read
from shardwright.config.adapter import TARGETS
from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError
from shardwright.config.hugging_face.config_json import fields_of
from shardwright.config.load import load_job
from shardwright.interchange.foreign_job import job_of_texts
from shardwright.interchange.imported import Asked
from shardwright.interchange.recognised import system_name_of
from shardwright.interchange.system import SOURCES

SWIFT = "swift sft --model me/mine --dataset d --max_length 512 --train_type full --gradient_accumulation_steps 4 "


@pytest.mark.parametrize(("start", "count"), [("NPROC_PER_NODE=2 ", 2), ("", 1)])
def test_processes_of_ms_swift_that_have_several_devices_each_are_refused(start: str, count: int) -> None:
    line = f"CUDA_VISIBLE_DEVICES=0,1,2,3 {start}{SWIFT}"
    (fault,) = faults(script(line) | MODEL)
    assert fault.startswith(f"NPROC_PER_NODE = {count} starts fewer processes than the 4 devices")


def test_processes_of_ms_swift_with_a_device_each_or_with_shards_are_read() -> None:
    assert job_read(script(f"CUDA_VISIBLE_DEVICES=2,3 NPROC_PER_NODE=2 {SWIFT}") | MODEL)[1].job.plan.world == 2
    line = f"CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=2 {SWIFT}--deepspeed zero3"
    assert job_read(script(line) | MODEL)[1].job.plan.world == 2
    line = f"CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=2 {SWIFT}"
    assert job_read(script(line) | MODEL, devices=4)[1].job.plan.world == 4  # as the user says


@pytest.mark.parametrize(
    ("switches", "base"),
    [
        ("peft_enabled: true\n", "compute"),
        ("qlora: true\n", "nf4"),
        ("use_lora: true\nuse_qlora: true\n", "nf4"),
        ("enable_qlora: true\nload_in_4bit: true\n", "nf4"),
    ],
)
def test_adapters_by_switches_of_own_programs_are_read(switches: str, base: str) -> None:
    text = TRL["t.yaml"] + switches + "lora_r: 8\nlora_alpha: 16\ntarget_modules: all-linear\n"
    adapter = job_read({"t.yaml": text} | MODEL, devices=8)[1].job.model.adapter
    assert (adapter.rank, adapter.alpha, adapter.targets, adapter.base) == (8, 16.0, TARGETS, base)
    (fault,) = faults({"t.yaml": text.replace("lora_r: 8\n", "")} | MODEL | {"ds.json": '{"num_processes": 8}'})
    assert "nothing says the rank" in fault


def test_a_list_of_words_is_set_as_messages_say_it() -> None:
    sets = ("model.adapter.rank=4", "model.adapter.targets=[query, value]", "cluster.device=h100-sxm")
    job = load_job("docs/job.toml", sets)
    assert job.model.adapter.targets == ("query", "value")
    with pytest.raises(PlanError, match="valid array"):
        load_job("docs/job.toml", ("model.adapter.rank=4", "model.adapter.targets=[query; value]"))


def test_a_file_of_deepspeed_that_nothing_turns_on_is_asked_about() -> None:
    line = f"accelerate launch --num_processes 4 --deepspeed_config_file ds.json own.py {OPTIONS}"
    texts = script(line, ds_json='{"zero_optimization": {"stage": 2}}') | MODEL
    (fault,) = faults(texts)
    assert fault.startswith("zero_optimization.stage = 2: this file of DeepSpeed's is there, and nothing")
    assert job_read(texts, "plan.zero=2")[1].job.plan.zero == 2
    on = {name: text.replace("--num", "--use_deepspeed --num") for name, text in texts.items()}
    assert job_read(on)[1].job.plan.zero == 2


@pytest.mark.parametrize(
    ("head", "layers"),
    [
        ("((i=2; i<=4; i++))", "4"),
        ("((i=2; i<SIZE; ++i))", "7"),
        ("(( i = 2 ; i < SIZE ; i += 3 ))", "5"),
    ],
)
def test_a_loop_that_counts_is_followed(head: str, layers: str) -> None:
    lines = ("SIZE=8", f"for {head}; do", MEGATRON.replace("--num-layers 4", "--num-layers $i"), "done")
    assert job_read(script(*lines))[1].job.model.layers == int(layers)


def test_a_loop_that_counts_to_what_nobody_gave_is_followed_once() -> None:
    lines = ("for ((i=0; i<$MANY; i++)); do", MEGATRON + "--save out$i", "done")
    assert job_read(script(*lines))[1].job.model.layers == 4
    (fault,) = faults(script(lines[0], MEGATRON.replace("--num-layers 4", "--num-layers $i"), "done"))
    assert "--set i=VALUE" in fault


def test_what_a_script_itself_makes_is_not_taken_as_empty() -> None:
    lines = ("read -r DATA < <(python where.py)", 'if [[ -z "$DATA" ]]; then', "exit 1", "fi")
    assert megatron(*lines).job.plan.dp == 8


def test_meshes_of_several_shapes_are_refused_together() -> None:
    text = (
        "system: {tensor_model_parallel_size: 1}\ndata: {}\nmodel: {num_layers: 4, hidden_size: 64, "
        "num_attention_heads: 4, seq_length: 32, micro_batch_size: 1, hetero: {enable_hetero: true, "
        "hetero_process_meshes: [1, 1, 1, 4, 1], hetero_device_types: [A, B]}}\n"
    )
    (fault, *_) = faults({"train.yaml": text})
    assert all(name in fault for name in ("enable_hetero", "hetero_process_meshes", "hetero_device_types"))


def test_what_forks_of_picotron_add_is_read() -> None:
    data: dict[str, Any] = json.loads(FILES["picotron.json"])
    data["model"] |= {"vocab_size": 512, "max_position_embeddings": 256}
    muon = {"name": "muon", "weight_decay": 0.05, "momentum": 0.9, "ns_steps": 4, "ns_coefficients": [3, -4, 2]}
    data["training"] |= {"grad_clip_norm": 1.5, "torch_compile": True, "optimizer": muon, "seq_length": 256}
    texts = {"picotron.json": json.dumps(data)} | MODEL
    answer = job_of_texts(SOURCES["picotron"], texts, Asked(cluster=AskedCluster(0, "h100-sxm")), "x")
    job = answer.job
    assert (job.model.vocab, job.model.longest_sequence) == (512, 256)
    assert (job.optimizer.name, job.optimizer.weight_decay, job.optimizer.momentum) == ("muon", 0.05, 0.9)
    assert (job.optimizer.newton_schulz_steps, job.optimizer.clip_grad_norm) == (4, 1.5)
    assert any("torch_compile" in line for line in answer.lost)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("program: sft.py\nmethod: bayes\nparameters: {lora_r: {values: [4, 8]}}\n", "sweeps of Weights & Biases"),
        ("method: grid\nmetric: {name: loss}\nparameters: {lr: {values: [1]}}\n", "sweeps of Weights & Biases"),
        ("services: {web: {image: x, command: serve}}\n", "a file of Docker Compose, and no command in it trains"),
        ("services: 4\n", "a file of Docker Compose"),
    ],
)
def test_files_that_are_no_jobs_are_refused_by_their_names(text: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        system_name_of("some.yaml", text)


def test_a_service_that_starts_a_script_asks_for_it(tmp_path: Path) -> None:
    text = "services: {train: {image: x, entrypoint: [bash], command: [./go.sh]}}\n"
    with pytest.raises(PlanError, match=r"\./go\.sh is not read: name that file too"):
        read(tmp_path, "compose.yaml", text)


@pytest.mark.parametrize("name", ["LlamaForCausalLMEagle3", "LlamaForCausalLMEagle", "DFlashDraftModel"])
def test_a_model_that_drafts_for_another_is_refused(name: str) -> None:
    keys = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    assert fields_of(keys)[1] == []
    (fault,) = fields_of(keys | {"architectures": [name]})[1]
    assert fault.startswith(f"architectures names {name}, which drafts tokens")
