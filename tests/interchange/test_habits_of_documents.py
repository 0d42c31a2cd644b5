"""Habits of public files: here-documents with quotes and conditions, models that other files have, names of tokenizers,
and what programs and sections say of the training."""

import shutil
import subprocess
from random import Random

import pytest

from interchange.test_habits_of_files import MEGATRON, OPTIONS, faults, megatron, script
from interchange.test_trainer_commands import MODEL, ZERO, job_read
from shardwright.interchange.reading.shell_marks import unknown_names
from shardwright.interchange.reading.shell_script import Script
from shardwright.interchange.reading.shell_values import Variables
from shardwright.interchange.reading.shell_words import ShellFault

NEMO = """trainer: {devices: 8, num_nodes: 1, precision: bf16, max_steps: -1}
model:
  restore_from_path: ???
  micro_batch_size: 1
  global_batch_size: 64
  encoder_seq_length: 2048
"""
DOCUMENTS = (
    'a "b" \\"c\\" \\$A ${A} "$A" `echo $A` \\\\ \\n it\'s',
    '$(if [ "${A}" = "true" ]; then echo \'x, "y": {"z": 1}\'; fi)',
    '$(if [ "$A" = "b" ]; then echo yes; else echo no; fi)',
    '-$(if [ "$A" = "b" ]; then echo yes; fi)-',
    "$(if [[ $A == true ]]\nthen\n  echo then\nelse\n  echo else\nfi\n)",
    '$(if [ "$A" != "" -a "$B" = 3 ]; then echo "$B\n$A"; fi)',
    '{"a": "$(echo "$A")", "b": ${B}}',
)

PIECES = (
    *("a", "b ", '"', "'", '\\"', "\\$", "\\\\", "\\n", "$A", "${A}", '"$A"', "`echo $A`", '$(echo "$A")', "$((B*2))"),
    *("\n", "{", "}", ":", "$(echo 'x \"y\"')", "${B:-4}", "$(basename /x/y.z .z)", "\\`", "%", "#"),
    '$(if [ "$A" = true ]; then echo yes; fi)',
    '$(if [ $B -gt 4 ]; then echo "p q"; else echo \'z "w"\'; fi)',
)


def written(document: str, **values: str) -> str:
    """The text of a here-document in a script whose variables have these values."""
    return Script(Variables({**values})).variables.document_of(document) + "\n"


