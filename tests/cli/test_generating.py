"""Text of released weights and of a run's is what transformers writes with them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from shardwright.cli.generating import _WeightsSource, positions_for
from shardwright.cli.main import cli
from shardwright.config.base import PlanError
from shardwright.config.load import make_job
from shardwright.train.build import job_mesh
from support import released_models
from support.brought_folder import bring_model
from train.test_released_models import exported, job_of, trained_and_saved

TOKENS = 6
LONGROPE = {"kind": "longrope", "factor": 2.0, "short_factors": [1.0] * 8, "long_factors": [2.0] * 8}


def written(*words: str) -> str:
    run = CliRunner().invoke(cli, ["generate", *words, "--tokens", str(TOKENS), "--temperature", "0", "--json"])
    assert run.exit_code == 0, run.output
    return json.loads(run.stdout)["text"]


def likeliest(folder: Path) -> str:
    """The text that transformers adds to "def ", the likeliest token each time."""
    from transformers import AutoModelForCausalLM

    model, ids = AutoModelForCausalLM.from_pretrained(folder), list(b"def ")
    with torch.no_grad():
        for _ in range(TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return bytes(ids).decode(errors="replace")


@pytest.mark.processes
def test_text_of_a_folder_and_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, keys = released_models.RELEASED["qwen2"]
    monkeypatch.setitem(released_models.RELEASED, "bytes", (family, keys | {"vocab_size": 256}))
    released_models.save_released("bytes", tmp_path / "in")
    in_bytes = ("--set", "data.tokenizer=bytes")
    assert written(str(tmp_path / "in"), *in_bytes, "--set", "plan.tp=2") == likeliest(tmp_path / "in")
    job = job_of(tmp_path / "in")
    trained_and_saved(job_mesh(job, 0, torch.device("cpu")), job, tmp_path / "run")
    assert written(str(tmp_path / "run"), "--set", "plan.pp=2") == likeliest(exported(tmp_path / "run"))
    told = CliRunner().invoke(cli, ["generate", str(tmp_path / "run"), "--tokens", "1"]).stderr
    assert "beginning with the weights of" in told and "step-" in told  # an older one would be named, too


@pytest.mark.processes
def test_adapters_write_beside_the_random_weights_that_they_were_trained_beside(tmp_path: Path) -> None:
    model = {"layers": 1, "hidden": 64, "heads": 4, "ffn": 128, "sequence": 16, "adapter": {"rank": 2, "base": "nf4"}}
    job = make_job({"model": model, "run": {"seed": 7}, "batch": {"global_batch_size": 2}})
    trained_and_saved(job_mesh(job, 0, torch.device("cpu")), job, tmp_path / "run")
    assert written(str(tmp_path / "run"), "--seed", "3").startswith("def ")


@pytest.mark.processes
def test_a_text_ends_where_the_folder_says(tmp_path: Path) -> None:
    folder = bring_model(tmp_path)
    whole = generated(folder, "--prompt", "12?", "--chat")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(264)]}))
    assert (whole["num_tokens"], whole["has_ended"]) == (TOKENS, False)
    assert "<|im_start|>" not in whole["text"][:4], "an answer is shown without the chat before it"
    assert generated(folder, "--prompt", "12?", "--chat") == {"text": "", "num_tokens": 0, "has_ended": True}
    assert generated(folder, "--prompt", "12?") == {"text": "12?", "num_tokens": 0, "has_ended": True}


def generated(folder: Path, *words: str) -> dict[str, Any]:
    given = ["generate", str(folder), *words, "--tokens", str(TOKENS), "--temperature", "0", "--json"]
    run = CliRunner().invoke(cli, given)
    assert run.exit_code == 0, run.output
    return json.loads(run.stdout)


def test_a_chat_without_a_word_of_the_user_is_refused() -> None:
    run = CliRunner().invoke(cli, ["generate", "anything", "--chat"])
    assert run.exit_code == 2
    assert '--prompt "..."' in run.output


def test_a_chat_takes_a_template_that_the_weights_were_not_trained_with() -> None:
    data = {"path": "tokens.bin", "format": "tokens", "tokenizer": "bytes"}
    source = _WeightsSource("runs/x", {"model": {"name": "tiny-llama"}, "data": data}, "")
    template = ["data.chat_template=chatml.jinja"]
    with pytest.raises(PlanError, match=r"set data\.chats to true"):
        source.job(template)
    assert source.for_chat().job(template).data.chat_template.endswith("chatml.jinja")


@pytest.mark.parametrize(
    ("model", "num_tokens", "plan", "sequence"),
    [
        ({}, 70, {}, 80),
        ({}, 70, {"tp": 2, "cp": 2}, 128),
        ({}, 5000, {}, 512),
        ({"positions": "learned"}, 70, {}, 512),
        ({"rotary_scaling": LONGROPE | {"trained_sequence": 256}}, 70, {}, 512),
        ({"rotary_scaling": LONGROPE | {"trained_sequence": 512}}, 70, {}, 80),
    ],
)
def test_as_few_positions_as_change_nothing(
    model: dict[str, Any], num_tokens: int, plan: dict[str, Any], sequence: int
) -> None:
    fields = {"model": {"hidden": 64, "heads": 4, "sequence": 512} | model, "plan": plan}
    assert positions_for(make_job(fields), num_tokens) == sequence
