"""Configurations of further training systems: each is read with its meaning, or refused where it has to be."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardwright.api.imported_job import system_and_files
from shardwright.cli.main import cli
from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.interchange.foreign_job import read_job_of
from shardwright.interchange.imported import Asked, Imported, split_sets
from shardwright.interchange.reading.settings import field_of
from shardwright.interchange.recognised import system_name_of
from shardwright.interchange.system import SOURCES, SYSTEMS
from shardwright.sharding.stage_parameters import model_parameters

FOLDER = Path(__file__).parent / "other_trainers"
H100 = "h100-sxm"


def imported(system: str, files: str, *sets: str, devices: int = 0) -> Imported:
    variables, overrides = split_sets(sets)
    paths = tuple(str(FOLDER / name) for name in files.split())
    return read_job_of(SOURCES[system], paths, Asked(variables, overrides, AskedCluster(devices, H100)))


def degrees(imported_job: Imported) -> tuple[Any, ...]:
    """dp, tp, pp, cp, ZeRO, microbatch, batch, layers, width, tokens, recomputation, number type."""
    job = imported_job.job
    plan, model = job.plan, job.model
    return (
        plan.dp, plan.tp, plan.pp, plan.cp, plan.zero, plan.microbatch_size, job.batch.global_batch_size, model.layers,
        model.hidden, model.sequence, plan.recompute, job.precision.compute,
    )  # fmt: skip


READ: dict[str, tuple[tuple[str, ...], int, tuple[Any, ...], dict[str, Any]]] = {
    "primus primus/harbour-pretrain.yaml": (
        (), 16, (4, 2, 2, 1, 1, 2, 64, 24, 3072, 4096, "full", "bf16"),
        {"plan.virtual_stages": 3, "plan.sequence_parallel": True, "model.kv_heads": 8, "model.tied_embeddings": False},
    ),
    "flagscale flagscale.yaml harbour.yaml": (
        (), 0, (2, 4, 2, 1, 1, 2, 64, 24, 3072, 2048, "none", "bf16"),
        {"model.ffn": 8192, "optimizer.steps": 1000, "optimizer.warmup_steps": 10, "cluster.nodes": 2},
    ),
    "ms-swift swift.sh config.json": (
        (), 0, (2, 4, 1, 1, 1, 2, 32, 32, 4096, 4096, "full", "bf16"),
        {"plan.sequence_parallel": True, "optimizer.weight_decay": 0.1, "model.vocab": 128256, "cluster.nodes": 2},
    ),
    "gpt-neox neox.yml neox-data.yml": (
        (), 16, (4, 2, 2, 1, 1, 4, 128, 24, 2048, 2048, "full", "fp16"),
        {"model.parallel_block": "two-norms", "model.rotary_dim": 32, "model.vocab": 50432, "model.bias": True,
         "precision.loss_scale": 4096.0, "optimizer.warmup_steps": 1430},
    ),
    "nanotron nanotron.yaml": (
        (), 0, (4, 2, 2, 1, 1, 3, 48, 22, 2048, 4096, "full", "bf16"),
        {"model.qkv_bias": True, "model.vocab": 50048, "plan.sequence_parallel": True, "model.norm_epsilon": 1e-5},
    ),
    "picotron picotron.json config.json": (
        (), 0, (2, 2, 2, 2, 0, 4, 64, 12, 4096, 2048, "none", "bf16"),
        {"plan.schedule": "gpipe", "plan.cp_method": "ring", "model.ffn": 14336},
    ),
    "axolotl axolotl.yaml config.json": (
        (), 16, (8, 2, 1, 1, 3, 2, 48, 32, 4096, 2048, "full", "bf16"), {"plan.zero_ranks": 4},
    ),
    "llamafactory llamafactory.yaml shards.json config.json": (
        (), 8, (8, 1, 1, 1, 3, 1, 16, 32, 4096, 4096, "full", "bf16"), {"plan.offload_optimizer": 1.0},
    ),
    "trl trl.yaml accelerate-zero3.yaml config.json": (
        (), 0, (8, 1, 1, 1, 3, 2, 128, 32, 4096, 32768, "full", "bf16"), {"optimizer.min_learning_rate_ratio": 0.1},
    ),
    "lightning lightning.py config.json": (
        (), 0, (16, 1, 1, 1, 2, 2, 128, 32, 4096, 4096, "full", "bf16"), {"cluster.nodes": 2},
    ),
    "nemo hydra.sh hydra-base.yaml": (
        ("model.vocab=50304",), 0, (4, 2, 4, 1, 1, 1, 64, 24, 2048, 2048, "none", "bf16"),
        {"plan.sequence_parallel": True, "optimizer.beta2": 0.95},
    ),
    "megatron-bridge bridge.py config.json": (
        ("CONFIG=harbour_8b_pretrain_32gpu_h100_config",), 0,
        (2, 4, 2, 2, 1, 1, 512, 32, 4096, 8192, "none", "bf16"),
        {"plan.virtual_stages": 4, "precision.float8": "tensorwise", "optimizer.steps": 300000,
         "optimizer.warmup_steps": 2000},
    ),
}  # fmt: skip


@pytest.mark.parametrize("command", READ)
def test_a_configuration_is_read_with_its_meaning(command: str) -> None:
    sets, devices, expected, fields = READ[command]
    system, _, files = command.partition(" ")
    result = imported(system, files, *sets, devices=devices)
    assert degrees(result) == expected
    assert {name: field_of(result.job, name) for name in fields} == fields


@pytest.mark.parametrize("command", READ)
def test_a_configuration_is_recognised_by_what_it_says(command: str) -> None:
    system, first, *_ = command.split()
    assert system_name_of(first, (FOLDER / first).read_text(encoding="utf-8")) == system


@pytest.mark.parametrize("name", ["checkpoint_num_layers", "checkpoint-num-layers"])
def test_a_configuration_of_how_gpt_neox_trains_is_no_deepspeeds(name: str) -> None:
    text = f"{name}: 1\ntrain_micro_batch_size_per_gpu: 4\nzero_optimization: {{stage: 1}}\n"
    assert system_name_of("train.yml", text) == "gpt-neox"
    assert system_name_of("ds.yml", text.partition("\n")[2]) == "deepspeed"


@pytest.mark.parametrize(
    ("system", "files", "changed", "words"),
    [
        ("axolotl", "axolotl.yaml config.json", "adapter: qlora", "adapter = qlora"),
        ("axolotl", "axolotl.yaml config.json", "qat: {weight_dtype: int4}", "qat"),
        ("axolotl", "axolotl.yaml config.json", "rl: dpo", "preferences"),
        ("axolotl", "axolotl.yaml config.json", "expert_parallel_size: 4", "expert_parallel_size = 4"),
        ("llamafactory", "llamafactory.yaml config.json", "", "shards.json is a file that is not read"),
        ("llamafactory", "llamafactory.yaml shards.json config.json", "finetuning_type: oft", "= oft"),
        ("llamafactory", "llamafactory.yaml shards.json config.json", "do_train: false", "trains nothing"),
        ("trl", "trl.yaml accelerate-zero3.yaml config.json", "num_generations: 8", "rewards"),
        ("trl", "trl.yaml accelerate-zero3.yaml", "", "config.json"),
        ("gpt-neox", "neox.yml neox-data.yml", '"moe_num_experts": 8', "Sinkhorn"),
        ("gpt-neox", "neox.yml neox-data.yml", '"attention_config": [[["mamba"], 24]]', "mamba"),
        ("gpt-neox", "neox.yml", "", "the number of tokens is the tokenizer's"),
        ("gpt-neox", "neox-data.yml", "", "name their file too"),
        ("flagscale", "flagscale.yaml", "", "train/harbour.yaml"),
        ("nanotron", "nanotron.yaml", "doremi: {domain_names: letters}", "doremi.domain_names"),
        ("picotron", "picotron.json", "", "name its config.json"),
        ("ms-swift", "swift.sh", "", "name its config.json"),
        ("nemo", "hydra.sh", "", "which is no file here"),
        ("lightning", "lightning.py", "", "name its config.json"),
    ],
)  # fmt: skip
def test_what_could_change_a_plan_and_is_not_known_is_refused(
    system: str, files: str, changed: str, words: str, tmp_path: Path
) -> None:
    first, *others = files.split()
    text = (FOLDER / first).read_text(encoding="utf-8")
    if changed:
        name = changed.partition(":")[0].strip('"')
        lines = [line for line in text.splitlines() if not line.lstrip().startswith((f"{name}:", f'"{name}"'))]
        text = (
            "\n".join(lines).replace("{\n", f"{{\n{changed},\n", 1)
            if first.endswith(".yml")
            else "\n".join([*lines, changed])
        )
    (tmp_path / first).write_text(text + "\n", encoding="utf-8")
    paths = (str(tmp_path / first), *(str(FOLDER / name) for name in others))
    with pytest.raises(PlanError) as caught:
        read_job_of(SOURCES[system], paths, Asked(cluster=AskedCluster(16, H100)))
    assert words in " ".join(caught.value.faults)


def test_an_experiment_of_primus_asks_for_the_files_that_it_begins_from(tmp_path: Path) -> None:
    path = tmp_path / "harbour.yaml"
    path.write_text((FOLDER / "primus/harbour-pretrain.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(PlanError, match=r"it begins from trainer\.yaml, which is none of the files"):
        read_job_of(SOURCES["primus"], (str(path),), Asked(cluster=AskedCluster(16, H100)))


def test_primus_computes_layers_of_some_numbers_again(tmp_path: Path) -> None:
    text = (FOLDER / "primus/harbour-pretrain.yaml").read_text(encoding="utf-8")
    path = tmp_path / "harbour.yaml"
    path.write_text(text.replace("recompute_num_layers: 1", 'recompute_layer_ids: "0,2,24"'), encoding="utf-8")
    library = [str(file) for file in sorted((FOLDER / "primus/configs").rglob("*.yaml"))]
    plan = read_job_of(SOURCES["primus"], (str(path), *library), Asked(cluster=AskedCluster(16, H100))).job.plan
    assert [place for place, policy in enumerate(plan.recompute_layers) if policy] == [0, 2]


def test_an_adapter_of_a_recipe_is_read(tmp_path: Path) -> None:
    job = imported("megatron-bridge", "bridge.py config.json", "CONFIG=harbour_8b_peft_config", devices=8).job
    assert (job.model.adapter.rank, job.model.adapter.alpha, len(job.model.adapter.targets)) == (32, 32, 7)
    lines = (
        'cfg.peft = default_peft_config("lora", dim=8, alpha=16, target_modules=["linear_proj"])',
        "cfg.peft = LoRA(dim=8, alpha=16, target_modules=['linear_proj'], dropout=0.0)",
        "cfg.peft.dim, cfg.peft.alpha = 8, 16\n    cfg.peft.target_modules = ['linear_proj']",
    )
    for line in lines:
        adapter = _bridge(tmp_path, line).job.model.adapter
        assert (adapter.rank, adapter.alpha, list(adapter.targets)) == (8, 16, ["out"])
    assert _bridge(tmp_path, "cfg.peft = default_peft_config(None)").job.model.adapter.rank == 0


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("cfg.peft = DoRA()", "peft = DoRA: adapters"),
        ("cfg.peft.exclude_modules = ['linear_qkv']", "peft.exclude_modules = linear_qkv"),
        ("cfg.peft.target_modules = ['*.layers.0.*.linear_qkv']", "names *.layers.0.*.linear_qkv"),
        ("cfg.train = elsewhere.made(4)", "train is what elsewhere.made returns"),
        ("cfg.train.micro_batch_size = found_out()", "micro_batch_size = found_out()"),
    ],
)
def test_what_a_recipe_has_of_its_own_is_a_fault(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        _bridge(tmp_path, line)
    assert any(words in fault for fault in caught.value.faults), caught.value.faults


def test_a_program_that_changes_a_recipe_asks_for_the_file_of_the_recipe(tmp_path: Path) -> None:
    program = tmp_path / "go.py"
    program.write_text(
        "from megatron.bridge.recipes.harbour.harbour_8b import pretrain_config\n\n\n"
        "def check_config(cfg):\n    return cfg.train.train_iters > 0\n",
        encoding="utf-8",
    )
    asked = Asked(cluster=AskedCluster(8, H100))
    with pytest.raises(PlanError, match=r"megatron\.bridge\.recipes\.harbour\.harbour_8b\.pretrain_config is in none"):
        read_job_of(SOURCES["megatron-bridge"], (str(program),), asked)


def test_a_recipe_that_begins_from_an_unknown_function_asks_for_its_file(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    text = (FOLDER / "bridge.py").read_text(encoding="utf-8").replace("_peft_common()", "_peft_common_of_mine()")
    more = "    cfg.train.train_iters = 3\n    return cfg\n"
    own.write_text(text.replace("    return cfg\n", more), encoding="utf-8")
    asked = Asked({"CONFIG": "harbour_8b_peft_config"}, cluster=AskedCluster(8, H100))
    with pytest.raises(PlanError, match="begins from what _peft_common_of_mine"):
        read_job_of(SOURCES["megatron-bridge"], (str(own), str(FOLDER / "config.json")), asked)


def test_a_recipe_of_images_is_refused_by_its_name(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    text = (FOLDER / "bridge.py").read_text(encoding="utf-8")
    own.write_text(text.replace("harbour_8b_peft", "harbour_vl_8b_sft"), encoding="utf-8")
    asked = Asked({"CONFIG": "harbour_vl_8b_sft_config"}, cluster=AskedCluster(8, H100))
    with pytest.raises(PlanError, match="harbour_vl_8b_sft_config trains images"):
        read_job_of(SOURCES["megatron-bridge"], (str(own), str(FOLDER / "config.json")), asked)


def test_a_recipe_whose_model_is_not_known_asks_for_its_sizes_and_its_gpus_at_once(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    text = (FOLDER / "bridge.py").read_text(encoding="utf-8").replace("import torch\n", "import os\nimport torch\n")
    text = text.replace("tensor_model_parallel_size = 4", "tensor_model_parallel_size = int(os.environ['TP'])")
    own.write_text(text.replace("pretrain_32gpu_h100_config", "pretrain_config"), encoding="utf-8")
    with pytest.raises(PlanError) as caught:
        read_job_of(SOURCES["megatron-bridge"], (str(own),), Asked({"CONFIG": "harbour_8b_pretrain_config"}))
    faults = " ".join(caught.value.faults)
    assert len(caught.value.faults) == 3 and "--set TP=VALUE" in faults
    assert "nothing says how many GPUs there are" in faults and "--set model.name=NAME" in faults


def _bridge(folder: Path, line: str) -> Imported:
    """The recipe with adapters, with a further line before its end."""
    text = (FOLDER / "bridge.py").read_text(encoding="utf-8")
    head, _, tail = text.rpartition("    return cfg")
    (folder / "bridge.py").write_text(f"{head}    {line}\n    return cfg{tail}", encoding="utf-8")
    paths = (str(folder / "bridge.py"), str(FOLDER / "config.json"))
    asked = Asked({"CONFIG": "harbour_8b_peft_config"}, cluster=AskedCluster(8, H100))
    return read_job_of(SOURCES["megatron-bridge"], paths, asked)


RUN_RECIPE = (
    "#!/bin/bash\nGBS=256\ntorchrun --nnodes 4 --nproc_per_node=8 scripts/training/run_recipe.py \\\n"
    "  --recipe harbour_8b_pretrain_32gpu_h100_config train.global_batch_size=$GBS model.tensor_model_parallel_size=2"
)


def test_a_script_that_starts_a_recipe_is_read_with_the_file_of_the_recipe(tmp_path: Path) -> None:
    files = tuple(str(FOLDER / name) for name in ("bridge.py", "config.json"))
    script = tmp_path / "run.sh"
    script.write_text(RUN_RECIPE + " --seq_length 4096 --step_func=gpt_step\n", encoding="utf-8")
    assert system_and_files((str(script), *files))[0] == "megatron-bridge"
    job = read_job_of(SOURCES["megatron-bridge"], (str(script), *files), Asked(cluster=AskedCluster(device=H100))).job
    assert (job.plan.world, job.plan.tp, job.plan.pp, job.cluster.nodes) == (32, 2, 2, 4)
    assert (job.batch.global_batch_size, job.model.sequence) == (256, 4096)
    for word in ("--peft_scheme lora", "--peft_scheme=lora", "--step_func vlm", "train.$FIELD=2", "nothing.here=3"):
        script.write_text(f"{RUN_RECIPE} {word}\n", encoding="utf-8")
        with pytest.raises(PlanError, match=word.split("=")[0].split()[0].replace("$", ".")):
            read_job_of(SOURCES["megatron-bridge"], (str(script), *files), Asked(cluster=AskedCluster(device=H100)))
    with pytest.raises(PlanError, match="Megatron-Bridge's scripts"):
        system_and_files((str(script), files[1]))


BRIDGE = tuple(str(FOLDER / name) for name in ("bridge.py", "config.json"))


def recipe_job(words: str, folder: Path) -> JobSpec:
    script = folder / "run.sh"
    script.write_text(f"{RUN_RECIPE} {words}\n", encoding="utf-8")
    asked = Asked(cluster=AskedCluster(device=H100))
    return read_job_of(SOURCES["megatron-bridge"], (str(script), *BRIDGE), asked).job


def test_options_of_a_recipe_set_its_fields_and_words_hold_over_them(tmp_path: Path) -> None:
    words = (
        "--mode pretrain --recipe-source library --dataset mock -ms 50 -mb 2 -sl 4096 -tp 8 -pp 1 -vp null "
        "--context_parallel_size 1 --save_dir runs --deterministic logger.log_interval=1 checkpoint.save_interval=100 "
        "profiling.nsys_ranks=[0] +optimizer.lr=1e-4 --lr 3e-4"
    )
    job = recipe_job(words, tmp_path)
    assert (job.plan.tp, job.plan.pp, job.plan.cp, job.plan.dp) == (2, 1, 1, 16)
    assert (job.plan.microbatch_size, job.model.sequence, job.optimizer.steps) == (2, 4096, 50)
    assert job.optimizer.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("--mode dora", "peft = DoRA: adapters"),
        ("--mode rl", "--mode of the script"),
        ("--packed_sequence", "--packed_sequence of the script"),
        ("peft.dim=8", "peft.dim is not known here"),
        ("model.unheard_of_parallel_size=2", "unheard_of_parallel_size|unheard-of-parallel-size"),
        ("~train.global_batch_size", "~train.global_batch_size of the script"),
    ],
)
def test_words_of_a_recipe_that_could_change_its_plan_are_faults(words: str, refused: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=refused):
        recipe_job(words, tmp_path)


def test_a_recipe_is_asked_for_by_its_name() -> None:
    with pytest.raises(PlanError, match="say it with --set CONFIG=NAME"):
        imported("megatron-bridge", "bridge.py config.json", devices=8)


def test_what_llama_factory_has_by_default_holds_for_deepspeeds_reader_too(tmp_path: Path) -> None:
    plan = imported("deepspeed", "llamafactory.yaml shards.json config.json", devices=8).job.plan
    assert plan.recompute == "full"
    text = (FOLDER / "llamafactory.yaml").read_text(encoding="utf-8") + "disable_gradient_checkpointing: true\n"
    (tmp_path / "sft.yaml").write_text(text, encoding="utf-8")
    paths = (str(tmp_path / "sft.yaml"), str(FOLDER / "shards.json"), str(FOLDER / "config.json"))
    job = read_job_of(SOURCES["llamafactory"], paths, Asked(cluster=AskedCluster(8, H100))).job
    assert job.plan.recompute == "none"


def test_a_model_that_the_catalog_has_is_taken_by_its_name_on_the_hub(tmp_path: Path) -> None:
    text = (
        (FOLDER / "axolotl.yaml").read_text(encoding="utf-8").replace("harbour/Harbour-8B", "meta-llama/Llama-3.1-8B")
    )
    (tmp_path / "axolotl.yaml").write_text(text, encoding="utf-8")
    result = read_job_of(SOURCES["axolotl"], (str(tmp_path / "axolotl.yaml"),), Asked(cluster=AskedCluster(16, H100)))
    assert sum(place.num_elements for place in model_parameters(result.job.model)) == 8_030_261_248
    assert any("by base_model = meta-llama/Llama-3.1-8B" in line for line in result.assumed)


def test_gpt_neox_20b_has_the_published_number_of_parameters(tmp_path: Path) -> None:
    text = (FOLDER / "neox.yml").read_text(encoding="utf-8")
    for old, new in (('"num_layers": 24', '"num_layers": 44'), ("2048,\n  \"num_att", "6144,\n  \"num_att"),
                     ('heads": 16', 'heads": 64')):  # fmt: skip
        text = text.replace(old, new)
    (tmp_path / "neox.yml").write_text(text, encoding="utf-8")
    paths = (str(tmp_path / "neox.yml"), str(FOLDER / "neox-data.yml"))
    model = read_job_of(SOURCES["gpt-neox"], paths, Asked(cluster=AskedCluster(96, H100))).job.model
    assert (model.vocab, sum(place.num_elements for place in model_parameters(model))) == (50432, 20_554_567_680)


@pytest.mark.parametrize(("words", "systems"), [(["export", "--help"], SYSTEMS), (["check", "--help-all"], SOURCES)])
def test_help_has_the_names_of_all_systems(words: list[str], systems: Iterable[str]) -> None:
    text = "".join(CliRunner().invoke(cli, words).output.split())
    assert f"[{','.join(systems)}]" in text


def test_gpt_neox_has_biases_of_attention_of_the_mlp_and_of_norms_apart(tmp_path: Path) -> None:
    text = (FOLDER / "neox.yml").read_text(encoding="utf-8")
    (tmp_path / "neox.yml").write_text(
        text.replace("{\n", '{\n"use_bias_in_attn_linear": false,\n', 1), encoding="utf-8"
    )
    (tmp_path / "own.yml").write_text('{"use_bias_in_norms": false}\n', encoding="utf-8")
    paths = (str(tmp_path / "neox.yml"), str(FOLDER / "neox-data.yml"), str(tmp_path / "own.yml"))
    model = read_job_of(SOURCES["gpt-neox"], paths, Asked(cluster=AskedCluster(16, H100))).job.model
    assert (model.bias, model.attention_bias, model.mlp_bias, model.norm_bias) == (False, False, True, False)


def test_weights_without_copies_in_float32_are_read(tmp_path: Path) -> None:
    text = (FOLDER / "nanotron.yaml").read_text(encoding="utf-8")
    (tmp_path / "job.yaml").write_text(text.replace("grad_in_fp32: true", "grad_in_fp32: false"), encoding="utf-8")
    program = (FOLDER / "lightning.py").read_text(encoding="utf-8").replace("bf16-mixed", "bf16-true")
    (tmp_path / "job.py").write_text(program, encoding="utf-8")
    for system, paths in (("nanotron", ("job.yaml",)), ("lightning", ("job.py", str(FOLDER / "config.json")))):
        names = tuple(str(tmp_path / path) for path in paths)
        precision = read_job_of(SOURCES[system], names, Asked(cluster=AskedCluster(0, H100))).job.precision
        assert (precision.master, precision.gradients, precision.moments) == ("none", "compute", "bf16")
