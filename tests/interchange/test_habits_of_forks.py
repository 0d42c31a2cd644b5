"""Habits of forks and of people's own commands: older names of flags, launchers within variables, changed scripts."""

from typing import Any

import pytest

from interchange.test_habits_of_files import MEGATRON, OPTIONS, faults, megatron, script
from interchange.test_trainer_commands import FACTORY, MODEL, job_read

LATENT = (
    "--multi-head-latent-attention --qk-rope-head-dim 16 --qk-nope-head-dim 32 --kv-lora-rank 64 --v-head-dim 32 "
    "--spec mindspeed_llm.tasks.models.spec.deepseek_spec layer_spec "
)
EXPERTS = "--num-experts 8 --moe-intermediate-size 32 --topk-group 1 --first-k-dense-replace 1 --moe-router-topk 2 "


def test_older_names_of_mindspeed_mean_latent_attention_and_groups_of_experts() -> None:
    model = megatron(flags=LATENT + EXPERTS + "--moe-router-load-balancing-type pai_megatron_aux_loss").job.model
    latent = model.latent
    assert (latent.rope_dim, latent.nope_dim, latent.kv_rank, latent.value_dim) == (16, 32, 64, 32)
    assert (model.moe.num_groups, model.moe.first_dense) == (1, 1)
    grouped = f"{EXPERTS} --n-group 4 --moe-router-load-balancing-type noaux_tc --moe-router-score-function sigmoid"
    moe = megatron(flags=LATENT + grouped).job.model.moe
    assert (moe.num_groups, moe.groups_kept) == (4, 1)


@pytest.mark.parametrize(("layers", "is_read"), [("qwen3", True), ("bailing", True), ("plm", True), ("mine", False)])
def test_layers_that_mindspeed_names_make_a_script_its_own(layers: str, is_read: bool) -> None:
    flags = f"--qk-layernorm --spec mindspeed_llm.tasks.models.spec.{layers}_spec layer_spec"
    if is_read:
        assert megatron(flags=flags).job.model.qk_norm == "head"
    else:
        assert "--set spec=ignore" in faults(script(MEGATRON + flags))[0]


def test_norms_behind_and_multipliers_of_mindspeed_are_read() -> None:
    scales = "--embedding-multiplier-scale 8 --output-multiplier-scale 0.5 --output-logit-softcapping 30"
    model = megatron(flags=f"--gemm-gradient-accumulation-fusion --post-norm {scales}").job.model
    assert (model.norm_place, model.embedding_scale, model.logit_scale, model.logit_softcap) == ("around", 8, 0.5, 30)
    (fault,) = faults(script(MEGATRON + "--spec mine.layers own_spec"))
    assert "--spec mine.layers own_spec: this is not known here and could change the model" in fault


@pytest.mark.parametrize(
    ("line", "files", "expected"),
    [
        ("torchrun --nproc_per_node=8 -m llamafactory.launcher x/l.yaml", FACTORY, ("llamafactory", 8, 16)),
        ("torchrun --nproc_per_node=8 -m llamafactory.cli train l.yaml", FACTORY, ("llamafactory", 8, 16)),
        (f'"$VENV/bin/accelerate" launch --num_processes 4 own.py {OPTIONS.replace("_", "-")}', {},
         ("accelerate", 4, 8)),
    ],
)  # fmt: skip
def test_launchers_by_module_and_in_quotes_are_known(
    line: str, files: dict[str, str], expected: tuple[Any, ...]
) -> None:
    system, answer = job_read(script(line) | files | MODEL)
    assert (system, answer.job.plan.world, answer.job.batch.global_batch_size) == expected


def test_scripts_and_programs_that_are_not_known_are_named() -> None:
    (fault,) = faults(script("sbatch --nodes=2 big/train_30b.sh", "exec bash inner.slurm $@"))
    assert "line 2: big/train_30b.sh is not read: name that file too" in fault
    assert "line 3: inner.slurm is not read" in fault
    (fault,) = faults(script("python prepare.py --size 3", "deepspeed --num_gpus 2 --module own.train_sft --max_len 9"))
    assert "line 3: own.train_sft is a program whose options are not known here" in fault


