"""Kinds that launch scripts of repositories showed which no list here names: output that commands compute, scripts that
lie beside, conditions on arguments, flags of further forks."""

from pathlib import Path

import pytest

from interchange.test_habits_of_files import MEGATRON, OPTIONS, faults, megatron, script
from interchange.test_habits_of_scripts import NEOX
from interchange.test_trainer_commands import FACTORY, MODEL, job_read
from shardwright.config.base import PlanError
from shardwright.interchange.foreign_job import read_job_of
from shardwright.interchange.imported import Asked
from shardwright.interchange.named_scripts import script_texts
from shardwright.interchange.system import SOURCES

SWIFT = "NPROC_PER_NODE=8 swift sft --model me/mine --train_type full --max_length 512 --per_device_train_batch_size 1 "
SPREAD = '{"_note": "x", "fsdp": "full_shard auto_wrap", "fsdp_config": {"activation_checkpointing": true}}'


@pytest.mark.parametrize(
    "value",
    [
        "$(expr 128 / $N)",
        "`expr $N \\* 2`",
        '$(echo "$N * 2" | bc)',
        '$(echo "scale=0; 128 / $N" | bc -l)',
        '$(bc <<< "$N + 8")',
        "$(echo 16)",
        "$(basename /data/16.sh .sh)",
        "$(basename $(dirname runs/16/x))",
    ],
)
def test_what_commands_compute_from_their_words_is_known(value: str) -> None:
    assert megatron("N=8", flags=f"--global-batch-size {value}").job.batch.global_batch_size == 16


@pytest.mark.parametrize("value", ["$(expr 64 / $N)", '$(echo "$N * 2" | bc)'])
def test_what_they_compute_from_an_unknown_variable_is_asked_for_by_its_name(value: str) -> None:
    (fault,) = faults(script(MEGATRON + f"--global-batch-size {value}"))
    assert "--set N=VALUE" in fault


@pytest.mark.parametrize(
    "value", ["$(expr 7 / 0)", "$(echo 1.5 | bc)", "$(echo 2 | sort -h)", "$(" * 30 + "echo 2" + ")" * 30]
)
def test_what_is_no_whole_number_is_asked_for(value: str) -> None:
    (fault,) = faults(script(MEGATRON + f"--global-batch-size {value}"))
    assert "--global-batch-size by" in fault


def test_the_index_of_an_element_may_have_brackets() -> None:
    lines = ("SIZES=(8 16 32)", "SIZE=${SIZES[$(( 4 % ${#SIZES[*]} ))]}")
    assert megatron(*lines, flags="--global-batch-size $SIZE").job.batch.global_batch_size == 16


def test_a_condition_on_an_argument_names_it() -> None:
    lines = ("if [[ $2 == 7 ]]; then LAYERS=4; else echo no; exit 1; fi", MEGATRON + "--num-layers $LAYERS")
    (fault,) = faults(script(*lines))
    assert "line 2: a condition depends on what nobody gave, and is taken as not so (--set 2=VALUE)" in fault
    assert job_read(script(*lines), "2=7")[1].job.model.layers == 4


@pytest.mark.parametrize("condition", ['[[ "$(whereami)" == */code/* ]]', "[ -f /data/tokens.bin ]", "[[ -d /data ]]"])
def test_a_condition_without_which_a_script_ends_is_taken_as_so(condition: str) -> None:
    begin = f"if {condition}; then\n  LAYERS=4\nelse\n  echo no >&2\n  exit 1\nfi"
    read = megatron(begin, flags="--num-layers $LAYERS")
    assert read.job.model.layers == 4
    is_open = "$" in condition  # files that a script asks for are taken to be there
    assert is_open == any("is taken as so, since the script ends otherwise" in note for note in read.assumed)


def test_a_condition_that_is_known_not_to_hold_ends_a_script() -> None:
    condition = '[ -f /data/tokens.bin ] && [ "$MODE" = b ]'
    guard = f"MODE=a\nif {condition}; then\n  LAYERS=4\nelse\n  exit 1\nfi"
    (fault,) = faults(script(guard, MEGATRON + "--num-layers $LAYERS"))
    assert "the script ends there" in fault


def test_a_choice_by_what_nobody_gave_is_not_taken_as_so() -> None:
    (fault,) = faults(
        script('if [[ "$SIZE" == 7 ]]; then LAYERS=4; else exit 1; fi', MEGATRON + "--num-layers $LAYERS")
    )
    assert "--set SIZE=VALUE" in fault


