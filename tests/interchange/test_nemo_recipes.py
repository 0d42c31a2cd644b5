"""Recipes of NeMo 2, with the command that names and changes them."""

from pathlib import Path

import pytest

from shardwright.api.imported_job import system_and_files
from shardwright.config.adapter import TARGETS
from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError
from shardwright.interchange.foreign_job import read_job_of
from shardwright.interchange.imported import Asked, Imported
from shardwright.interchange.system import SOURCES

RECIPE = str(Path(__file__).parent / "other_trainers" / "nemo_recipe.py")


def started(words: str, folder: Path, *files: str) -> Imported:
    script = folder / "run.sh"
    script.write_text(f"#!/bin/bash\n{words}\n", encoding="utf-8")
    paths = (str(script), *(files or (RECIPE,)))
    assert system_and_files(paths)[0] == "nemo-recipes"
    return read_job_of(SOURCES["nemo-recipes"], paths, Asked(cluster=AskedCluster(device="h100-sxm")))


def test_a_factory_is_read_with_its_arguments_and_the_words_that_change_it(tmp_path: Path) -> None:
    plain = started("nemo llm pretrain --factory harbour_8b", tmp_path).job
    assert (plain.model.layers, plain.model.hidden, plain.model.sequence) == (32, 4096, 8192)
    assert (plain.plan.tp, plain.plan.cp, plain.plan.dp, plain.batch.global_batch_size) == (2, 2, 2, 512)
    assert plain.plan.sequence_parallel and plain.plan.zero == 1
    assert (plain.optimizer.learning_rate, plain.optimizer.steps, plain.optimizer.warmup_steps) == (3e-4, 5000, 2000)
    assert (plain.precision.compute, plain.cluster.nodes) == ("bf16", 1)
    words = (
        "nemo llm pretrain --yes --factory \"harbour_8b(num_nodes=4, name='mine')\" trainer.max_steps=50 "
        "trainer.strategy.tensor_model_parallel_size=4 trainer.strategy.context_parallel_size=1 "
        "data.global_batch_size=64 data.seq_length=4096 optim.config.lr=1e-4 log.ckpt.save_top_k=1"
    )
    changed = started(words, tmp_path).job
    assert (changed.plan.tp, changed.plan.cp, changed.plan.dp, changed.cluster.nodes) == (4, 1, 8, 4)
    assert (changed.batch.global_batch_size, changed.model.sequence, changed.optimizer.steps) == (64, 4096, 50)
    assert changed.optimizer.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("pretrain --factory harbour_70b", "the recipe harbour_70b is in no file here"),
        ("finetune --factory harbour_8b peft.exclude_modules=[linear_fc1]", "peft.exclude_modules = linear_fc1"),
        ("pretrain --factory harbour_8b trainer.accumulate_grad_batches=4", "accumulate_grad_batches = 4 is not"),
        ("pretrain --factory harbour_8b model.config.num_layers=4", "model.config.num_layers is not counted"),
        ("pretrain --factory harbour_8b trainer.strategy.fsdp=megatron", "strategy.fsdp = megatron is not"),
        ("pretrain --factory harbour_8b model=llama3_70b", "model=llama3_70b of the script"),
        ("pretrain --factory harbour_8b data.global_batch_size=$BATCH", "data.global_batch_size="),
        ("pretrain --factory 'harbour_8b(2)'", "names no recipe that is known"),
    ],
)
def test_what_could_change_a_recipe_and_is_not_known_is_refused(words: str, refused: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        started(f"nemo llm {words}", tmp_path)
    assert any(refused in fault for fault in caught.value.faults), caught.value.faults


def test_adapters_of_a_recipe_have_its_rank_and_its_maps(tmp_path: Path) -> None:
    adapter = started("nemo llm finetune --factory harbour_8b", tmp_path).job.model.adapter
    assert (adapter.rank, adapter.alpha, list(adapter.targets)) == (32, 32, list(TARGETS))
    words = "peft.dim=8 peft.alpha=16 peft.target_modules=[linear_qkv]"
    adapter = started(f"nemo llm finetune --factory harbour_8b {words}", tmp_path).job.model.adapter
    assert (adapter.rank, adapter.alpha, list(adapter.targets)) == (8, 16, ["query", "key", "value"])
    other = tmp_path / "other.py"
    other.write_text(Path(RECIPE).read_text(encoding="utf-8").replace("LoRA", "DoRA"), encoding="utf-8")
    with pytest.raises(PlanError, match="peft = DoRA: adapters"):
        started("nemo llm finetune --factory harbour_8b", tmp_path, str(other))


def test_a_value_of_a_recipe_that_is_not_known_is_a_fault_that_a_field_settles(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    text = Path(RECIPE).read_text(encoding="utf-8")
    own.write_text(text.replace("global_batch_size=512", "global_batch_size=found_out()"), encoding="utf-8")
    command = "nemo llm pretrain --factory harbour_8b"
    with pytest.raises(PlanError) as caught:
        started(command, tmp_path, str(own))
    (fault,) = caught.value.faults
    assert "global_batch_size = found_out() is not known here; say what it is: --set global_batch_size=VALUE" in fault
    script = tmp_path / "run.sh"
    asked = Asked({"global_batch_size": "128"}, cluster=AskedCluster(device="h100-sxm"))
    job = read_job_of(SOURCES["nemo-recipes"], (str(script), str(own)), asked).job
    assert job.batch.global_batch_size == 128


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (
            "trainer=trainer(num",
            "trainer=elsewhere.made(num",
            "trainer is what elsewhere.made",
        ),
        ("run.Config(LlamaModel", "run.Config(MambaModel", "state spaces (Mamba) by its name"),
        ("run.Config(LlamaModel", "run.Config(LlamaEmbeddingModel", "trains retrieval by its name"),
        ("        strategy=strategy,", "        strategy='ddp',", "trainer.strategy = ddp is not counted here"),
        ("ckpt_async_save=True", "own_layers_per_stage=3", "--set own_layers_per_stage=ignore"),
        ("seq_length=8192,", "seq_length=8192, seq_length_dec=128,", "seq_length_dec = 128"),
        ("plugins=bf16_mixed(),", "precision='12-mixed',", "plugins = 12-mixed is not known here"),
    ],
)
def test_parts_of_a_recipe_are_read_or_faults(tmp_path: Path, before: str, after: str, words: str) -> None:
    own = tmp_path / "own.py"
    text = Path(RECIPE).read_text(encoding="utf-8")
    assert before in text
    own.write_text(text.replace(before, after), encoding="utf-8")
    with pytest.raises(PlanError) as caught:
        started("nemo llm pretrain --factory harbour_8b", tmp_path, str(own))
    assert any(words in fault for fault in caught.value.faults), caught.value.faults