ARGUMENTS = 'for word in "$@"; do case $word in --size=*) SIZE=${word#*=};; esac; done'
TESTS = (
    "for word in $*; do if [[ $word == --size* ]]; then SIZE=${word#*=}; "
    "elif [[ $word == --name* ]]; then NAME=x; fi; done"
)


@pytest.mark.parametrize("loop", [ARGUMENTS, TESTS])
def test_a_loop_goes_through_words_of_which_the_beginning_is_known(loop: str) -> None:
    texts = script("bash inner.sh --name=$NAME --size=32 --path=$(probe)/x")
    texts["inner.sh"] = f"SIZE=64\n{loop}\n{MEGATRON} --global-batch-size $SIZE\n"
    assert job_read(texts)[1].job.batch.global_batch_size == 32


def test_a_word_that_is_unknown_in_a_loop_makes_unknown_what_the_loop_sets() -> None:
    texts = script("HOST=$(probe)", "bash inner.sh $HOST --size=32")
    texts["inner.sh"] = f"SIZE=64\nNAME=a\n{TESTS}\n{MEGATRON} --global-batch-size $SIZE --swiglu\n"
    assert job_read(texts)[1].job.batch.global_batch_size == 32  # said behind it
    texts["run.sh"] = texts["run.sh"].replace("$HOST --size=32", "--size=32 $HOST")
    (fault,) = faults(texts)
    assert "--global-batch-size by SIZE" in fault
    assert job_read(texts, "HOST=h")[1].job.batch.global_batch_size == 32


def test_a_command_in_a_variable_with_a_script_in_quotes_is_followed_as_eval_does() -> None:
    lines = ("CMD=\"mpirun -np 16 bash -c 'cd x && bash inner.sh --size=32 --name=$NAME' 2>&1 | tee log\"", "eval $CMD")
    texts = script(*lines) | {
        "inner.sh": f"{ARGUMENTS}\npython {MEGATRON.partition('8 ')[2]} --global-batch-size $SIZE\n"
    }
    job = job_read(texts)[1].job
    assert (job.plan.world, job.batch.global_batch_size) == (16, 32)


def test_what_a_command_writes_into_a_script_before_it_starts_is_asked_for() -> None:
    texts = script('sed -i "s/^SIZE=.*/SIZE=$NEW/" inner.sh', "chmod +x inner.sh", "bash inner.sh")
    texts["inner.sh"] = f"SIZE=16\n{MEGATRON} --global-batch-size $SIZE\n"
    (fault,) = faults(texts)
    assert "--global-batch-size by SIZE" in fault
    answer = job_read(texts, "SIZE=32")[1]
    assert answer.job.batch.global_batch_size == 32
    assert "line 2: inner.sh is changed before it is started, which is not followed" in answer.assumed


def test_a_file_that_is_written_and_never_started_is_no_script_that_changes() -> None:
    lines = (
        "echo started > $LOGS/environment.txt",
        "printenv >> $LOGS/environment.txt",
        "date >> $LOGS/environment.txt",
    )
    answer = job_read(script(*lines, MEGATRON))[1]
    assert not [note for note in answer.assumed if "environment.txt" in note]


def test_a_number_of_ranks_in_a_variable_is_asked_for_before_a_list_of_hosts() -> None:
    line = f"mpirun -np $((4 * $HOSTS)) -npernode 4 --hostfile h python {MEGATRON.partition('8 ')[2]}"
    (fault,) = faults(script(line))
    assert "--set HOSTS=VALUE" in fault
    assert job_read(script(line), "HOSTS=2")[1].job.plan.world == 8


