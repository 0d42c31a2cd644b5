"""Settings that files of other systems leave open are asked for, and those that a job can't say are told."""

import json

import pytest

from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError
from shardwright.interchange.foreign_job import job_of_texts
from shardwright.interchange.imported import Asked, Imported, split_sets
from shardwright.interchange.system import SYSTEMS

MEGATRON = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4"
    " --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8"
    " --vocab-size 1024 --lr 1e-4 --train-iters 10 "
)
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 64,
}  # fmt: skip


def read(system: str, *sets: str, devices: int = 0, **files: str) -> Imported:
    variables, overrides = split_sets(sets)
    texts = {name.replace("_", ".", 1): text for name, text in files.items()}
    return job_of_texts(SYSTEMS[system], texts, Asked(variables, overrides, AskedCluster(devices)), "the files")


def faults(system: str, *sets: str, devices: int = 0, **files: str) -> list[str]:
    with pytest.raises(PlanError) as caught:
        read(system, *sets, devices=devices, **files)
    return caught.value.faults


def test_what_the_environment_knows_is_asked_for_in_one_fault() -> None:
    script = MEGATRON + "--tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP} --save $WHERE"
    (fault,) = faults("megatron", run_sh=script)
    assert "--set TP=VALUE --set PP=VALUE" in fault and "WHERE" not in fault
    plan = read("megatron", "TP=2", "PP=4", run_sh=script).job.plan
    assert (plan.tp, plan.pp, plan.dp) == (2, 4, 1)


def test_flags_that_are_not_known_are_told_and_others_sorted_by_what_they_are_about() -> None:
    result = read("megatron", run_sh=MEGATRON + "--log-interval 5 --save here --frobnicate 3")
    assert result.unknown == ("--frobnicate 3",)
    assert result.without_effect["logs"] == ("--log-interval",) and result.without_effect["checkpoints"] == ("--save",)


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("--use-distribted-optimizer", "--use-distributed-optimizer"),
        ("--recompute-granularit full", "--recompute-granularity"),
        ("--tensor-model-parallel-siz 2", "--tensor-model-parallel-size"),
    ],
)
def test_a_slip_of_a_flag_is_a_fault_with_the_flag_that_may_be_meant(slip: str, meant: str) -> None:
    (fault,) = faults("megatron", run_sh=MEGATRON + slip)
    assert fault.startswith(f"{slip}: this is not known here, and {meant} is; write that if it is meant")
    _, _, way_out = fault.rpartition("--set ")
    assert read("megatron", way_out, run_sh=MEGATRON + slip).job.plan.tp == 1
    assert read("megatron", run_sh=MEGATRON + "--adam-beta2 0.9 --adam-beta3 0.9").unknown == ("--adam-beta3 0.9",)


def test_what_a_job_can_not_say_is_told() -> None:
    result = read("megatron", run_sh=MEGATRON + "--lr-decay-iters 5 --lr-decay-style cosine --decoupled-lr 1.0")
    assert any("until step 5 there, and until the last of 10 here" in line for line in result.lost)
    assert any(line.startswith("--decoupled-lr 1.0") for line in result.lost)


def test_assumptions_are_told() -> None:
    result = read("megatron", run_sh="N=${GPUS:-8}\n" + MEGATRON.replace("node 8", "node $N"))
    assert "nobody set these, so their defaults hold: GPUS=8" in result.assumed
    assert any("1,024" in line or "padded" in line for line in result.assumed) or result.job.model.vocab == 1024
    assert any("own default" in line for line in result.assumed)


def test_degrees_that_leave_no_replica_show_their_arithmetic() -> None:
    (fault,) = faults("megatron", run_sh=MEGATRON + "--tensor-model-parallel-size 3")
    assert "8 / 3 = 2.67" in fault and "--devices" in fault


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("--micro-batch-size x", "--micro-batch-size x: it should be a number"),
        ("--position-embedding-type mrope", "--position-embedding-type mrope can't be said here; use one of"),
        ("--recompute-granularity some", "--recompute-granularity some can't be said here"),
        ("--num-experts 4 --moe-layer-freq ([2]*3)", "--moe-layer-freq ([2]*3) is neither a number nor a list"),
        ("--cp-comm-type a2a+p2p", "--cp-comm-type a2a+p2p can't be said here"),
    ],
)
def test_a_value_that_is_wrong_is_a_fault_with_its_flag(given: str, name: str) -> None:
    quoted = given.replace("(", "'(").replace(")", ")'")
    assert any(fault.startswith(name) for fault in faults("megatron", run_sh=MEGATRON + quoted))


