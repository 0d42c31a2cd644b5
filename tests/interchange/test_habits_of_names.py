"""Names that say a model, an engine or an option otherwise: checkpoints, converted folders, options cut short, and
variables that comments set."""

import json

import pytest

from interchange.test_habits_of_files import MEGATRON, faults, megatron, script
from interchange.test_trainer_commands import MODEL, job_read
from shardwright.config.base import PlanError

LLAMA2_70B = (
    "torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 "
    "--num-attention-heads 64 --seq-length 4096 --micro-batch-size 1 --global-batch-size 16 --vocab-size 32000 "
    "--tensor-model-parallel-size 8 --swiglu --normalization RMSNorm --untie-embeddings-and-output-weights --bf16 "
    "--use-rotary-position-embeddings --no-position-embedding --use-checkpoint-args --load /ckpt/Llama-2-70b/tp8-pp1"
)


def test_a_checkpoint_that_has_another_shape_than_its_command_is_asked_for() -> None:
    """Megatron-LM takes the checkpoint's, with 8 heads of keys and no biases, whatever stands in the command."""
    (fault,) = faults(script(LLAMA2_70B))
    assert "kv_heads 8, bias false where the command has kv_heads 64, bias true" in fault
    for sets in (["model.name=llama2-70b"], ["model.kv_heads=8", "model.bias=false"]):
        model = job_read(script(LLAMA2_70B), *sets)[1].job.model
        assert (model.layers, model.kv_heads, model.bias, model.hidden) == (80, 8, False, 8192)
    same = LLAMA2_70B + " --group-query-attention --num-query-groups 8 --disable-bias-linear"
    answer = job_read(script(same))[1]
    assert answer.job.model.kv_heads == 8
    assert any("--use-checkpoint-args: the shape is that of the command" in note for note in answer.assumed)


def test_the_settings_of_an_engine_hold_where_its_stage_is_said() -> None:
    """Accelerate's launcher does not turn DeepSpeed on by the name of its file alone."""
    command = (
        "accelerate launch --num_processes 2 --deepspeed_config_file ds.json train.py --per_device_train_batch_size 2"
    )
    engine = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    texts = script(command) | MODEL | {"ds.json": json.dumps(engine)}
    plan = job_read(texts, "plan.zero=2")[1].job.plan
    assert (plan.zero, plan.offload_optimizer) == (2, 1.0)
    plan = job_read(texts, "plan.zero=0")[1].job.plan
    assert (plan.zero, plan.offload_optimizer) == (0, 0.0)


@pytest.mark.parametrize(
    "folder", ["Qwen3-30B-A3B-mcore", "Qwen3-30B-A3B-hf-to-mcore-tp2-pp2", "Qwen3-30B-A3B_megatron"]
)
def test_a_folder_of_a_converted_model_is_called_after_it(folder: str) -> None:
    command = (
        f"megatron sft --load /data/{folder} --tensor_model_parallel_size 2 --micro_batch_size 1 --max_length 4096"
    )
    answer = job_read(script(f"NPROC_PER_NODE=8 {command} --global_batch_size 8 --sequence_parallel true"))[1]
    assert answer.job.model.layers == 48 and answer.job.model.moe.experts == 128


def test_options_of_torchrun_may_be_cut_short() -> None:
    launcher = MEGATRON.replace("--nproc_per_node", "--nproc_per").partition(" ")[2]
    assert "--nproc_per " in launcher
    assert job_read(script(f"torchrun --nnode=2 {launcher}"))[1].job.cluster.nodes == 2


def test_a_variable_that_comments_alone_set_is_empty() -> None:
    answer = megatron('# export OVERLAP="--overlap-grad-reduce"', flags="$OVERLAP")
    assert any("$OVERLAP is empty, for comments alone set it" in note for note in answer.assumed)
    assert any("OVERLAP=VALUE" in fault for fault in faults(script(MEGATRON + "$OVERLAP")))


@pytest.mark.parametrize(("pattern", "tensors"), [("--fast", 2), ("--slow", 1)])
def test_a_condition_may_look_for_words_in_a_text_of_the_script(pattern: str, tensors: int) -> None:
    lines = ('MORE="--fast --new"', "TP=1", f'if echo "$MORE" | grep -q -- "{pattern}"; then', "TP=2", "fi")
    assert megatron(*lines, flags="--tensor-model-parallel-size $TP").job.plan.tp == tensors


def test_options_of_epfllms_fork_have_underscores() -> None:
    command = (
        "torchrun --nproc_per_node 4 finetune.py --tensor_model_parallel_size 2 --num_layers 4 --hidden_size 512 "
        "--num_attention_heads 8 --seq_length 2048 --micro_batch_size 1 --global_batch_size 4 --vocab_size 50304 --bf16"
    )
    plan = job_read(script(command))[1].job.plan
    assert (plan.tp, plan.dp) == (2, 2)


@pytest.mark.parametrize("option", ["--use_liger_kernel True", "--use_liger true", "--enable_liger_kernel"])
def test_ligers_kernels_are_those_of_other_software(option: str) -> None:
    command = "torchrun --nproc_per_node 2 train.py --per_device_train_batch_size 2 --bf16 --model_max_length 512 "
    assert job_read(script(command + option) | MODEL)[1].job.cluster.software == "transformers-liger"
    texts = (
        script(f"{command}{option} --deepspeed ds.json") | MODEL | {"ds.json": '{"zero_optimization": {"stage": 2}}'}
    )
    assert job_read(texts)[1].job.cluster.software == "deepspeed-liger"
    assert job_read(script(command) | MODEL)[1].job.cluster.software == "transformers-2025"