@pytest.mark.parametrize(
    ("program", "is_refused"),
    [
        ("tools/merge_mp_partitions.py", True),
        ("tools/generate_samples_gpt.py", True),
        ("tools/run_text_generation_server.py", True),
        ("inference.py", True),
        ("pretrain_and_evaluate.py", False),
        ("server_of_mine/train_gpt.py", False),
    ],
)
def test_programs_that_generate_or_convert_train_nothing(program: str, is_refused: bool) -> None:
    texts = script(MEGATRON.replace("pretrain_gpt.py", program))
    if not is_refused:
        assert job_read(texts)[1].job.plan.dp == 8
        return
    way_out = "name a script that starts training, or if this one trains a decoder by next tokens, --set TRAINS=tokens"
    assert f"{program} trains nothing by its name; {way_out}" in faults(texts)


@pytest.mark.parametrize(
    "program",
    ["speech_lm/pretrain_vision_text.py", "pretrain_bert_style_decoder.py", "hf2mcore_eval.py", "rlhf/main.py"],
)
def test_a_program_that_its_name_refuses_is_read_where_the_user_says_that_it_trains_tokens(program: str) -> None:
    for line in (MEGATRON.replace("pretrain_gpt.py", program), f"torchrun --nproc_per_node 2 {program} {OPTIONS}"):
        texts = script(line) if "--num-layers" in line else script(line) | MODEL
        (fault,) = [fault for fault in faults(texts) if "by its name" in fault]
        assert fault.endswith("--set TRAINS=tokens")
        assert job_read(texts, "TRAINS=tokens")[1].job.plan.dp in (2, 8)
        assert faults(texts, "TRAINS=something") == faults(texts)


@pytest.mark.parametrize(("hidden", "width"), [(4096, 11008), (5120, 13824), (768, 2048)])
def test_the_mlp_of_older_releases_of_gpt_neox_has_three_matrices_and_no_biases(hidden: int, width: int) -> None:
    lines = (
        f"num_layers: 2\nhidden_size: {hidden}\nnum_attention_heads: 8\nseq_length: 64\nmax_position_embeddings: 64\n"
        "pos_emb: rotary\nmodel_parallel_size: 0\npipe_parallel_size: 0\nmlp_type: llama\nactivation: silu\n"
        "train_micro_batch_size_per_gpu: 2\ntrain_iters: 9\n"
    )
    system, answer = job_read({"n.yml": lines}, "model.vocab=512", devices=4)
    model, plan = answer.job.model, answer.job.plan
    assert (system, model.ffn, model.gated_mlp, plan.tp) == ("gpt-neox", width, True, 1)
    assert (model.activation, model.mlp_bias, model.attention_bias) == ("silu", False, True)


def test_a_batch_that_gpt_neox_does_not_say_is_settled_by_a_field() -> None:
    lines = "num_layers: 2\nhidden_size: 64\nnum_attention_heads: 4\nseq_length: 64\npos_emb: rotary\n"
    (fault,) = faults({"n.yml": lines + "train_iters: 9\n"}, "model.vocab=512", "plan.dp=4")[-1:]
    assert "neither train_batch_size nor" in fault
    sets = ("model.vocab=512", "batch.global_batch_size=64", "plan.microbatch_size=2")
    job = job_read({"n.yml": lines + "train_iters: 9\n"}, *sets, devices=4)[1].job
    assert (job.batch.global_batch_size, job.plan.microbatch_size) == (64, 2)


def test_a_gemma_2_of_mindspeed_is_the_catalogs() -> None:
    flags = (
        "--interleave-sliding-window 16 --query-pre-attn-scalar 256 --attn-logit-softcapping 50 --input-embeds-norm "
        "--gelu-tanh --post-norm --disable-bias-linear"
    )
    model = megatron(flags=flags).job.model
    assert (model.window.size, model.window.full_every, model.attention_softcap) == (16, 2, 50)
    assert (model.embedding_scale, model.attention_scale) == (8.0, 0.0625)
    assert (model.activation, model.gated_mlp, model.norm_place) == ("gelu-tanh", True, "around")
    (fault,) = faults(script(MEGATRON + "--reglu --use-qk-norm"))
    assert "--reglu, --use-qk-norm: this is not known here" in fault