def test_a_script_without_training_says_so() -> None:
    (fault,) = faults("megatron", run_sh="echo hello\npython other.py --lr 3")
    assert fault.startswith("no command in it trains a model here")


def test_a_script_that_trains_twice_says_which_it_is() -> None:
    once = read("megatron", devices=1, run_sh=MEGATRON)
    again = MEGATRON + "\n" + MEGATRON.replace("--lr ", "--lr 0.5 --lr ")
    assert not any("trains 2 times" in note for note in once.assumed)
    (note,) = [note for note in read("megatron", devices=1, run_sh=again).assumed if "trains 2 times" in note]
    assert "what follows is of the last" in note
    assert not any("trains" in note for note in read("megatron", devices=1, run_sh=f"{MEGATRON}\n{MEGATRON}").assumed)


def test_a_variable_that_no_file_has_is_a_fault() -> None:
    script = "NNODES=${NNODES:-1}\n" + MEGATRON
    assert read("megatron", "NNODES=1", devices=8, run_sh=script).job.plan.world == 8
    (fault,) = faults("megatron", "NNODE=4", devices=8, run_sh=script)
    assert "--set NNODE: nothing in the files is called so; did you mean NNODES?" in fault


def test_each_system_asks_for_devices_where_nothing_says_them() -> None:
    own = json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}})
    assert "--devices" in faults("deepspeed", ds_json=own, config_json=json.dumps(LLAMA))[0]
    titan = '[model]\nname = "llama3"\nflavor = "8B"\n'
    assert "--devices" in faults("torchtitan", job_toml=titan)[0]
    assert read("torchtitan", devices=8, job_toml=titan).job.plan.zero == 3


def test_a_model_that_nothing_names_is_asked_for() -> None:
    own = json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}})
    assert "config.json" in faults("deepspeed", devices=8, ds_json=own)[0]
    assert read("deepspeed", "model.name=llama3-8b", devices=8, ds_json=own).job.model.layers == 32
    assert "model.name" in faults("torchtitan", devices=8, job_toml='[model]\nflavor = "9T"\n')[0]


def test_tokens_and_ulysses_of_megatron_deepspeed_are_read() -> None:
    script = MEGATRON.replace("--train-iters 10", "--train-tokens 25600 --lr-warmup-tokens 512")
    job = read("megatron", run_sh=script + " --ds-sequence-parallel-size 2").job
    assert (job.optimizer.steps, job.optimizer.warmup_steps) == (100, 2)
    assert (job.plan.cp, job.plan.cp_method, job.plan.dp) == (2, "ulysses", 4)


def test_references_of_hydra_are_followed() -> None:
    text = (
        "trainer: {devices: 8, num_nodes: 1, max_steps: 10}\nmodel:\n  num_layers: 4\n  hidden_size: 64\n"
        "  num_attention_heads: 4\n  ffn_hidden_size: ${multiply:4, ${.hidden_size}}\n  encoder_seq_length: 32\n"
        "  max_position_embeddings: ${.encoder_seq_length}\n  micro_batch_size: 1\n  global_batch_size: 8\n"
        "  tokenizer: {library: megatron, type: GPT2BPETokenizer}\n  tensor_model_parallel_size: ${oc.env:TP}\n"
    )
    assert any("model.tensor_model_parallel_size" in fault for fault in faults("nemo", conf_yaml=text))
    result = read("nemo", conf_yaml=text.replace("${oc.env:TP}", "2"))
    assert result.job.model.ffn == 256 and result.job.plan.tp == 2
    many = [f"  a{n}: '${{multiply:{','.join([f'${{.a{n + 1}}}'] * 30)}}}'\n" for n in range(6)]  # 30^6 references
    assert faults("nemo", conf_yaml=text.replace("micro_batch_size: 1", "micro_batch_size: ${.a0}") + "".join(many))


@pytest.mark.parametrize("text", ["a: [1", "- 1", "a: *b", "x" * 300_000, "a: !!python/object/apply:os.system [id]"])
def test_yaml_of_strangers_is_one_fault(text: str) -> None:
    assert len(faults("nemo", conf_yaml=text)) == 1


ODD_DIGITS = ("²", "1²", "9" * 5000)


@pytest.mark.parametrize("digits", ODD_DIGITS)
@pytest.mark.parametrize(
    "flags",
    [
        "--window-size {},0", "--window-size 4,0 --window-attn-skip-freq {}", "--num-experts 4 --moe-layer-freq {}",
        "--rampup-batch-size {} 1 1", "--step-batch-size-schedule '0:1 1K:{}'", "--num-experts {}",
        "--sequence-parallel $(({}+1))",
    ],
)  # fmt: skip
def test_digits_that_are_no_number_are_a_fault_of_their_flag(flags: str, digits: str) -> None:
    assert faults("megatron", run_sh=MEGATRON + flags.format(digits))


