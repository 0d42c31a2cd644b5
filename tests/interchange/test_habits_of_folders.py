"""Files that name others and where they lie; tests of Megatron-LM, and StarCoder 2 of nanotron."""

import json
from pathlib import Path

import pytest

from interchange.test_habits_of_files import OPTIONS, faults
from interchange.test_trainer_commands import MODEL, TRL, job_read
from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError
from shardwright.config.hugging_face.config_json import fields_of
from shardwright.config.model import ModelSpec
from shardwright.interchange.foreign_job import read_job_of
from shardwright.interchange.imported import Asked, Imported
from shardwright.interchange.recognised import system_name_of
from shardwright.interchange.system import SOURCES

STARCODER = """general: {project: a, run: b}
checkpoints: {checkpoint_interval: 10}
model:
  dtype: bfloat16
  init_method: {std: 0.018}
  model_config: {is_starcoder2_config: true, activation_function: gelu_pytorch_tanh, attn_pdrop: 0.1, embd_pdrop: 0.1,
    resid_pdrop: 0.1, grouped_query: true, num_kv_heads: 2, multi_query: false, hidden_size: 3072,
    intermediate_size: 12288, num_hidden_layers: 30, num_attention_heads: 24, layer_norm_epsilon: 1e-05,
    max_position_embeddings: 16384, rope_theta: 999999, sliding_window_size: 4096, global_attn_layers: [],
    use_rotary_embeddings: true, scale_attn_weights: true, vocab_size: 49152}
optimizer: {accumulate_grad_in_fp32: true, zero_stage: 0}
parallelism: {dp: 4, tp: 1, pp: 1, pp_engine: 1f1b}
tokens: {batch_accumulation_per_replica: 4, micro_batch_size: 1, sequence_length: 4096, train_steps: 20}
"""
OF_TRANSFORMERS = {
    "model_type": "starcoder2", "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
    "num_attention_heads": 24, "num_key_value_heads": 2, "max_position_embeddings": 16384, "rope_theta": 999999,
    "sliding_window": 4096, "vocab_size": 49152, "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5,
    "residual_dropout": 0.1, "embedding_dropout": 0.1, "attention_dropout": 0.1, "use_bias": True,
}  # fmt: skip


def test_starcoder_2_in_nanotron_is_that_of_transformers() -> None:
    fields, faults_of_it = fields_of(OF_TRANSFORMERS)
    expected = ModelSpec.model_validate(fields | {"sequence": 4096, "init_std": 0.018})
    assert not faults_of_it
    assert job_read({"a.yaml": STARCODER})[1].job.model == expected


@pytest.mark.parametrize(("words", "kv_heads"), [("multi_query: true", 1), ("initializer_range: 0.1", 1)])
def test_starcoder_2_has_one_head_of_keys_unless_it_has_groups(words: str, kv_heads: int) -> None:
    text = STARCODER.replace("grouped_query: true, num_kv_heads: 2, multi_query: false", words)
    assert job_read({"a.yaml": text})[1].job.model.kv_heads == kv_heads


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("global_attn_layers: []", "global_attn_layers: [3]"),
        ("use_rotary_embeddings: true", "use_rotary_embeddings: false"),
        ("scale_attn_weights: true", "scale_attn_weights: false"),
        ("vocab_size: 49152", "vocab_size: 49152, own_layers: 3"),
        ("resid_pdrop: 0.1", "resid_pdrop: 0.2"),
    ],
)
def test_what_starcoder_2_here_is_not_is_a_fault(was: str, now: str) -> None:
    assert (
        now.rpartition(", ")[2].partition(":")[0].replace("resid_pdrop", "dropout")
        in faults({"a.yaml": STARCODER.replace(was, now)})[0]
    )


TEST = """ENV_VARS: {CUDA_DEVICE_MAX_CONNECTIONS: 1}
MODEL_ARGS:
  --num-layers: 4
  --hidden-size: 64
  --num-attention-heads: 4
  --seq-length: 32
  --max-position-embeddings: 32
  --micro-batch-size: 2
  --global-batch-size: 32
  --train-iters: 10
  --lr: 0.0001
  --vocab-size: 128
  --tensor-model-parallel-size: 2
  --sequence-parallel: true
  --swiglu: false
  --save: ${CHECKPOINT_SAVE_PATH}
  --moe-router-padding-for-quantization: true
TEST_TYPE: regular
"""