def test_what_a_branch_adds_to_a_command_is_asked_for_beside_what_it_had() -> None:
    lines = ("read RATE <<< $(probe)", f'CMD="{MEGATRON}"')
    branch = 'if [ "$RATE" != "none" ]; then CMD="$CMD --min-lr $RATE"; fi'
    asked = faults(script(*lines, branch, 'CMD="$CMD --global-batch-size 32"', "eval $CMD"))
    assert any("--set CMD=" in fault for fault in asked)


def test_a_curriculum_of_lengths_is_told() -> None:
    text = '{"zero_optimization": {"stage": 1}, "curriculum_learning": {"enabled": true, "min_difficulty": CL_MIN}}'
    line = (
        MEGATRON.replace("torchrun --nproc_per_node 8", "deepspeed --num_gpus 8")
        + "--deepspeed --deepspeed_config d.json"
    )
    answer = job_read(script(line, d_json=text))[1]
    assert any("sequences grow there at first" in line for line in answer.lost)


def test_programs_in_folders_of_the_same_name_are_not_megatron_bridges() -> None:
    (fault,) = faults(script("python scripts/training/run_profiling.py --model_id x"))
    assert "scripts/training/run_profiling.py is a program whose options are not known here" in fault


LORA = "--lora-r 4 --lora-alpha 8 --lora-fusion --lora-target-modules linear_qkv linear_proj "


def test_adapters_of_mindspeed_are_read_where_their_modules_are_maps_of_a_layer() -> None:
    line = MEGATRON.replace("pretrain_gpt.py", "posttrain_gpt.py") + "--swiglu --bf16 " + LORA
    adapter = job_read(script(line))[1].job.model.adapter
    assert (adapter.rank, adapter.alpha, adapter.targets) == (4, 8.0, ("query", "key", "value", "out"))
    defaults = line.replace("--lora-r 4 --lora-alpha 8", "")
    adapter = job_read(script(defaults))[1].job.model.adapter
    assert (adapter.rank, adapter.alpha) == (16, 32.0)
    (fault,) = faults(script(f"{line} --qlora"))
    assert "--qlora" in fault and "releases differ in the type of 4 bits" in fault
    assert job_read(script(f"{line} --qlora"), "model.adapter.base=nf4")[1].job.model.adapter.base == "nf4"
    experts = f"{line} --num-experts 8 --moe-grouped-gemm"
    assert job_read(script(experts))[1].job.model.adapter.targets == ("query", "key", "value", "out")
    both = script(experts.replace("linear_proj", "linear_proj linear_fc1 linear_fc2"))
    (fault,) = faults(both)
    assert "linear_fc1, linear_fc2: maps of experts have these names, too" in fault
    adapter = job_read(both, "model.adapter.targets=[query,expert_up]")[1].job.model.adapter
    assert adapter.targets == ("query", "expert_up")


def test_adapters_of_a_program_with_options_of_its_own_are_asked_for() -> None:
    """Its many options say nothing against the file; a folder of the model may end with a slash."""
    own = " ".join(f"--own_{number} {number}" for number in "abcde")
    line = f"python own.py {OPTIONS} {own} --lora_r 32 --lora_alpha 64 --lora_dropout 0.05 --no-use_4bit"
    (fault,) = [fault for fault in faults(script(line) | MODEL) if "lora_r" in fault]
    assert "to have such adapters: --set model.adapter.rank=32" in fault
    one = script(f"CUDA_VISIBLE_DEVICES=0 {line}") | MODEL
    answer = job_read(one, "model.adapter.rank=32", "model.adapter.targets=[query]")[1]
    assert answer.job.model.adapter.base == "compute" and not any("4bit" in name for name in answer.unknown)
    line = f"torchrun --nproc_per_node 2 own.py {OPTIONS} --model_name_or_path Meta-Llama-3-8B-Instruct/"
    assert job_read(script(line))[1].job.model.name == "llama3-8b"