@pytest.mark.parametrize("digits", ODD_DIGITS)
@pytest.mark.parametrize("key", ["data_parallel_shard_degree", "global_batch_size", "selective_ac_option"])
def test_digits_that_are_no_number_are_a_fault_of_their_key(key: str, digits: str) -> None:
    section = {"data_parallel_shard_degree": "parallelism", "global_batch_size": "training"}
    titan = (
        f'[model]\nname = "llama3"\nflavor = "8B"\n[{section.get(key, "activation_checkpoint")}]\n{key} = "{digits}"\n'
    )
    assert any(key in fault or "activation_checkpoint" in fault for fault in faults("torchtitan", job_toml=titan))
    assert faults("torchtitan", f"model.layers={digits}", devices=8, job_toml=titan)


@pytest.mark.parametrize("digits", ODD_DIGITS)
def test_digits_that_are_no_number_are_no_number_of_devices_or_elements(digits: str) -> None:
    script = MEGATRON.replace("node 8", f"node {digits}")
    assert any("how many GPUs" in line for line in faults("megatron", run_sh=script))
    assert faults("megatron", run_sh="A=(1 2)\n" + MEGATRON + f"--tensor-model-parallel-size ${{A[{digits}]}}x")
    assert faults("megatron", run_sh=f"N={digits}\n" + MEGATRON + "--tensor-model-parallel-size $((N*2))")


def test_a_length_by_samples_counts_beside_one_by_steps() -> None:
    flags = "--lr-decay-style cosine --lr-decay-samples 40 --lr-warmup-samples 16"
    result = read("megatron", run_sh=MEGATRON + flags)
    assert any("until step 5 there, and until the last of 10 here" in line for line in result.lost)
    assert result.job.optimizer.warmup_steps == 2
    script = MEGATRON.replace("--train-iters 10", "--train-samples 80")
    assert read("megatron", run_sh=script + "--lr-warmup-iters 3").job.optimizer.steps == 10


@pytest.mark.parametrize("name", ["train", "lr-decay", "lr-warmup"])
def test_a_length_that_is_said_twice_is_a_fault(name: str) -> None:
    flags = f"--{name}-samples 40" + ("" if name == "train" else f" --{name}-iters 5")
    assert any(f"--{name}-iters" in fault for fault in faults("megatron", run_sh=MEGATRON + flags))


FUNCTION = "get_args() { python flags.py; }\n"


@pytest.mark.parametrize("words", ["$EXTRA", "${EXTRA[@]}", "$(get_args)", "`get_args`"])
def test_words_that_a_function_prints_are_flags(words: str) -> None:
    function = 'get_args() { if [ "$1" = long ]; then echo "--a"; fi; echo "--bf16 --swiglu"; }\n'
    job = read("megatron", run_sh=f"{function}EXTRA=$(get_args)\n{MEGATRON} {words}").job
    assert (job.precision.compute, job.model.activation) == ("bf16", "silu")


@pytest.mark.parametrize("flags", ["--use-flash-attn", "--zarr-thing", "--lr-decay-style cosine", "--bf16", "--save x"])
@pytest.mark.parametrize("unknown", ["$EXTRA", '"${EXTRA[@]}"', "$(get_args)", "`get_args`"])
def test_words_that_are_not_followed_are_a_fault_with_a_way_out_that_works(flags: str, unknown: str) -> None:
    script = FUNCTION + "EXTRA=$(get_args)\n" + MEGATRON + f"{flags} {unknown}"
    name = "EXTRA" if "EXTRA" in unknown else "_get_args_"
    (fault,) = faults("megatron", run_sh=script)
    assert f"--set {name}=" in fault
    assert read("megatron", f"{name}=--bf16 --swiglu", run_sh=script).job.model.gated_mlp
    assert not read("megatron", f"{name}=", run_sh=script).job.model.gated_mlp


def test_a_value_that_is_not_known_and_changes_nothing_is_no_fault() -> None:
    flags = "--save $(date +%s) --data-path 0.5 $ONE 0.5 $TWO --tensorboard-dir $WHERE --log-interval $N"
    assert read("megatron", run_sh=MEGATRON + flags).job.plan.tp == 1


def test_words_of_the_launcher_that_are_not_followed_are_asked_for() -> None:
    script = "D=$(dist)\n" + MEGATRON.replace("--nproc_per_node 8", "--master_port 1 $D")
    assert "--set D=VALUE, or with --devices N" in faults("megatron", run_sh=script)[0]
    assert read("megatron", "D=--nproc_per_node 4", run_sh=script).job.plan.dp == 4


