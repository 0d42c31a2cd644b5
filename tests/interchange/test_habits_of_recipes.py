"""Recipes of Makefiles and justfiles, switches with a negation, files that programs name, and what people write beside
what a system knows."""

import time
from pathlib import Path

import pytest

from interchange.test_habits_of_files import MEGATRON, OPTIONS, faults, megatron, script
from interchange.test_started_configurations import FILES
from interchange.test_trainer_commands import MODEL, TRL, job_read
from interchange.test_wrapped_commands import H100
from interchange.wrapped_files import WRAPPED
from shardwright.config.base import PlanError
from shardwright.interchange.foreign_job import read_job_of
from shardwright.interchange.imported import Asked, Imported
from shardwright.interchange.make_recipes import recipes_script
from shardwright.interchange.recognised import system_name_of
from shardwright.interchange.system import SOURCES

_TRAINS = f"\t{MEGATRON}--global-batch-size "
MAKEFILE = f"small: data ## of few\n{_TRAINS}$(SIZE)\nbig: SHELL = sh\nbig:\n{_TRAINS}64\nSIZE = 16\n"


def recipe(folder: Path, name: str, text: str, *arguments: str) -> Imported:
    (folder / name).write_text(text, encoding="utf-8")
    asked = Asked(cluster=H100, arguments=arguments)
    return read_job_of(SOURCES[system_name_of(name, text)], (str(folder / name),), asked)


@pytest.mark.parametrize(("target", "size"), [("small", 16), ("big", 64)])
def test_the_recipe_of_a_target_is_read(target: str, size: int, tmp_path: Path) -> None:
    text = MAKEFILE.replace("SIZE = 16\n", "") if target == "big" else "SIZE = 16\n" + MAKEFILE
    assert recipe(tmp_path, "Makefile", text, target).job.batch.global_batch_size == size


def test_of_several_recipes_that_train_the_last_counts_which_is_told(tmp_path: Path) -> None:
    answer = recipe(tmp_path, "Makefile", "SIZE = 16\n" + MAKEFILE)
    assert answer.job.batch.global_batch_size == 64
    assert any("it trains 2 times" in note and "on line 6 (others: 3)" in note for note in answer.assumed)


def test_lines_of_a_recipe_keep_their_numbers_and_their_signs() -> None:
    text = "A := 1\nB += $(A) 2\n-include x.mk\nt: A\n\t@-echo $$HOME $(shell nproc) $(B)\n\n.PHONY: t\n"
    assert recipes_script("some/GNUmakefile", text).splitlines() == [
        'A="1"', "", "", 'if [ "${1:-t}" = "t" ]; then :', "echo $HOME $(nproc) ${A} 2", "", "", "fi",
    ]  # fmt: skip
    assert recipes_script("make.sh", text) == ""


def test_parameters_of_a_just_recipe_are_its_arguments(tmp_path: Path) -> None:
    line = f"{MEGATRON}--global-batch-size {{{{batch-size}}}} {{{{more}}}}"
    text = f"sft batch-size='16' *more:\n    #!/usr/bin/env bash\n    {line}\n"
    assert recipe(tmp_path, ".justfile", text).job.batch.global_batch_size == 16
    assert recipe(tmp_path, ".justfile", text, "sft", "32").job.batch.global_batch_size == 32


def test_a_makefile_that_trains_nothing_says_what_it_starts(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"line 2: mine.train is a program whose options are not known here"):
        recipe(tmp_path, "Makefile", "train:\n\tpython -m mine.train --config c.yaml\ntest:\n\tpytest\n")


@pytest.mark.parametrize("switch", ["--no-qlora", "--no_lora", "--no-use_peft"])
def test_a_switch_with_a_negation_is_off(switch: str) -> None:
    texts = script(f"accelerate launch --num_processes 8 train.py {OPTIONS}{switch} --lora_r 8") | MODEL
    answer = job_read(texts)[1]
    assert answer.job.model.adapter.rank == 0
    assert not any("lora" in note or "peft" in note for note in (*answer.assumed, *answer.unknown))


