"""The data that files of other systems name comes along where it lies on this machine, else it is said why not."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from interchange.test_defaults import NEMO
from interchange.test_faults import LLAMA, MEGATRON, read
from shardwright.cli.main import cli
from shardwright.config.load import load_job


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("data/one", "data/two"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        for end in (".bin", ".idx"):
            (tmp_path / f"{name}{end}").write_bytes(b"x")
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_text("{}")
    (tmp_path / "corpus").mkdir()
    return tmp_path


def test_token_files_of_a_script_are_named_from_the_folder_of_the_job(folder: Path) -> None:
    (folder / "jobs").mkdir()
    (folder / "run.sh").write_text(MEGATRON + "--data-path data/one --tokenizer-model tok")
    job = folder / "jobs" / "job.toml"
    done = CliRunner().invoke(cli, ["import", "megatron", str(folder / "run.sh"), "--toml", str(job)])
    assert done.exit_code == 0 and "not carried" not in done.stderr
    (folder / "run.sh").write_text(MEGATRON + "--data-path gone")
    answer = CliRunner().invoke(cli, ["import", "megatron", str(folder / "run.sh"), "--toml", str(folder / "x.toml")])
    assert "The data is not carried: --data-path gone: gone is not on this machine" in answer.stderr
    text = job.read_text()
    assert 'path = "../data/one"' in text and 'tokenizer = "../tok"' in text and str(folder) not in text
    assert load_job(str(job)).data.tokenizer == str(folder / "jobs" / ".." / "tok")


def test_weighted_prefixes_are_sources(folder: Path) -> None:
    result = read("megatron", run_sh=MEGATRON + f"--data-path 0.7 {folder}/data/one 0.3 {folder}/data/two")
    assert [(one.weight, Path(one.path).name) for one in result.job.data.sources] == [(0.7, "one"), (0.3, "two")]
    assert result.of_data == ("the tokenizer is not carried: nothing names one (--set data.tokenizer=PATH)",)
    assert "data" not in result.without_effect


@pytest.mark.parametrize(
    ("words", "why"),
    [("/nowhere/at/all", "/nowhere/at/all is not on this machine"), ("$DATA", "nobody has set that"),
     ("a b c", "no pairs"), ("x /dev/zero", "no pairs"), ("0.5 /nowhere 0.5 data/two", "/nowhere is not on")],
)  # fmt: skip
def test_data_that_is_not_there_is_told(words: str, why: str) -> None:
    result = read("megatron", run_sh=MEGATRON + f"--data-path {words}")
    (remark,) = result.of_data
    assert remark.startswith("the data is not carried: --data-path") and why in remark
    assert result.job.data.path == "python-stdlib"


def test_prefixes_of_nemo_and_texts_of_torchtitan_come_along(folder: Path) -> None:
    result = read("nemo", conf_yaml=NEMO + f"  data: {{data_prefix: [1.0, {folder}/data/one]}}\n")
    assert result.job.data.path == str(folder / "data" / "one")
    titan = f'[model]\nname = "llama3"\nflavor = "8B"\nhf_assets_path = "{folder}/tok"\n'
    titan += f'[training]\ndataset = "c4_test"\ndataset_path = "{folder}/corpus"\n'
    data = read("torchtitan", devices=8, job_toml=titan).job.data
    assert (data.path, data.tokenizer) == (str(folder / "corpus"), str(folder / "tok"))


def test_a_name_on_the_hub_is_told() -> None:
    script = "torchrun --nproc_per_node 2 train.py --dataset_name wikitext --max_steps 3 --learning_rate 1e-3"
    result = read("accelerate", run_sh=script, config_json=json.dumps(LLAMA))
    assert any("--dataset_name" in line for line in result.of_data)


def test_what_is_set_beside_the_files_needs_no_word() -> None:
    assert read("megatron", "data.path=corpus", run_sh=MEGATRON + "--data-path /nowhere").of_data == ()