@pytest.mark.parametrize("system", ["deepspeed", "accelerate"])
def test_options_that_are_not_followed_are_a_fault(system: str) -> None:
    own = {"deepspeed": {"zero_optimization": {"stage": 2}}, "accelerate": {"distributed_type": "NO"}}[system]
    script = f"{system} train.py --per_device_train_batch_size 1 --do_train $(more)"
    files = {"run_sh": script, "own_json": json.dumps(own), "config_json": json.dumps(LLAMA)}
    (fault,) = faults(system, devices=1, **files)
    assert "--set _more_=WORDS" in fault
    assert read(system, "_more_=--bf16", devices=1, **files).job.precision.compute == "bf16"


def test_the_microbatch_that_is_asked_for_makes_the_batch() -> None:
    files = {"acc_yaml": "distributed_type: MULTI_GPU\nnum_processes: 8\n", "config_json": json.dumps(LLAMA)}
    asks = "(--set plan.microbatch_size=N)"
    assert any(asks in line for line in read("accelerate", **files).assumed)
    result = read("accelerate", "plan.microbatch_size=2", "model.sequence=32", **files)
    assert result.job.batch.global_batch_size == 16
    assert not any(asks in line or "how long samples are" in line for line in result.assumed)
    ds = json.dumps({"zero_optimization": {"stage": 2}})
    result = read("deepspeed", "plan.microbatch_size=2", devices=8, ds_json=ds, config_json=files["config_json"])
    assert (result.job.batch.global_batch_size, result.job.plan.microbatch_size) == (16, 2)


def test_what_is_set_is_what_the_rest_is_derived_from() -> None:
    script = MEGATRON.replace("--global-batch-size 8", "")
    job = read("megatron", "plan.microbatch_size=2", "plan.tp=2", run_sh=script).job
    assert (job.plan.tp, job.plan.dp, job.batch.global_batch_size) == (2, 4, 8)
    titan = '[model]\nname = "llama3"\nflavor = "8B"\n'
    job = read("torchtitan", "plan.microbatch_size=2", devices=8, job_toml=titan).job
    assert (job.batch.global_batch_size, job.plan.microbatch_size) == (16, 2)


@pytest.mark.parametrize(("tp", "pp", "devices"), [(3, 4, 24), (3, 1, 24), (5, 1, 40), (2, 8, 16)])
def test_the_number_of_devices_that_is_offered_is_taken(tp: int, pp: int, devices: int) -> None:
    flags = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --num-attention-heads 60"
    script = (
        MEGATRON.replace("--num-layers 4", "--num-layers 60").replace("--hidden-size 64", "--hidden-size 240") + flags
    )
    script = script.replace("--vocab-size 1024", "--vocab-size 15360").replace("batch-size 8", "batch-size 120")
    if 8 % (tp * pp):
        (fault,) = faults("megatron", run_sh=script)
        assert fault.endswith(f"--devices, such as {devices}")
    asked = Asked({}, (), AskedCluster(devices, "h100-sxm"))
    result = job_of_texts(SYSTEMS["megatron"], {"run.sh": script}, asked, "the files")
    assert result.job.plan.world == devices and result.job.cluster.nodes == devices // 8


@pytest.mark.parametrize(
    "flags", ["--recompute-granularity $X", "--recompute-granularity selective --recompute-modules $X",
     "--cp-comm-type $X",
              "--num-experts 4 --moe-layer-freq $X", "--window-size $X", "--rampup-batch-size $X 8 8"]
)  # fmt: skip
def test_a_word_that_is_not_known_is_asked_for_with_its_fault(flags: str) -> None:
    (fault,) = faults("megatron", run_sh=MEGATRON + flags)
    assert "$X" in fault and "--set X=VALUE" in fault


@pytest.mark.parametrize(
    ("modules", "operators", "lost"),
    [("core_attn", ["attention"], ""), ("mlp layernorm", ["norm", "up", "activation"], ""),
     ("moe_act", ["activation"], ""),
     ("core_attn mla_up_proj", ["attention"], ""), ("layernorm mla_up_proj", ["norm"], "mla_up_proj"),
     ("mlp shared_experts", ["up", "activation"], "shared_experts")],
)  # fmt: skip
def test_modules_that_are_computed_again_are_operators(modules: str, operators: list[str], lost: str) -> None:
    flags = f"--recompute-granularity selective --recompute-modules {modules}"
    result = read("megatron", run_sh=MEGATRON + flags)
    assert result.job.plan.recompute_operators == operators
    assert any(f"--recompute-modules {lost}:" in line for line in result.lost) == bool(lost)
