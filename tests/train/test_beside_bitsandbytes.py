"""QLoRA beside peft, over bases that bitsandbytes holds in NF4. `make interchange` installs both."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.config.load import job_of_fields
from shardwright.train.build import build, job_mesh
from shardwright.train.checkpoint.kept import manifest_of
from shardwright.train.checkpoint.released_export import export_released
from shardwright.train.checkpoint.starting_weights import initial_values, released_weights_of
from shardwright.train.checkpoint.storage import open_storage
from shardwright.train.checkpoint.writing import CheckpointWriter
from shardwright.train.train_step import train_step
from support.adapted_runs import MODULES, copy_downs
from support.cases import made_up_tokens

CPU, STEPS = torch.device("cpu"), 10
SETTINGS = {"learning_rate": 3e-3, "warmup_steps": 0, "schedule": "constant", "clip_grad_norm": 0.5, "epsilon": 1e-8}
# bitsandbytes groups scales across rows and subtracts their mean, so scales in 8 bits agree to their own rounding: one
# part in 256 of a level between two of them.
LOSSES_WITHIN = {False: 1e-5, True: 1e-3}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with a small Llama in float32."""
    pytest.importorskip("bitsandbytes", reason="make interchange installs it")
    pytest.importorskip("peft", reason="make interchange installs it")
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds, and most tests do without

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=61, max_position_embeddings=16)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def job_of(base: Path, is_double: bool) -> JobSpec:
    adapter = {"rank": 4, "alpha": 8.0, "base": "nf4", "double_quantization": is_double}
    model = {"weights": str(base), "sequence": 16, "adapter": adapter}
    fields = {"model": model, "batch": {"global_batch_size": 4}, "optimizer": SETTINGS}
    return job_of_fields(fields, [], "a job beside NF4")


def in_nf4(base: Path, is_double: bool) -> Any:
    """The model of a folder as transformers and bitsandbytes hold it in NF4."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=is_double,
    )
    return AutoModelForCausalLM.from_pretrained(base, quantization_config=config, dtype=torch.float32, device_map="cpu")


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("is_double", [False, True], ids=["plain", "double"])
def test_ten_steps_are_those_of_peft_and_it_opens_what_is_exported(base: Path, is_double: bool) -> None:
    import peft

    job = job_of(base, is_double)
    replica = build(job, job_mesh(job, 0, CPU), initial_values(job, released_weights_of(job)))
    targets = [module.split(".")[1] for modules in MODULES.values() for module in modules]
    adapted = peft.get_peft_model(in_nf4(base, is_double), peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    adapted.train()  # what only predicts computes in bf16 on a CPU
    copy_downs(replica, dict(adapted.named_parameters()))
    parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    betas = (job.optimizer.beta1, job.optimizer.beta2)
    plain = torch.optim.AdamW(parameters, lr=3e-3, betas=betas, eps=1e-8, weight_decay=job.optimizer.weight_decay)
    differences = []
    for step in range(STEPS):
        tokens = made_up_tokens(job, step)
        loss = loss_of(adapted, tokens)
        plain.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        plain.step()
        differences.append(abs(train_step(replica, step, tokens).loss - loss.item()))
    print(f"greatest difference of a loss: {max(differences):.1e}")
    assert max(differences) < LOSSES_WITHIN[is_double]
    writer = CheckpointWriter(job, replica, job_mesh(job, 0, CPU), base.parent)
    writer.save(STEPS, STEPS * 4, 0, {})
    writer.wait()
    storage = open_storage(str(base.parent / "checkpoints"))
    export_released(storage, manifest_of(storage, STEPS), base.parent / "out", file_bytes=2**30)
    opened = peft.PeftModel.from_pretrained(in_nf4(base, is_double), base.parent / "out").train()
    tokens = made_up_tokens(job, STEPS)
    difference = abs(loss_of(opened, tokens).item() - train_step(replica, STEPS, tokens).loss)
    print(f"loss of what is exported: {difference:.1e} from it")
    assert difference < LOSSES_WITHIN[is_double]