def test_arguments_of_megatrons_tests_are_read_once_their_program_is_said(tmp_path: Path) -> None:
    (fault,) = refused(tmp_path, TEST)
    assert "--set TRAINING_SCRIPT_PATH=VALUE" in fault
    job = of_test(tmp_path, TEST, "pretrain_gpt.py").job
    assert (job.plan.tp, job.plan.dp, job.plan.sequence_parallel, job.model.gated_mlp) == (2, 4, True, False)
    (fault,) = refused(tmp_path, TEST, "pretrain_bert.py")
    assert "BERT" in fault
    (fault,) = refused(tmp_path, TEST + "MODE: rl\n")
    assert fault.startswith("MODE = rl")
    (fault,) = refused(tmp_path, TEST + "MODEL_ARGS: 4\n", "pretrain_gpt.py")
    assert "no command" in fault


def of_test(folder: Path, text: str, program: str = "") -> Imported:
    (folder / "model_config.yaml").write_text(text, encoding="utf-8")
    variables = {"TRAINING_SCRIPT_PATH": program} if program else {}
    asked = Asked(variables, cluster=AskedCluster(8))
    return read_job_of(SOURCES["megatron"], (str(folder / "model_config.yaml"),), asked)


def refused(folder: Path, text: str, program: str = "") -> list[str]:
    with pytest.raises(PlanError) as caught:
        of_test(folder, text, program)
    return caught.value.faults


HETERO = "system: {tensor_model_parallel_size: 2}\nmodel: {num_layers: 4, hidden_size: 64, num_attention_heads: 4,\n"
HETERO += "  seq_length: 32, max_position_embeddings: 32, micro_batch_size: 2, global_batch_size: 16, train_iters: 9,\n"
HETERO += "  lr: 1.0e-4}\ndata: {vocab_size: 128, tokenizer_type: NullTokenizer}\n"
EXPERIMENT = "defaults: [_self_, {train: small}]\nexperiment: {exp_name: a, task: {type: train, backend: megatron},\n"
EXPERIMENT += "  runner: {nnodes: 1, nproc_per_node: 8}}\naction: run\n"


def of_files(folder: Path, files: dict[str, str], *named: str) -> Imported:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    first = next(iter(files))
    system = system_name_of(first, files[first])
    return read_job_of(SOURCES[system], tuple(str(folder / name) for name in (first, *named)), Asked())


def test_files_that_a_configuration_begins_from_are_read_where_hydra_seeks_them(tmp_path: Path) -> None:
    files = {"conf/train.yaml": EXPERIMENT, "conf/train/small.yaml": "defaults: [base]\n"}
    files["conf/train/base.yaml"] = HETERO
    answer = of_files(tmp_path, files)
    assert (answer.job.plan.tp, answer.job.plan.dp, answer.job.model.layers) == (2, 4, 4)
    assert sum("is read, which the files name" in note for note in answer.assumed) == 2


def test_a_file_that_the_user_names_is_taken_before_the_one_beside(tmp_path: Path) -> None:
    files = {"conf/train.yaml": EXPERIMENT, "conf/train/small.yaml": HETERO}
    files["other/small.yaml"] = HETERO.replace("num_layers: 4", "num_layers: 6")
    assert of_files(tmp_path, files, "other/small.yaml").job.model.layers == 6


@pytest.mark.parametrize("path", ["../train/small", "/etc/small", "lacks"])
def test_a_file_elsewhere_is_asked_for(path: str, tmp_path: Path) -> None:
    files = {"conf/a/train.yaml": EXPERIMENT.replace("train: small", f"train: {path}"), "conf/train/small.yaml": HETERO}
    with pytest.raises(PlanError, match="which is none of the files; name it too"):
        of_files(tmp_path, files)


def test_configurations_that_begin_from_one_another_are_a_fault(tmp_path: Path) -> None:
    files = {"conf/train.yaml": EXPERIMENT, "conf/train/small.yaml": "defaults: [{other: b}]\n"}
    files["conf/train/other/b.yaml"] = "defaults: [small, b]\n"
    with pytest.raises(PlanError, match="begin from one another"):
        of_files(tmp_path, files)


LAUNCHED = """#!/bin/bash
ACCELERATE_CONFIG_FILE=conf/z3.yaml
CONFIG_FILE=conf/sft.yaml
bash -c "accelerate launch --config_file $ACCELERATE_CONFIG_FILE --num_processes 4 sft.py $CONFIG_FILE"
"""
ENGINE = "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\nmixed_precision: bf16\n"


def test_a_file_of_the_launcher_and_one_of_the_program_are_both_read(tmp_path: Path) -> None:
    files = {"s/run.sh": LAUNCHED, "conf/z3.yaml": ENGINE, "conf/sft.yaml": TRL["t.yaml"]} | MODEL
    job = of_files(tmp_path, files, "config.json").job
    assert (job.plan.zero, job.plan.microbatch_size, job.plan.dp) == (3, 16, 4)


