"""Adapters: trained as peft trains them, alike on any ranks; frozen weights are values alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.config.adapter import AdapterSpec
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import job_of_fields, make_job
from shardwright.config.model_shape import shape_of
from shardwright.cost.run_goodput import job_checkpoint_bytes
from shardwright.sharding.stage_parameters import num_trained_parameters
from shardwright.train.build import build, job_mesh
from shardwright.train.checkpoint.starting_weights import initial_values, released_weights_of
from shardwright.train.train_step import train_step
from support.adapted_runs import MODULES, check_equals_one_rank, copy_downs
from support.cases import made_up_tokens, small_job

ALL = ("query", "key", "value", "out", "gate", "up", "down")
CPU = torch.device("cpu")


def job_of(
    targets: tuple[str, ...] = ALL, kind: str = "llama", precision: dict[str, Any] | None = None, **plan: Any
) -> JobSpec:
    fields = small_job(kind, batch=4, layers=2, **plan).model_dump()
    fields["model"]["adapter"] = {"rank": 4, "alpha": 8.0, "targets": targets}
    fields["optimizer"] = {"learning_rate": 3e-3, "warmup_steps": 0, "schedule": "constant"}
    return make_job(fields | {"precision": precision or {}})


PLANS: dict[str, dict[str, Any]] = {
    "zero1": {"dp": 2, "zero": 1},
    "zero2": {"dp": 2, "zero": 2, "bucket_mib": 0.01},
    "zero3": {"dp": 2, "zero": 3},
    "tp2": {"tp": 2},
    "sp2": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "zero3 x sp2": {"dp": 2, "zero": 3, "tp": 2, "sequence_parallel": True},
    "cp2, recomputed": {"cp": 2, "recompute": "full"},
    "selective": {"tp": 2, "recompute": "selective"},
    "tied over pp2": {"kind": "llama-tied", "pp": 2},
    "gpt, sp2": {"kind": "gpt", "tp": 2, "sequence_parallel": True},
    "offloaded": {"dp": 2, "zero": 3, "offload_optimizer": 0.5, "offload_parameters": True},
}


@pytest.mark.sampled(5)
@pytest.mark.processes
@pytest.mark.parametrize("targets", [ALL, ("query", "value")], ids=["all", "query and value"])
@pytest.mark.parametrize("name", PLANS)
def test_ranks_train_as_one_rank_does_and_hold_and_send_what_is_predicted(name: str, targets: tuple[str, ...]) -> None:
    check_equals_one_rank(job_of(targets, **PLANS[name]), job_of(targets, PLANS[name].get("kind", "llama")))


SETTINGS = {"learning_rate": 3e-3, "warmup_steps": 0, "schedule": "constant", "clip_grad_norm": 0.5, "epsilon": 1e-8}


def test_ten_steps_are_those_of_peft(tmp_path: Path) -> None:
    """Over a released model in float32 whose adapters begin alike: losses to 1e-6."""
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds, and most tests do without

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=61, max_position_embeddings=16))
    llama.save_pretrained(tmp_path)
    model = {"weights": str(tmp_path), "sequence": 16, "layers": 2, "hidden": 32, "heads": 8, "kv_heads": 4, "ffn": 48}
    model |= {"vocab": 61, "norm_epsilon": 1e-6, "longest_sequence": 16, "adapter": {"rank": 4, "alpha": 8.0}}
    job = make_job({"model": model, "batch": {"global_batch_size": 4}, "optimizer": SETTINGS})
    replica = build(job, job_mesh(job, 0, CPU), initial_values(job, released_weights_of(job)))
    targets = [module.split(".")[1] for modules in MODULES.values() for module in modules]
    adapted = peft.get_peft_model(llama, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    copy_downs(replica, dict(adapted.named_parameters()))
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    betas = (job.optimizer.beta1, job.optimizer.beta2)
    plain = torch.optim.AdamW(trained, lr=3e-3, betas=betas, eps=1e-8, weight_decay=job.optimizer.weight_decay)
    for step in range(10):
        tokens = made_up_tokens(job, step)
        loss = torch.nn.functional.cross_entropy(adapted(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
        plain.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        plain.step()
        assert train_step(replica, step, tokens).loss == pytest.approx(loss.item(), abs=1e-6)


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"model": {"adapter": {"rank": 0, "alpha": 8.0}}}, "its rank 0 means no adapters"),
    ({"model": {"adapter": {"rank": 4, "targets": []}}}, "names no map"),
    ({"model": {"adapter": {"rank": 4, "targets": ["up", "up"]}}}, "names a map twice"),
    ({"model": {"adapter": {"rank": 4, "targets": ["gate"]}, "gated_mlp": False}}, "names gate alone"),
    ({"model": {"adapter": {"rank": 4, "weights": "some"}}}, "model.weights names none"),
    ({"model": {"mtp_layers": 1}}, "layers for further tokens have no adapters here, and model.mtp_layers"),
    ({"model": {"moe": {"experts": 4}, "adapter": {"rank": 4, "targets": ["up"]}}}, "those of experts are expert_gate"),
    ({"model": {"moe": {"experts": 4, "bias_update": 0.1, "gate": "sigmoid"}}}, "moves the routers' biases"),
    ({"precision": {"float8": "blockwise"}}, "precision.float8 'blockwise' is for products whose weights are trained"),
    ({"plan": {"compress": "powersgd"}}, "plan.compress 'powersgd' is for gradients of large matrices"),
    ({"optimizer": {"name": "muon"}}, "optimizer.name 'muon' updates whole matrices"),
    ({"optimizer": {"name": "adafactor"}}, "optimizer.name 'adafactor' updates whole matrices"),
    ({"plan": {"schedule": "pipedream", "pp": 2}, "optimizer": {"clip_grad_norm": 0.0}}, "versions of all weights"),
    ({"cluster": {"software": "megatron-core"}}, "adapters is not described here"),
)


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_adapters_can_not_have_is_refused_with_a_way_out(number: int) -> None:
    fields, words = REFUSED[number]
    with pytest.raises(PlanError) as caught:
        make_job(fields | {"model": {"adapter": {"rank": 4}} | fields.get("model", {})})
    (fault,) = [fault for fault in caught.value.faults if words in fault]
    assert "; " in fault


def test_frozen_elements_take_four_operations_a_token_and_those_of_adapters_six() -> None:
    job = job_of_fields({"model": {"name": "llama3-8b", "adapter": {"rank": 16}}}, [], "an adapted model")
    adapted, whole = shape_of(job.model), shape_of(job.model.model_copy(update={"adapter": AdapterSpec()}))
    assert adapted.trained_by_adapters == num_trained_parameters(job.model) == 41_943_040
    by_matrices = whole.matrix_parameters
    assert job_checkpoint_bytes(job) == 12 * 41_943_040
    assert whole.flops_per_token() - adapted.flops_per_token() == 2 * by_matrices - 6 * 41_943_040