def test_ranks_of_adapters_by_a_plain_name_and_masked_tokens_are_faults() -> None:
    line = f"torchrun --nproc_per_node 2 own.py {OPTIONS}"
    (fault,) = faults(script(f"{line} --rank 128") | MODEL)
    assert "--rank = 128: adapters, frozen and quantised weights" in fault
    (fault,) = faults(script(f"{line} --mlm_probability 0.15") | MODEL)
    assert "--mlm_probability = 0.15: training by next tokens is counted here" in fault
    answer = job_read(script(line.replace("--output_dir x", "--output_dir out/mine-lora-128")) | MODEL)[1]
    assert any("names adapters, and no option does" in note for note in answer.assumed)


def test_a_file_that_a_script_writes_where_it_lacks_counts() -> None:
    engine = '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}'
    lines = (
        "if [ ! -f conf/z3.json ]; then",
        "cat > conf/z3.json <<END",
        engine,
        "END",
        "fi",
        "accelerate launch --num_processes 4 -m axolotl.cli.train a.yaml",
    )
    own = "base_model: me/mine\nsequence_len: 64\nmicro_batch_size: 1\ndatasets: [{path: x}]\ndeepspeed: conf/z3.json\n"
    texts = script(*lines) | {"a.yaml": own} | MODEL
    plan = job_read(texts)[1].job.plan
    assert (plan.zero, plan.offload_optimizer, plan.dp) == (3, 1.0, 4)
    given = texts | {"z3.json": engine.replace("3", "2").replace("cpu", "none")}
    assert job_read(given)[1].job.plan.zero == 2  # a file that is there is not written again
    lines = ("cat > a.yaml <<END", own.replace("deepspeed: conf/z3.json\n", ""), "END", lines[-1])
    assert job_read(script(*lines) | MODEL)[1].job.plan.dp == 4


def test_sequences_of_a_device_may_have_the_shorter_name() -> None:
    line = f"torchrun --nproc_per_node 2 own.py {OPTIONS}".replace("per_device_train_batch", "per_device_batch")
    assert (
        job_read(script(f"accelerate launch --num_processes 2 own.py {line.partition('own.py')[2]}") | MODEL)[
            1
        ].job.plan.microbatch_size
        == 2
    )


def test_which_kernel_multiplies_experts_blocks_nothing() -> None:
    swift = "NPROC_PER_NODE=2 swift sft --model me/mine --tuner_type lora --lora_rank 8 --experts_impl grouped_mm "
    assert job_read(script(swift + "--max_length 512 --per_device_train_batch_size 1") | MODEL)[1].job.plan.dp == 2


def test_a_vocabulary_that_is_not_padded_is_told_with_the_number_to_say() -> None:
    texts = script(f"{MEGATRON} --tensor-model-parallel-size 2")
    (told,) = [note for note in job_read(texts, "model.vocab=99574")[1].assumed if "model.vocab" in note]
    padded = "no multiple of 128 x 2 tensor-parallel ranks = 256: Megatron-LM pads it to 99,584"
    assert told == f"model.vocab 99,574 is {padded}, which is the number to say"
    assert not [note for note in job_read(texts, "model.vocab=99584")[1].assumed if "model.vocab" in note]


def test_a_model_of_another_folder_is_not_taken_from_flags() -> None:
    for flag in ("--init-from-hf-path DIR", "--fsdp2-config-path a.yaml", "--model-id qwen3"):
        (fault,) = faults(script(f"{MEGATRON} --use-torch-fsdp2 {flag}"))
        assert fault.startswith(f"{flag}: this is not known here and could change")