@pytest.mark.parametrize(
    "line",
    [
        "accelerate launch --num_processes 8 sft.py --config conf/t.yaml",
        "deepspeed --num_gpus 8 sft.py conf/t.yaml --deepspeed ds.json",
        'accelerate launch --num_processes 8 sft.py "$HOME/conf/t.yaml" --bf16',
    ],
)
def test_the_options_that_a_command_names_are_read_where_they_lie(line: str, tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    files = {
        "conf/t.yaml": TRL["t.yaml"],
        "run.sh": script(line)["run.sh"],
        "ds.json": '{"zero_optimization": {"stage": 2}}',
    }
    for name, text in (files | MODEL).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    first = (str(tmp_path / "run.sh"), str(tmp_path / "config.json"))
    answer = read_job_of(SOURCES[system_name_of("run.sh", files["run.sh"])], first, Asked(cluster=H100))
    assert (answer.job.plan.microbatch_size, answer.job.batch.global_batch_size) == (16, 16 * 4 * 8)
    assert f"{tmp_path / 'conf/t.yaml'} is read, which the files name" in answer.assumed


def test_a_script_that_a_script_writes_under_an_unknown_name_is_followed() -> None:
    lines = (
        'W="out/job_$(date +%s).sh"',
        'cat > "$W" <<EOF',
        f"{MEGATRON}--global-batch-size 16",
        "EOF",
        'submit -i bash "$W"',
    )
    assert job_read(script(*lines))[1].job.batch.global_batch_size == 16


@pytest.mark.parametrize(
    "start", ["apptainer exec --nv image.sif bash", "ssh node1 bash -s", "docker run image /bin/sh"]
)
def test_a_here_document_for_the_shell_of_a_container_is_followed(start: str) -> None:
    assert megatron(f"{start} <<EOF", flags="--global-batch-size 16\nEOF").job.batch.global_batch_size == 16


def test_a_program_that_is_no_python_is_named_where_nothing_else_is_a_reason() -> None:
    (fault,) = faults(script("accelerate launch --config_file a.yaml mine train"))
    assert "line 2: accelerate launch --config_file a.yaml mine train is a program whose options" in fault


@pytest.mark.parametrize(
    ("program", "is_told"), [("pretrain_fastgpt.py", True), ("pretrain_llama2.py", False), ("m/main.py", False)]
)
def test_a_program_of_another_model_of_megatrons_kind_is_told(program: str, is_told: bool) -> None:
    flags = "--global-batch-size 16 --use-rotary-position-embeddings"
    answer = job_read(script(MEGATRON.replace("pretrain_gpt.py", program) + flags))[1]
    assert (f"{program} is taken for a program that trains the decoder of its flags" in answer.assumed) == is_told


@pytest.mark.parametrize(
    ("program", "flags", "is_own"),
    [
        ("pretrain_llama.py", "", True),
        ("own/train_mistral_7b.py", "", True),
        ("pretrain_opt.py", "", False),
        ("pretrain_gpt.py", "", False),
        ("pretrain_llama.py", "--position-embedding-type learned_absolute", False),
    ],
)
def test_a_program_that_is_called_after_a_model_may_have_layers_that_no_flag_says(
    program: str, flags: str, is_own: bool
) -> None:
    texts = script(f"{MEGATRON.replace('pretrain_gpt.py', program)} --global-batch-size 16 {flags}")
    if not is_own:
        assert job_read(texts)[1].job.model.positions == "learned"
        return
    (fault,) = faults(texts)
    assert f"{program} is called after a model without learned positions" in fault
    sets = ("model.positions=rotary", "model.norm=rmsnorm", "model.gated_mlp=true", "model.activation=silu")
    model = job_read(texts, *sets)[1].job.model
    assert (model.positions, model.norm, model.gated_mlp) == ("rotary", "rmsnorm", True)


def test_processes_that_machines_do_not_share_evenly_are_a_fault() -> None:
    (fault,) = faults({"a.yaml": "distributed_type: FSDP\nnum_machines: 2\nnum_processes: 1\n"} | MODEL)
    assert "1 on 2 machines are 1 / 2 = 0.50 of each" in fault


@pytest.mark.parametrize("name", ["ds.json", "a.yaml"])
def test_deepspeed_has_no_section_fp8(name: str) -> None:
    numbers = '{"fp8": {"enabled": true, "loss_scale_window": 1000}, "zero_optimization": {"stage": 2}}'
    own = {
        "a.yaml": "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}\nnum_processes: 8\n"
    }
    texts = (own if name == "a.yaml" else {}) | {"ds.json": numbers} | MODEL
    answer = job_read(texts, devices=8)[1]
    assert any("DeepSpeed has no section fp8" in note for note in answer.lost)
    assert answer.job.precision.compute == "float32"


def test_a_yaml_of_a_trainers_program_is_known_without_its_model() -> None:
    text = "per_device_train_batch_size: 2\ngradient_checkpointing: true\nbf16: true\nmax_length: 512\n"
    system, answer = job_read({"t.yaml": text} | MODEL, devices=8)
    assert (system, answer.job.plan.microbatch_size) == ("trl", 2)


def test_an_optimizer_of_a_fork_of_picotron_may_stand_with_the_model() -> None:
    text = FILES["picotron.json"].replace('"model": {', '"model": {"optimizer": "AdamW", ', 1)
    assert job_read({"picotron.json": text} | MODEL)[1].job.optimizer.name == "adamw"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("run.sh", "#!/bin/bash\npython train.py algorithm.adv_estimator=grpo data.max=1\n", "it starts verl"),
        ("p.yaml", "ConfigContainer: {model: {}}\nperf_matrix: {h100: {}}\n", "Megatron-Bridge in YAML"),
    ],
)
def test_further_files_of_systems_that_are_not_read_are_named(name: str, text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        system_name_of(name, text)


def test_a_part_of_a_configuration_of_gpt_neox_asks_for_the_rest() -> None:
    (fault,) = faults({"local.yml": '{"vocab-file": "a.json", "data-path": "b", "finetune": true}'})
    assert "num_layers" in fault
    assert "name their file too" in fault


@pytest.mark.parametrize(
    ("lines", "is_read"), [(("A_ARGS=--bf16", "B_ARGS="), True), (("A_ARGS=--bf16",), False), ((), False)]
)
def test_a_variable_of_options_that_only_others_of_its_kind_have_is_empty_and_told(
    lines: tuple[str, ...], is_read: bool
) -> None:
    texts = script(*lines, MEGATRON + "--global-batch-size 16 --bf16 $MOE_ARGS")
    if is_read:
        note = "$MOE_ARGS is empty, for no line sets it as others do A_ARGS, B_ARGS (--set MOE_ARGS=WORDS)"
        assert note in job_read(texts)[1].assumed
    else:
        assert "--set MOE_ARGS=" in faults(texts)[0]


@pytest.mark.parametrize(
    ("key", "value", "of_job"),
    [
        ("train_micro_batch_size_per_gpu", "4", ("plan", "microbatch_size", 4)),
        ("micro_batch_size", "4", ("plan", "microbatch_size", 4)),
        ("activation_checkpointing", "false", ("plan", "recompute", "none")),
        ("enable_gradient_checkpointing", "false", ("plan", "recompute", "none")),
        ("cutoff_len", "512", ("model", "sequence", 512)),
    ],
)
def test_a_default_gives_way_to_the_same_thing_under_another_name(
    key: str, value: str, of_job: tuple[str, str, object]
) -> None:
    text = f"model_name_or_path: me/mine\noutput_dir: x\n{key}: {value}\n"
    section, name, expected = of_job
    answer = job_read({"t.yaml": text} | MODEL, devices=8)[1]
    assert getattr(getattr(answer.job, section), name) == expected


@pytest.mark.parametrize(
    "line",
    [
        f"accelerate launch --num_processes 8 run_classification.py {OPTIONS}",
        f"accelerate launch --num_processes 8 src/train_btcls.py {OPTIONS}",
        f"accelerate launch --num_processes 8 train.py {OPTIONS}--label_column_name label",
        f"accelerate launch --num_processes 8 train.py {OPTIONS}--do_regression true",
    ],
)
def test_training_to_labels_is_refused(line: str) -> None:
    (fault,) = faults(script(line) | MODEL)
    assert "next tokens" in fault
    assert job_read(script(f"accelerate launch --num_processes 8 train.py {OPTIONS}--do_regression False") | MODEL)


@pytest.mark.parametrize(("program", "is_told"), [("train_tts.py", True), ("voice/train.py", True), ("t.py", False)])
def test_a_decoder_of_sound_is_told_to_have_further_tokens(program: str, is_told: bool) -> None:
    answer = job_read(script(f"accelerate launch --num_processes 8 {program} {OPTIONS}") | MODEL)[1]
    assert any("--set model.vocab=N" in line for line in answer.lost) == is_told


def test_the_switch_of_fastchat_for_a_base_in_4_bits_is_read() -> None:
    line = f"accelerate launch --num_processes 8 train.py {OPTIONS}--q_lora True --lora_r 8 --lora_target_modules all"
    adapter = job_read(script(line) | MODEL)[1].job.model.adapter
    assert (adapter.rank, adapter.base) == (8, "nf4")


def test_a_configuration_without_a_stage_or_a_template_is_not_llama_factorys() -> None:
    text = "finetuning_type: full\nmodel_name_or_path: me/mine\noutput_dir: x\nper_device_train_batch_size: 2\n"
    assert system_name_of("t.yaml", text) == "trl"
    assert system_name_of("t.yaml", text + "template: qwen\n") == "llamafactory"


TITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 4096
"""


@pytest.mark.parametrize("named", [True, False])
def test_a_toml_under_an_unknown_name_is_the_one_that_is_there(named: bool, tmp_path: Path) -> None:
    line = "torchrun --nproc_per_node 8 -m torchtitan.train --job.config_file $CONFIG_FILE"
    lines = (
        'CONFIG_FILE="${CONFIG_FILE:-${HERE}/conf/a.toml}"',
        '[[ "$CONFIG_FILE" != /* ]] && CONFIG_FILE="$HERE/$CONFIG_FILE"',
    )
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/a.toml").write_text(TITAN, encoding="utf-8")
    (tmp_path / "b.toml").write_text(TITAN.replace("4096", "2048"), encoding="utf-8")
    text = script(*lines, line)["run.sh"]
    (tmp_path / "run.sh").write_text(text, encoding="utf-8")
    paths = ("run.sh", *(("b.toml",) if named else ()))
    files = tuple(str(tmp_path / name) for name in paths)
    asked = Asked({"CONFIG_FILE": "b.toml"} if named else {}, cluster=H100)
    answer = read_job_of(SOURCES[system_name_of("run.sh", text)], files, asked)
    assert (answer.job.model.sequence, answer.job.plan.microbatch_size) == (2048 if named else 4096, 2)


@pytest.mark.parametrize(
    "line", ["fairseq-train data --arch gpt", "torchrun -m lm_engine.pretrain", "python -m EasyLM.models.llama"]
)
def test_further_programs_that_are_not_read_are_named(line: str) -> None:
    with pytest.raises(PlanError, match="which is not read here"):
        system_name_of("run.sh", f"#!/bin/bash\n{line} --config a.yml\n")


@pytest.mark.parametrize(
    "text",
    [
        "A = $(A) $(A)\nt:\n\techo $(A)\n",
        "\n".join(f"V{i} = " + f"$(V{i + 1}) " * 50 for i in range(12)) + "\nt:\n\techo $(V0)\n",
        "a" * 200_000 + "\n",
        "a " * 100_000 + ":\n\tx\n",
        "x y=" * 50_000 + "\n",
        "A = b\\\n" * 20_000,
    ],
)
def test_recipes_are_read_in_a_time_that_grows_no_faster_than_they(text: str) -> None:
    begin = time.process_time()
    scripts = [recipes_script(name, text) for name in ("Makefile", "justfile")]
    assert time.process_time() - begin < 3
    assert max(map(len, scripts)) < 20 * (len(text) + 100)


@pytest.mark.parametrize("named", [True, False])
def test_options_in_a_config_json_are_no_model(named: bool, tmp_path: Path) -> None:
    line = "torchrun --nproc_per_node 8 train.py config.json"
    options = '{"llm_model_name_or_path": "me/mine", "per_device_train_batch_size": 4, "output_dir": "x", "bf16": true}'
    (tmp_path / "model").mkdir()
    files = {"run.sh": script(line)["run.sh"], "config.json": options, "model/config.json": MODEL["config.json"]}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    paths = ["run.sh", *(["config.json"] if named else []), "model/config.json"]
    asked = Asked(cluster=H100)
    answer = read_job_of(SOURCES["accelerate"], tuple(str(tmp_path / name) for name in paths), asked)
    assert answer.job.plan.microbatch_size == 4
    (tmp_path / "config.json").unlink()
    with pytest.raises(PlanError, match=r"--config config.json is a file that is not read"):
        read_job_of(
            SOURCES["accelerate"], tuple(str(tmp_path / name) for name in ("run.sh", "model/config.json")), asked
        )


@pytest.mark.parametrize(
    ("sought", "is_fault"),
    [
        ("{lora_r: {type: const, val: 8}}", True),
        ("{training: {per_device_train_batch_size: {type: int, minval: 1, maxval: 8}}}", True),
        ("{learning_rate: {type: log, base: 10, minval: -5, maxval: -3}}", False),
    ],
)
def test_hyperparameters_of_determined_that_could_change_the_plan_are_a_fault(sought: str, is_fault: bool) -> None:
    text = WRAPPED["determined.yaml"] + f"hyperparameters: {sought}\n"
    if is_fault:
        with pytest.raises(PlanError, match="Determined's own way"):
            system_name_of("determined.yaml", text)
    else:
        assert system_name_of("determined.yaml", text) == "megatron"


def test_a_default_of_numbers_is_not_told_where_others_hold() -> None:
    text = "model_name_or_path: me/mine\noutput_dir: x\nfp16: true\nper_device_train_batch_size: 1\n"
    answer = job_read({"t.yaml": text} | MODEL, devices=8)[1]
    assert answer.job.precision.compute == "fp16"
    assert not any("bf16 True" in note for note in answer.assumed)


def test_engines_of_checkpoints_of_deepspeed_are_known() -> None:
    text = '{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "datastates_ckpt": {"host_cache_size": 16}}'
    assert job_read({"ds.json": text} | MODEL, devices=8)[1].job.plan.microbatch_size == 2


PRIMUS = {
    "harbour.yaml": """work_group: ${TEAM:me}
user_name: me
exp_name: harbour
modules:
  pre_trainer:
    framework: torchtitan
    config: pre_trainer.yaml
    model: harbour_8B.yaml
    overrides:
      stderr_sink_level: INFO
      training: {local_batch_size: 4, seq_len: 1024, mock_data: true}
      parallelism: {tensor_parallel_degree: 2}
      activation_checkpoint: {mode: "${MODE:full}"}
""",
    "primus/configs/modules/torchtitan/pre_trainer.yaml": """extends: [../module_base.yaml]
training: {local_batch_size: 8, seq_len: 2048, steps: 90}
parallelism: {data_parallel_shard_degree: -1, tensor_parallel_degree: 1}
optimizer: {name: AdamW, lr: 8.0e-4}
primus_turbo: {enable_primus_turbo: true, use_turbo_grouped_mm: false, use_moe_fp8: true}
""",
    "primus/configs/modules/megatron/pre_trainer.yaml": "micro_batch_size: 1\n",
    "primus/configs/models/torchtitan/harbour_8B.yaml": (
        "model: {name: llama3, flavor: 8B, converters: [primus_turbo]}\n"
    ),
}


def test_an_experiment_of_primus_with_torchtitan_has_the_sections_of_its_toml() -> None:
    answer = job_read(PRIMUS, devices=8)[1]
    job = answer.job
    assert (job.plan.dp, job.plan.tp, job.plan.zero, job.plan.recompute) == (4, 2, 3, "full")
    assert (job.plan.microbatch_size, job.model.sequence, job.model.name) == (4, 1024, "llama3-8b")
    assert job.optimizer.steps == 90 and job.batch.global_batch_size == 16
    assert any("primus_turbo" in note for note in answer.assumed)


def test_experts_in_fp8_by_the_kernels_of_primus_are_not_passed_over() -> None:
    name = "primus/configs/modules/torchtitan/pre_trainer.yaml"
    texts = PRIMUS | {name: PRIMUS[name].replace("grouped_mm: false", "grouped_mm: true")}
    with pytest.raises(PlanError, match=r"primus_turbo\.use_moe_fp8"):
        job_read(texts, devices=8)
    without = {file: text for file, text in PRIMUS.items() if "models" not in file}
    with pytest.raises(PlanError, match=r"it begins from harbour_8B\.yaml"):
        job_read(without, devices=8)