def test_classes_of_adapters_by_their_words_and_fields_that_change_no_plan_are_read(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    text = (
        Path(RECIPE).read_text(encoding="utf-8").replace("run.Config(LoRA)", "run.Config(PEFT_STR2CLS[kind.lower()])")
    )
    text = text.replace("def finetune_recipe(num_nodes=1):", "def finetune_recipe(num_nodes=1, kind='LoRA'):")
    more = "    recipe.model.config.cross_entropy_loss_fusion = False\n    recipe.peft.dim = 8\n    return recipe\n"
    own.write_text(text.replace("    return recipe\n", more), encoding="utf-8")
    answer = started("nemo llm finetune --factory harbour_8b", tmp_path, str(own))
    assert answer.job.model.adapter.rank == 8
    with pytest.raises(PlanError, match="peft = dora: adapters"):
        started("nemo llm finetune --factory \"harbour_8b(kind='dora')\"", tmp_path, str(own))


def test_each_of_many_calls_in_a_row_is_followed_once(tmp_path: Path) -> None:
    """Twenty would be a million expressions if what each is called on were followed twice."""
    own = tmp_path / "own.py"
    text = Path(RECIPE).read_text(encoding="utf-8")
    first = "def finetune_recipe(num_nodes=1):\n"
    assert first in text
    own.write_text(text.replace(first, f"{first}    label = tracker(){'.child()' * 20}\n"), encoding="utf-8")
    assert started("nemo llm finetune --factory harbour_8b", tmp_path, str(own)).job.model.is_adapted


def test_a_recipe_that_begins_from_one_of_the_same_name_asks_for_its_file(tmp_path: Path) -> None:
    longer = tmp_path / "longer.py"
    longer.write_text(
        "import nemo_run as run\nfrom nemo.collections.llm.api import pretrain\n"
        "from nemo.collections.llm.recipes import nemo_recipe\n"
        '@run.cli.factory(target=pretrain, name="longer")\ndef pretrain_recipe(num_nodes=2):\n'
        "    recipe = nemo_recipe.pretrain_recipe(num_nodes=num_nodes)\n    recipe.data.seq_length = 16384\n"
        "    return recipe\n",
        encoding="utf-8",
    )
    with pytest.raises(PlanError, match="name the files of what it calls"):
        started("nemo llm pretrain --factory longer", tmp_path, str(longer))
    job = started("nemo llm pretrain --factory longer executor=local", tmp_path, str(longer), RECIPE).job
    assert (job.model.sequence, job.cluster.nodes) == (16384, 2)


def test_a_recipe_alone_is_named(tmp_path: Path) -> None:
    asked = Asked({"CONFIG": "pretrain_recipe"}, cluster=AskedCluster(16, "h100-sxm"))
    assert system_and_files((RECIPE,))[0] == "nemo-recipes"
    assert read_job_of(SOURCES["nemo-recipes"], (RECIPE,), asked).job.plan.dp == 4
    with pytest.raises(PlanError, match="say it with --set CONFIG=NAME"):
        read_job_of(SOURCES["nemo-recipes"], (RECIPE,), Asked(cluster=AskedCluster(16, "h100-sxm")))


def test_a_recipe_of_a_library_is_asked_for(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "import nemo_run as run\nfrom nemo.collections import llm\ndef mine_recipe():\n"
        "    recipe = llm.llama3_8b.pretrain_recipe(num_nodes=2)\n    recipe.trainer.max_steps = 5\n"
        "    return recipe\n",
        encoding="utf-8",
    )
    with pytest.raises(PlanError, match="name the files of what it calls"):
        read_job_of(SOURCES["nemo-recipes"], (str(own),), Asked(cluster=AskedCluster(8, "h100-sxm")))
    files = (str(own), RECIPE)
    own.write_text(own.read_text().replace("llama3_8b.", "nemo_recipe."), encoding="utf-8")
    asked = Asked({"CONFIG": "mine_recipe"}, cluster=AskedCluster(device="h100-sxm"))
    job = read_job_of(SOURCES["nemo-recipes"], files, asked).job
    assert (job.optimizer.steps, job.cluster.nodes) == (5, 2)
    (tmp_path / "run.sh").write_text("nemo llm pretrain --factory llama3_8b\n", encoding="utf-8")
    with pytest.raises(PlanError, match="NeMo 2 without the file"):
        system_and_files((str(tmp_path / "run.sh"),))


PERFORMANCE = """
import nemo_run as run
from nemo.collections.llm.recipes import llama3_70b
from scripts.performance.helpers import set_primary_perf_configs

def recipe(profile=False):
    pretrain = llama3_70b.pretrain_recipe(performance_mode=True)
    nodes, gpus = 8, 8
    pretrain = set_primary_perf_configs(
        pretrain, "pre_train", num_nodes=nodes, num_gpus_per_node=gpus, mbs=1, gbs=128, max_steps=30, tp_size=4,
        pp_size=4, cp_size=2, vp_size=5, ep_size=1, compute_dtype="fp8", fp8_recipe="cs",
    )
    pretrain.model.config.seq_length = 8192
    pretrain.data.seq_length = 8192
    return pretrain
"""


def test_what_performance_scripts_set_is_read(tmp_path: Path) -> None:
    """A recipe of the library stands for its model; all that a plan is made of is set beside it."""
    own = tmp_path / "own.py"
    own.write_text(PERFORMANCE, encoding="utf-8")
    asked = Asked({"CONFIG": "recipe"}, cluster=AskedCluster(device="h100-sxm"))
    answer = read_job_of(SOURCES["nemo-recipes"], (str(own),), asked)
    job = answer.job
    assert (job.model.name, job.model.sequence, job.batch.global_batch_size) == ("llama3-70b", 8192, 128)
    plan = job.plan
    assert (plan.tp, plan.pp, plan.cp, plan.virtual_stages, plan.dp, plan.recompute) == (4, 4, 2, 5, 2, "none")
    assert (job.precision.float8, job.precision.gradients) == ("tensorwise", "compute")
    assert any("llama3_70b is NeMo's own" in note for note in answer.assumed)
    text = PERFORMANCE.replace('compute_dtype="fp8", fp8_recipe="cs"', "recompute_layers=2")
    own.write_text(text, encoding="utf-8")
    recomputed = read_job_of(SOURCES["nemo-recipes"], (str(own),), asked).job
    assert (recomputed.precision.float8, recomputed.plan.recompute) == ("none", "layers")
    own.write_text(PERFORMANCE.replace("set_primary_perf_configs", "set_all"), encoding="utf-8")
    with pytest.raises(PlanError, match="name the files of what it calls"):  # what it changes is not known
        read_job_of(SOURCES["nemo-recipes"], (str(own),), asked)