def test_experts_of_gpt_neox_are_those_of_set() -> None:
    keys = {
        "num_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 128, "moe_num_experts": 4,
        "moe_router_type": "topk", "train_micro_batch_size_per_gpu": 1, "pos_emb": "rotary", "model_parallel_size": 1,
    }  # fmt: skip
    texts = {"neox.yml": json.dumps(keys)}
    assert any("--set model.moe.experts=N" in fault for fault in faults(texts, "model.vocab=512"))
    sets = ("model.vocab=512", "model.moe.experts=4", "model.moe.top_k=1", "model.moe.ffn=1024")
    assert job_read(texts, *sets, devices=2)[1].job.model.moe.experts == 4


@pytest.mark.parametrize(
    ("keys", "field", "flag"),
    [
        ('"fp16": {"enabled": true}', "precision.compute=bf16", "fp16.enabled true, and the command has --bf16"),
        ('"train_batch_size": 640', "batch.global_batch_size=16", "train_batch_size 640"),
        ('"train_micro_batch_size_per_gpu": 7', "plan.microbatch_size=2", "train_micro_batch_size_per_gpu 7"),
    ],
)
def test_deepspeeds_file_has_the_sizes_and_numbers_of_the_command(keys: str, field: str, flag: str) -> None:
    """DeepSpeed's engine takes its file, and the program its flags."""
    command = f"{MEGATRON} --bf16 --global-batch-size 16 --deepspeed --deepspeed_config ds.json"
    job = script(command, ds_json=f'{{"zero_optimization": {{"stage": 1}}, {keys}}}')
    (fault,) = faults(job)
    assert flag in fault and f"--set {field.partition('=')[0]}=" in fault
    assert job_read(job, field)[1].job.plan.zero == 1
    same = '"bf16": {"enabled": true}, "train_batch_size": 16, "train_micro_batch_size_per_gpu": 2'
    agreeing = script(command, ds_json=f'{{"zero_optimization": {{"stage": 1}}, {same}}}')
    assert job_read(agreeing)[1].job.plan.zero == 1


@pytest.mark.parametrize("option", ["--optimizer-selection zetas", "--opt-type ademamix", "--my-optim came"])
def test_an_option_that_names_another_optimizer_is_a_fault(option: str) -> None:
    """Forks choose optimizers of their own by options of their own, and moments are the most of a state."""
    (fault,) = faults(script(f"{MEGATRON} --bf16 {option}"))
    assert option.split()[0] in fault and "=ignore" in fault
    for harmless in ("--optimizer-selection fused_adamw", "--opt-type AdamW", "--my-optim torch.optim.AdamW"):
        assert job_read(script(f"{MEGATRON} --bf16 {harmless}"))[1].job.optimizer.name == "adamw"


@pytest.mark.parametrize("otherwise", ["  else\n    sleep 600\n  fi", "  fi\n  sleep 600"])
def test_a_script_that_waits_for_free_devices_trains_then(otherwise: str) -> None:
    lines = (
        "free() {",
        "  nvidia-smi --query-gpu=memory.free --format=csv,noheader,nounits | head -n 1",
        "}",
        "while true; do",
        "  FREE=$(free)",
        '  if [ "$FREE" -ge 15000 ]; then',
        f"    {MEGATRON} --bf16 > log.txt 2>&1",
        "    if [ $? -eq 0 ]; then echo done; fi",
        "    break",
        otherwise,
        "done",
    )
    answer = job_read(script(*lines))[1]
    assert answer.job.model.layers == 4
    assert any("since the script waits for it" in note for note in answer.assumed)
    with pytest.raises(PlanError, match="no command in it trains"):  # nothing says that it comes to that
        job_read(script(*(line.replace("sleep 600", "echo no") for line in lines)))


def test_the_rotary_positions_of_pai_are_those_of_llama() -> None:
    line = f"{MEGATRON} --bf16 --use-llama2-rotary-position-embeddings --rotary-base 100000 --rotary-scale-factor 4"
    model = job_read(script(line))[1].job.model
    assert (model.positions, model.rotary_base) == ("rotary", 100000.0)
    assert (model.rotary_scaling.kind, model.rotary_scaling.factor) == ("linear", 4.0)


def test_whole_nodes_that_a_line_of_uge_asks_for_are_the_hosts() -> None:
    command = MEGATRON.replace("--nproc_per_node 8", "--nproc_per_node 4 --nnodes $NHOSTS")
    job = job_read(script("#$ -l h_rt=1:00:00,rt_F=8", command + "--bf16"))[1].job
    assert (job.cluster.nodes, job.cluster.devices_per_node) == (8, 4)
    (fault,) = faults(script("#$ -l h_rt=1:00:00", command + "--bf16"))
    assert "--set NHOSTS=VALUE" in fault


def test_an_option_is_no_slip_of_the_key_with_its_name() -> None:
    """train_batch_size of DeepSpeed's file is the batch of all devices; an option of a program may be another."""
    line = "accelerate launch --num_processes 2 own.py --per_device_train_batch_size 2 --train_batch_size 2"
    (fault,) = faults(script(line) | MODEL)
    assert "could change the model, the plan or the batch" in fault and "and train_batch_size is" not in fault


def test_one_node_that_was_assumed_stands_beside_what_it_makes_illegal() -> None:
    yaml = "trainer: {devices: 8}\nmodel: {micro_batch_size: 1, global_batch_size: 64, num_moe_experts: 16"
    yaml += ", expert_model_parallel_size: 16, encoder_seq_length: 64, num_layers: 4, hidden_size: 64"
    yaml += ", num_attention_heads: 16}\n"
    with pytest.raises(PlanError) as error:
        job_read({"nemo.yaml": yaml}, "model.vocab=128")
    assert "plan.ep 16 does not divide" in error.value.faults[0]
    assert "it is Lightning's 1 (--devices N)" in error.value.faults[1]