def test_a_script_that_ends_without_its_arguments_says_so() -> None:
    (fault,) = faults(
        script("MODE=", "while [ $# -gt 0 ]; do MODE=$1; shift; done", '[ -z "$MODE" ] && exit 1', MEGATRON)
    )
    assert "line 4: the script ends there; its arguments stand behind --" in fault


def test_a_script_behind_a_container_is_named() -> None:
    (fault,) = faults(script("apptainer run --nv -B /a -B /b --pwd /c --env X=1 image.sif bash /c/inner.sh"))
    assert "/c/inner.sh is not read: name that file too" in fault


def test_scripts_beside_are_read_and_told(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/sizes.sh").write_text("SIZE=16\n")
    (tmp_path / "inner.sh").write_text(
        f"#!/bin/bash\nsource $HERE/conf/sizes.sh\n{MEGATRON} --global-batch-size $SIZE\n"
    )
    run = tmp_path / "run.sh"
    run.write_text("#!/bin/bash\nHERE=$(dirname $0)\nbash ${HERE}/inner.sh\n# source gone.sh\n")
    read = read_job_of(SOURCES["megatron"], (str(run),), Asked())
    assert read.job.batch.global_batch_size == 16
    assert sum("which the files name" in note for note in read.assumed) == 2
    (tmp_path / "other.sh").write_text("X=1\n")
    named = {str(run): run.read_text(), str(tmp_path / "other.sh"): "X=1\n"}
    assert script_texts(run, named) == {}  # the user says which there are


def test_absolute_paths_of_scripts_are_not_taken(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "up.sh").write_text("SIZE=8\n")
    run = tmp_path / "a/run.sh"
    run.write_text(f"source {tmp_path}/up.sh\n")
    assert script_texts(run, {str(run): run.read_text()}) == {}


@pytest.mark.parametrize(
    "path",
    [
        "../up.sh",
        '"$HERE/../up.sh"',
        '"$(dirname "$0")/../up.sh"',
        '"$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/../up.sh"',
    ],
)
def test_a_script_of_the_folder_above_is_that_of_this_folder(path: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    run = tmp_path / "a/run.sh"
    for place, size in ((run.with_name("up.sh"), 8), (tmp_path / "up.sh", 16)):
        place.write_text(f": ${{SIZE:={size}}}\n")
    run.write_text(f'HERE="$(cd "$(dirname "$0")" && pwd)"\nsource {path}\n{MEGATRON} --global-batch-size $SIZE\n')
    assert [*script_texts(run, {str(run): run.read_text()})] == [str(tmp_path / "up.sh")]
    assert read_job_of(SOURCES["megatron"], (str(run),), Asked()).job.batch.global_batch_size == 16


def test_a_list_of_hosts_that_a_script_writes_is_no_script() -> None:
    lines = ("cat > hosts <<E", "one slots=8", "two slots=8", "E")
    flags = MEGATRON.removeprefix("torchrun --nproc_per_node 8")
    read = job_read(script(*lines, f"deepspeed --hostfile hosts --num_nodes 2 --num_gpus 8 {flags}"))[1]
    assert read.job.plan.dp == 16


def test_ranks_of_a_process_count_no_devices() -> None:
    flags = MEGATRON.removeprefix("torchrun --nproc_per_node 8")
    (fault,) = faults(script(f"./bind.sh $OMPI_COMM_WORLD_LOCAL_RANK python3 {flags}"))
    assert "--devices" in fault and "LOCAL_RANK" not in fault


def test_a_tool_behind_srun_has_its_own_words() -> None:
    loop = ("for node in $(cat hosts); do", 'srun -w "$node" -N 1 llamafactory-cli train l.yaml', "done")
    assert job_read(script("export NNODES=2 NPROC_PER_NODE=4", *loop) | FACTORY | MODEL)[1].job.plan.world == 8


def test_given_devices_settle_how_many_processes_there_are() -> None:
    line = f"accelerate launch --multi_gpu --num_machines $NODES --num_processes $((NODES * 8)) sft.py {OPTIONS}"
    assert any("NODES" in fault for fault in faults(script(line) | MODEL))
    with pytest.raises(PlanError):
        job_read(script(line) | MODEL)
    assert job_read(script(line) | MODEL, devices=16)[1].job.plan.dp == 16


def test_configurations_that_swift_brings_are_known_in_its_yaml_and_by_fsdp() -> None:
    yaml = {"s.yaml": "model: me/mine\ntrain_type: full\nmax_length: 512\ndeepspeed: zero3\n"}
    assert job_read(script("NPROC_PER_NODE=8 swift sft --config s.yaml") | yaml | MODEL)[1].job.plan.zero == 3
    lines = ("cat > f.json <<E", SPREAD, "E", SWIFT + "--fsdp f.json --sequence_parallel_size 2")
    for read in (job_read(script(*lines) | MODEL)[1], job_read(script(SWIFT + "--fsdp fsdp2") | MODEL)[1]):
        assert (read.job.plan.zero, read.job.plan.recompute) == (3, "full")
    assert job_read(script(*lines) | MODEL)[1].job.plan.cp == 2


def test_experts_by_groups_under_newer_names_keep_the_loss_that_balances_them() -> None:
    flags = (
        "--num-experts 8 --moe-router-topk 2 --moe-router-num-groups 4 --moe-router-group-topk 2 --n-shared-experts 1 "
    )
    kind = "--moe-router-load-balancing-type group_limited_greedy --seq-aux --moe-aux-loss-coeff 0.003"
    assert megatron(flags=flags + kind).job.model.moe.num_groups == 4


def test_widths_as_the_code_of_llama_has_them_are_computed() -> None:
    model = megatron(flags="--swiglu --multiple-of 64 --hidden-dim-multiplier 1.3 --apply-layernorm-rms").job.model
    assert (model.ffn_size, model.norm) == (256, "rmsnorm")  # 4 * 64 * 2 / 3 = 170, times 1.3 = 221
    assert megatron(flags="--multiple-of 64").job.model.ffn_size == 256


def test_gated_mlps_and_heads_of_older_forks_are_read() -> None:
    model = megatron(
        flags="--glu_activation swiglu --num_attention_heads_kv 2 --no_tie_embed_logits --use_rms_norm"
    ).job.model
    assert (model.gated_mlp, model.ffn_size, model.num_kv_heads, model.bias) == (True, 256, 2, False)
    assert (model.norm, model.tied_embeddings) == ("rmsnorm", False)
    assert megatron(flags="--glu_activation geglu").job.model.activation == "gelu"


def test_an_activation_with_weights_is_told_with_what_is_counted() -> None:
    read = megatron(flags="--xielu --qk-layernorm --optimizer ademamix")
    assert (read.job.model.activation, read.job.model.gated_mlp) == ("relu2", False)
    assert any("--xielu" in line for line in read.lost)
    assert any("keeps a third, of 4 bytes" in line for line in read.lost)


@pytest.mark.parametrize(
    "flag", ["--recompute-norm", "--use-mc2", "--moe-allgather-overlap-comm", "--aurora-model-size 7"]
)
def test_flags_of_forks_that_leave_the_plan_as_it_is_block_nothing(flag: str) -> None:
    assert megatron(flags=flag).job.plan.dp == 8


@pytest.mark.parametrize(
    "flag", ["--mlp-type residual", "--tp-2d", "--no-final-layernorm", "--enable-mhc", "--xiprelu", "--mask-only"]
)
def test_flags_of_forks_that_change_it_without_a_word_that_says_so_are_faults(flag: str) -> None:
    (fault,) = faults(script(MEGATRON + flag))
    assert f"--set {flag.split()[0][2:]}=ignore" in fault


def test_a_warm_up_in_tokens_counts_before_one_in_parts() -> None:
    tokens = "--zero-stage 0 --train-tokens 3200 --lr-warmup-tokens 640 --lr-warmup-fraction 0.5 --global-batch-size 16"
    read = megatron(flags=tokens)
    assert read.job.optimizer.warmup_steps < read.job.optimizer.steps // 2


def test_unknown_numbers_in_a_configuration_that_a_script_writes_are_asked_for() -> None:
    lines = ("cat > ds.json <<E", '{"train_batch_size": $SIZE, "zero_optimization": {"stage": $STAGE}}', "E")
    flags = "--deepspeed --deepspeed_config ds.json"
    (fault,) = faults(script(*lines, MEGATRON + flags))
    assert "--set STAGE=VALUE" in fault
    assert job_read(script(*lines, MEGATRON + flags), "STAGE=2")[1].job.plan.zero == 2


@pytest.mark.parametrize("program", ["-m src.train_prm.main", "DPO/main.py", "./grpo/train.py"])
def test_a_program_with_a_plain_name_is_known_by_what_it_stands_in(program: str) -> None:
    (fault,) = faults(script(f"torchrun --nproc_per_node 2 {program} {OPTIONS}") | MODEL)
    assert "by its name" in fault


def test_a_program_of_gpt_neox_that_trains_nothing_is_refused_by_its_name() -> None:
    own = {"n.yml": NEOX["n.yml"].replace("EXPERTS", "1")}
    assert any(
        "embed.py trains nothing by its name" in fault for fault in faults(script("./deepy.py embed.py n.yml") | own)
    )


def test_nodes_are_counted_by_the_list_of_them() -> None:
    flags = MEGATRON.removeprefix("torchrun --nproc_per_node 8")
    for count in (
        "$(wc -l < $PBS_NODEFILE)",
        "$(cat $PBS_NODEFILE | uniq | wc -l)",
        "`sort -u ${PBS_NODEFILE} | wc -l`",
    ):
        lines = ("#PBS -l select=2", f"NODES={count}", f"mpiexec -n $((NODES * 4)) -ppn 4 python3 {flags}")
        assert job_read(script(*lines))[1].job.plan.dp == 8


def test_swift_by_its_path_is_swift_and_its_type_of_numbers_is_asked_for() -> None:
    line = "torchrun --nproc_per_node 2 $(which swift) sft --model me/mine --train_type full --max_length 512 "
    name, read = job_read(script(line) | MODEL)
    assert (name, read.job.precision.compute) == ("ms-swift", "bf16")
    (fault,) = faults(script(line + "--torch_dtype $(python -c 1)") | MODEL)
    assert "_python_-c_1_" in fault


def test_a_configuration_of_hydras_is_named_without_its_option() -> None:
    (fault,) = faults(script(f"accelerate launch --num_processes 2 main.py --config-name=a.yaml {OPTIONS}") | MODEL)
    assert "--config a.yaml is a file" in fault
    own = {"a.yaml": "defaults: [{trainer: kto}]\nmodel_type: mine\nbatch_size: 8\n"}
    (fault,) = faults(
        script(f"accelerate launch --num_processes 2 main.py --config-name=a.yaml {OPTIONS}") | own | MODEL
    )
    assert "a.yaml is neither" in fault


def test_what_accelerate_drops_of_its_section_of_deepspeed_is_told() -> None:
    shards = {"z.yaml": "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_optimization: {stage: 3}}\n"}
    line = f"accelerate launch --config_file z.yaml --num_processes 2 sft.py {OPTIONS}"
    read = job_read(script(line) | shards | MODEL)[1]
    assert any("zero_optimization.stage = 3" in note for note in read.lost)


@pytest.mark.parametrize(
    "change",
    [
        "envsubst < ds.tmpl > ds.json",
        "jq '.train_batch_size = 64' base.json > ds.json",
        "yq -i '.zero_optimization.stage = 3' ds.json",
        "sed -i 's/\\(\"stage\":\\) 2/\\U\\1 3/' ds.json",
        "cp other.json ds.json",
        "python make.py | tee log > ds.json",
    ],
)
def test_a_configuration_that_the_script_changes_is_not_taken_as_it_was(change: str) -> None:
    """A file beside the script is what it was before; a later one that the script writes whole is known again."""
    files = {"ds.json": '{"zero_optimization": {"stage": 2}}'}
    command = MEGATRON + "--deepspeed --deepspeed_config ds.json --global-batch-size 16"
    (fault,) = faults(script(change, command) | files)
    assert fault.startswith("line 2 changes ds.json, which the training command names")
    written = 'cat > ds.json <<EOF\n{"zero_optimization": {"stage": 1}}\nEOF'
    assert job_read(script(change, written, command) | files)[1].job.plan.zero == 1


def test_a_configuration_that_sed_changes_plainly_is_taken_as_it_is_then() -> None:
    files = {"ds.json": '{"zero_optimization": {"stage": 2}}'}
    command = MEGATRON + "--deepspeed --deepspeed_config ds.json --global-batch-size 16"
    line = 'sed -i \'s/"stage": 2/"stage": 1/\' ds.json'
    assert job_read(script(line, command) | files)[1].job.plan.zero == 1