def written_by_bash(document: str, **values: str) -> str:
    """The text that bash makes of a here-document; "" if it has a fault."""
    bash = shutil.which("bash")
    assert bash
    lines = [*(f"{name}={value}" for name, value in values.items()), f"cat <<END\n{document}\nEND\n"]
    run = subprocess.run([bash, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    return "" if run.returncode or run.stderr else run.stdout


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_is_expanded_as_bash_expands_it(document: str) -> None:
    assert written(document, A="true", B="3") == written_by_bash(document, A="true", B="3")


def test_drawn_documents_are_expanded_as_bash_expands_them_or_stay_unknown() -> None:
    random = Random(5)
    num_compared = 0
    for _ in range(80):
        document = "".join(random.choices(PIECES, k=random.randint(1, 8)))
        output = written_by_bash(document, A="true", B="3")
        try:
            text = written(document, A="true", B="3")
        except ShellFault:
            continue
        if output and not unknown_names(text):
            assert (document, text) == (document, output)
            num_compared += 1
    assert num_compared > 30


@pytest.mark.parametrize(
    "text",
    [
        "$(if [ $A = true ]; then echo a; echo b; fi)",
        "$(if [ $A = no ]; then echo a; elif [ 1 = 1 ]; then echo b; fi)",
        "$(if [ $A = true ]; then echo a; fi; echo b)",
        "$(if [ $A = true ]; then if [ 1 = 1 ]; then echo a; fi; fi)",
    ],
)
def test_several_commands_in_a_document_print_as_in_bash(text: str) -> None:
    assert written(text, A="true") == written_by_bash(text, A="true")


@pytest.mark.parametrize("text", ["$(if grep -q x file; then echo a; fi)", "$(if [ $A = true ]; then echo a)"])
def test_conditions_in_a_document_that_are_not_followed_stay_unknown(text: str) -> None:
    assert "if" in written(text, A="true")


def test_what_a_condition_writes_into_a_configuration_is_read() -> None:
    lines = (
        "OFFLOAD=true",
        "cat <<EOT > ds.json",
        '{"zero_optimization": {"stage": 3,',
        '  "sub_group_size": 8e8$(if [ "${OFFLOAD}" = "true" ]; then echo \',',
        '  "offload_optimizer": {"device": "cpu", "ratio": 0.98}\'; fi)',
        "}}",
        "EOT",
    )
    flags = "--bf16 --deepspeed --deepspeed_config=ds.json --zero-stage 3"
    command = MEGATRON.replace("torchrun --nproc_per_node 8", "deepspeed --num_gpus 8") + flags
    assert job_read(script(*lines, command))[1].job.plan.offload_optimizer == 0.98
    assert job_read(script("OFFLOAD=false", *lines[1:], command))[1].job.plan.offload_optimizer == 0.0


@pytest.mark.parametrize(
    ("tokenizer", "tokens"), [("gpt2", 50304), ("openai-community/gpt2-xl", 50304), ("EleutherAI/gpt-neox-20b", 50304)]
)
def test_tokenizers_of_the_hub_say_their_vocabulary(tokenizer: str, tokens: int) -> None:
    flags = MEGATRON.replace("--vocab-size 128", f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tokenizer}")
    assert job_read(script(flags))[1].job.model.vocab == tokens
    (fault,) = faults(script(flags.replace(tokenizer, "gpt2-of-mine")))
    assert "the number of tokens is the tokenizer's" in fault


@pytest.mark.parametrize("program", ["step2_reward_model/pre_main.py", "rlhf/train_mem.py", "dpo/run_train.py"])
def test_a_program_of_a_plain_name_trains_what_its_folder_says(program: str) -> None:
    line = f"deepspeed --num_gpus 2 {program} {OPTIONS} --deepspeed ds.json"
    (fault,) = faults(script(line, ds_json=ZERO["ds.json"]) | MODEL)
    assert "by its name" in fault
    line = line.replace(program, "step1_supervised/pre_main.py")
    assert job_read(script(line, ds_json=ZERO["ds.json"]) | MODEL)[1].job.plan.dp == 2


def test_a_run_of_nemo_without_a_most_number_of_steps_is_read() -> None:
    assert job_read({"sft.yaml": NEMO}, "model.name=llama2-7b")[1].job.optimizer.steps == 1


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("  dpo: {ref_policy_kl_penalty: 0.2}\n", "model.dpo.ref_policy_kl_penalty"),
        ("  reward_model_type: binary_ranking\n", "model.reward_model_type"),
        ("remote_critic_rm: {pad_to_length: 8}\n", "remote_critic_rm.pad_to_length"),
        ("run: {name: sft_mamba}\n", "state spaces"),
    ],
)
def test_stages_of_nemo_that_learn_otherwise_are_refused(section: str, expected: str) -> None:
    assert any(expected in fault and "counted" in fault for fault in faults({"sft.yaml": NEMO + section}))


@pytest.mark.parametrize(
    "words", ["--load-model-from-hf-config --model-name-or-path $M", "--use-checkpoint-args", "--hf-model-path x"]
)
def test_a_model_that_flags_of_megatron_only_name_is_asked_for(words: str) -> None:
    shape = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 "
    flags = (
        MEGATRON.replace(shape, "--decoder-seq-length 32 ").replace("--vocab-size 128", words)
        + " --tensor-model-parallel-size 1 --fp16"
    )
    (fault,) = faults(script(flags))
    assert "has the model, and is not read here" in fault
    job = job_read(script(flags), "model.name=llama2-7b")[1].job
    assert (job.model.layers, job.model.sequence, job.plan.dp, job.precision.compute) == (32, 32, 8, "fp16")
    assert megatron(flags="--use-checkpoint-args").job.model.layers == 4


def test_windows_and_biases_of_pai_are_read() -> None:
    flags = "--disable-bias-linear --disable-bias-linear-fc --disable-bias-attn-fc --sliding-window"
    assert megatron(flags=f"{flags} 32").job.model.window.size == 0
    model = megatron(flags=f"{flags} 16").job.model
    assert (model.window.size, model.bias) == (16, False)
    (fault,) = faults(script(MEGATRON + "--disable-bias-attn-fc"))
    assert "--disable-bias-attn-fc" in fault


def test_float8_of_megatron_swift_has_its_own_history() -> None:
    line = "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-8B --dataset d --max_length 64 --fp8_format hybrid"
    answer = job_read(script(f"{line} --fp8_recipe delayed"))[1]
    assert answer.job.precision.float8_history == 1024


@pytest.mark.parametrize(
    "line",
    [
        f"echo {'{a,b}' * 3000}",
        f"echo {'{' * 30_000}",
        f"echo {'{a,' * 1500}{'}' * 1500}",
        f"let {'A=' * 3000}1",
        f"{'! ' * 3000}true | cat",
    ],
    ids=lambda line: line[:12],
)
def test_what_is_nested_very_deeply_is_passed_in_bounded_time(line: str) -> None:
    """Lists in braces, assignments and signs of inversion, of which bash itself has no limit."""
    assert job_read(script(line, MEGATRON))[1].job == job_read(script(MEGATRON))[1].job
