"""Messages on other systems' files can be said in Chinese, with the numbers of the English texts."""

import json
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from interchange.test_faults import LLAMA, MEGATRON, faults, read
from shardwright.config.asked_cluster import AskedCluster
from shardwright.config.base import PlanError
from shardwright.config.load import load_job
from shardwright.config.phrase import Phrase, catalog_of, in_language
from shardwright.interchange.exported import Exported, Lacking, exported
from shardwright.interchange.foreign_job import read_job_of
from shardwright.interchange.imported import Asked
from shardwright.interchange.known_settings import KNOWN_FILES
from shardwright.interchange.recognised import system_name_of
from shardwright.interchange.system import SOURCES, SYSTEMS
from shardwright.report.imported_text import exported_notes, imported_notes
from support.languages import differing, num_chinese

EXAMPLES = [
    str(path)
    for folder in ("as_people_have", "other_trainers")
    for path in sorted((Path(__file__).parent / folder).iterdir())
    if path.suffix in (".sh", ".yaml", ".yml", ".json", ".toml", ".py") and path.name != "config.json"
]


def messages(path: str) -> list[str]:
    """The messages on a file for 64 devices: settings that are assumed, lost, left out or refused."""
    try:
        system = SOURCES[system_name_of(path, Path(path).read_text(encoding="utf-8"))]
        result = read_job_of(system, (path,), Asked(cluster=AskedCluster(64, "", 8)))
    except PlanError as error:
        return error.faults
    return [*result.assumed, *result.lost, *result.of_data, *result.without_effect]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: Path(path).name)
def test_all_that_is_told_of_a_file_is_phrases_with_the_same_numbers(path: str) -> None:
    texts = messages(path)
    assert texts and not [text for text in texts if not isinstance(text, Phrase)]
    for text in texts:
        chinese = in_language(text, "zh")
        assert num_chinese(chinese) and not differing(text, chinese), (text, chinese)


def test_topics_of_known_settings_have_a_translation() -> None:
    folder = resources.files("shardwright.interchange")
    tables = [tomllib.loads((folder / name).read_text(encoding="utf-8")) for name in KNOWN_FILES]
    lists = ("sections", "programs", "uncounted", "usual", "takes_nothing", "takes_several", "changes")
    topics = {topic for known in tables for system in known.keys() - lists for topic in known[system]}
    assert len(topics) > 20 and not topics - catalog_of("zh").keys()


def test_notes_of_an_import_are_in_the_language_that_is_asked_for() -> None:
    result = read("megatron", run_sh="N=${GPUS:-8}\n" + MEGATRON.replace("node 8", "node $N") + "--decoupled-lr 1.0")
    assert imported_notes(result).splitlines()[0] == "Assumed:"
    notes = imported_notes(result, language="zh")
    assert "假定：\n  没有设置下列变量，所以用它们的默认值：GPUS=8" in notes
    lost = notes.split("原文件里写了，而作业里没有：\n")[1].splitlines()
    assert "  --decoupled-lr 1.0：这里嵌入层和输出头与其他部分用同一个学习率" in lost


def test_names_of_other_systems_in_a_fault_are_so_in_chinese_too() -> None:
    first, *_ = faults("nemo", run_yaml="trainer: {devices: 8}\nmodel: {num_layers: 4}\n")
    assert first == "model.hidden_size is not said, and a model needs it; add it"
    assert in_language(first, "zh") == "没有写 model.hidden_size，而模型需要它；请加上"


def test_a_fault_of_a_config_json_is_told_in_chinese() -> None:
    config = json.dumps(LLAMA | {"num_hidden_layers": 2.5})
    (fault,) = faults("deepspeed", devices=8, ds_json='{"train_batch_size": 8}', config_json=config)
    assert in_language(fault, "zh") == (
        "config.json：num_hidden_layers 是 2.5，而应是小于 2^63 的非负整数；如果不是指它，请给出另一个"
    )


def test_what_a_system_lacks_is_told_without_the_way_out_of_imports() -> None:
    job = load_job("quickstart", ["model.positions=alibi"])
    with pytest.raises(Lacking) as caught:
        exported(SYSTEMS["nanotron"], job)
    chinese = caught.value.in_language("zh")
    assert "nanotron 没有这样的作业：" in chinese and "请换一个 --to" in chinese


def test_notes_of_an_export_are_in_the_language_that_is_asked_for() -> None:
    result = Exported({"run.sh": ""}, ("run.seed", "data.path"), 3e-4, nodes=4)
    notes = "".join(exported_notes(result, SYSTEMS["nemo"], "zh").split())  # lines may end at any space
    assert notes.startswith("NeMo有自己的写法，略去：run.seed、data.path。作业没有写学习率，文件里写的是0.0003；")
    assert "请在4个节点上各启动run.sh，并设好环境变量NODE_RANK（0到3）" in notes
    told = exported_notes(result, SYSTEMS["nemo"])
    assert told.startswith("Left out, for NeMo says it in its own way: run.seed, data.path.")
    assert told.endswith("The data in the files stand for yours.")
    assert "launch JOB --slurm --for megatron" in " ".join(exported_notes(result, SYSTEMS["megatron"]).split())