def test_of_two_files_of_one_kind_none_is_taken(tmp_path: Path) -> None:
    lines = LAUNCHED.replace("CONFIG_FILE=conf/sft.yaml", "CONFIG_FILE=conf/z2.yaml\nOPTIONS=conf/sft.yaml")
    files = {"s/run.sh": lines, "conf/z3.yaml": ENGINE, "conf/z2.yaml": ENGINE.replace("3", "2")} | MODEL
    with pytest.raises(PlanError, match=r"z3\.yaml, z2\.yaml are of one kind, and the command names each"):
        of_files(tmp_path, files, "config.json")


def test_of_several_files_that_of_the_command_counts(tmp_path: Path) -> None:
    """However the script says its name; what it names by Accelerate's file counts with it."""
    file_of = "deepspeed_config_file: conf/{name}.json".format
    files = {f"conf/{name}.yaml": ENGINE.replace("zero_stage: 3", file_of(name=name)) for name in "ab"}
    files |= {f"conf/{name}.json": json.dumps({"zero_optimization": {"stage": z}}) for name, z in (("a", 1), ("b", 2))}
    lines = ["#!/bin/bash", "pick() { echo conf/$1.yaml; }", "train() {"]
    lines += [f"  accelerate launch --config_file $(pick $1) --num_processes $2 sft.py {OPTIONS}", "}"]
    script = {"s/run.sh": "\n".join((*lines, "train b 4", "train a 8", ""))}
    answer = of_files(tmp_path, script | files | MODEL, "config.json")
    assert (answer.job.plan.zero, answer.job.plan.dp) == (1, 8)
    assert sum("is left out: the training command" in note for note in answer.assumed) == 2
    read = [note for note in answer.assumed if "is read, which the files name" in note]
    assert len(read) == 2 and all("/a." in note for note in read)


@pytest.mark.parametrize("path", ["$DIR/conf/a.yaml", "/scratch/me/nanotron/conf/a.yaml", "conf/a.yaml"])
def test_a_configuration_of_another_machines_path_is_found_by_its_end(path: str, tmp_path: Path) -> None:
    line = f'#!/bin/bash\nexport CONFIG={path}\ntorchrun --nproc_per_node 4 run_train.py --config-file "$CONFIG"\n'
    answer = of_files(tmp_path, {"s/run.sh": line, "conf/a.yaml": STARCODER})
    assert answer.job.model.layers == 30
    assert any("conf/a.yaml is read, which the files name" in note for note in answer.assumed)


@pytest.mark.parametrize("path", ["/scratch/a.yaml", "/scratch/../conf/a.yaml", "/conf/lacks.yaml"])
def test_a_path_from_the_root_needs_a_folder_at_its_end(path: str, tmp_path: Path) -> None:
    line = f"#!/bin/bash\nCONFIG={path}\ntorchrun --nproc_per_node 4 run_train.py --config-file $CONFIG\n"
    with pytest.raises(PlanError, match="is not read: name it too"):
        of_files(tmp_path, {"s/run.sh": line, "a.yaml": STARCODER, "conf/a.yaml": STARCODER})


@pytest.mark.parametrize(
    ("folder", "is_found"),
    [("$HOME/work/conf", True), ("$CONF", True), ("${ROOT}/../conf", True), ("other/conf", False)],
)
def test_the_end_of_a_path_that_begins_with_a_variable_counts(folder: str, is_found: bool, tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/z3.json").write_text('{"zero_optimization": {"stage": 3}}')
    run = tmp_path / ("conf/run.sh" if folder == "$CONF" else "slurm/run.sh")
    run.parent.mkdir(exist_ok=True)
    run.write_text(f"deepspeed --num_gpus 2 mine.py --deepspeed {folder}/z3.json {OPTIONS}\n")
    asked = Asked(overrides=("model.name=llama2-7b",))
    if is_found:
        assert read_job_of(SOURCES["deepspeed"], (str(run),), asked).job.plan.zero == 3
    else:
        with pytest.raises(PlanError, match=r"z3\.json is a file that is not read"):
            read_job_of(SOURCES["deepspeed"], (str(run),), asked)


def test_a_yaml_of_options_behind_a_module_is_read_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/t.yaml").write_text("model: me/mine\nper_device_train_batch_size: 3\nmax_seq_length: 256\n")
    run = tmp_path / "jobs/run.sh"
    run.parent.mkdir()
    run.write_text('PROGRAM="-m mine.train conf/t.yaml"\naccelerate launch --num_processes 2 $PROGRAM\n')
    asked = Asked(overrides=("model.name=llama2-7b",))
    assert read_job_of(SOURCES["accelerate"], (str(run),), asked).job.batch.global_batch_size == 6
