"""Adapters beside experts and in them: trained as peft trains them, alike on any ranks; frozen experts have values
alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import job_of_fields, make_job
from shardwright.config.model_shape import shape_of
from shardwright.sharding.hugging_face.adapter_layout import adapter_layout, target_modules
from shardwright.sharding.stage_parameters import num_trained_parameters
from shardwright.train.build import Replica, build, job_mesh
from shardwright.train.checkpoint.kept import manifest_of
from shardwright.train.checkpoint.released_export import export_released
from shardwright.train.checkpoint.starting_weights import initial_values, released_weights_of
from shardwright.train.checkpoint.storage import open_storage
from shardwright.train.checkpoint.writing import CheckpointWriter
from shardwright.train.train_step import train_step
from support.adapted_runs import check_equals_one_rank
from support.cases import made_up_tokens, small_job
from support.going_on import go_on, save_and_go_on
from support.ranks import run_on_mesh

CPU = torch.device("cpu")
ATTENTION = ("query", "key", "value", "out")
BESIDE = (*ATTENTION, "gate", "up", "down")  # of shared experts, where there are some
IN_EXPERTS = (*BESIDE, "expert_gate", "expert_up", "expert_down")


def job_of(kind: str, targets: tuple[str, ...], base: str = "compute", **plan: Any) -> JobSpec:
    fields = small_job(kind, batch=4, layers=2, **plan).model_dump()
    fields["model"]["adapter"] = {"rank": 4, "alpha": 8.0, "targets": targets, "base": base}
    if base == "nf4":  # rows of whole blocks, also on two ranks
        fields["model"] |= {"hidden": 64, "head_dim": 16, "ffn": 128}
        fields["model"]["moe"] |= {"ffn": 128}
        fields["model"]["moe"] |= {"shared_ffn": 128} if fields["model"]["moe"]["shared_experts"] else {}
    fields["optimizer"] = {"learning_rate": 3e-3, "warmup_steps": 0, "schedule": "constant"}
    return make_job(fields)


PLANS: dict[str, dict[str, Any]] = {
    "zero1": {"dp": 2, "zero": 1},
    "zero2": {"dp": 2, "zero": 2, "bucket_mib": 0.01},
    "zero3": {"dp": 2, "zero": 3},
    "ep2": {"dp": 2, "ep": 2, "zero": 1},
    "tp2": {"tp": 2},
    "sp2": {"tp": 2, "sequence_parallel": True},
    "ep2 within sp2": {"tp": 2, "sequence_parallel": True, "expert_tp": 1, "ep": 2},
    "pp2": {"pp": 2},
    "zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "zero3 x ep2, recomputed": {"dp": 4, "ep": 2, "zero": 3, "recompute": "full"},
    "operators again": {"tp": 2, "recompute": "selective", "recompute_operators": ["up", "activation"]},
}


@pytest.mark.sampled(6)
@pytest.mark.processes
@pytest.mark.parametrize("targets", [BESIDE, IN_EXPERTS], ids=["beside experts", "in experts"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen-moe"])
@pytest.mark.parametrize("name", PLANS)
def test_ranks_train_as_one_rank_does_and_hold_and_send_what_is_predicted(
    name: str, kind: str, targets: tuple[str, ...]
) -> None:
    check_equals_one_rank(job_of(kind, targets, **PLANS[name]), job_of(kind, targets))


@pytest.mark.sampled(3)
@pytest.mark.processes
@pytest.mark.parametrize("kind", ["mixtral", "qwen-moe", "llama4-moe"])
@pytest.mark.parametrize("name", ["zero3", "ep2", "tp2", "zero3 x ep2, recomputed"])
def test_frozen_experts_in_nf4_train_as_one_rank_does(name: str, kind: str) -> None:
    check_equals_one_rank(job_of(kind, IN_EXPERTS, "nf4", **PLANS[name]), job_of(kind, IN_EXPERTS, "nf4"))


@pytest.mark.processes
def test_a_run_goes_on_under_another_plan(tmp_path: Path) -> None:
    """A checkpoint has the adapters alone, those of experts too."""
    before, after = job_of("qwen-moe", IN_EXPERTS, dp=2, ep=2, zero=3), job_of("qwen-moe", IN_EXPERTS, tp=2)
    (losses, boxes), _ = run_on_mesh(before, save_and_go_on, before, tmp_path)
    assert all(".adapter." in name or name.startswith("router.") for name in boxes)  # a router's shares of choices
    assert any(".experts.adapter." in name for name in boxes)
    for went_on, _ in run_on_mesh(after, go_on, after, tmp_path):
        assert went_on == pytest.approx(losses, rel=2e-6)


def test_elements_of_adapters_and_of_those_that_compute_a_token() -> None:
    fields = {"model": {"name": "qwen3-30b-a3b", "adapter": {"rank": 16, "targets": [*IN_EXPERTS]}}}
    job = job_of_fields(fields, [], "an adapted model")
    attention = 16 * (3 * 2048 + 4096 + 2 * 512 + 4096 + 2048)  # A of three maps, of out, and their Bs
    of_expert = 16 * (2 * (2048 + 768) + (768 + 2048))
    assert num_trained_parameters(job.model) == 48 * (attention + 128 * of_expert)
    assert shape_of(job.model).trained_by_adapters == 48 * (attention + 8 * of_expert)


class Expert(nn.Module):
    """One expert of Mixtral with a linear map for each matrix, as transformers had them before its version 5."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        (width, hidden), inner = gate_up.shape, down.shape[1]
        self.w1, self.w3 = (nn.Linear(hidden, width // 2, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, hidden, bias=False)
        for linear, values in ((self.w1, gate_up[:inner]), (self.w3, gate_up[inner:]), (self.w2, down)):
            linear.weight.data.copy_(values)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(silu(self.w1(x)) * self.w3(x))
        return y


class Mixture(nn.Module):
    """The mixture of a layer of Mixtral over such experts, with the gate and the weights of transformers' own."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        own: Any = block
        self.top_k, self.gate = own.gate.top_k, nn.Linear(own.gate.hidden_dim, own.gate.num_experts, bias=False)
        self.gate.weight.data.copy_(own.gate.weight)
        pairs = zip(own.experts.gate_up_proj, own.experts.down_proj, strict=True)
        self.experts = nn.ModuleList(Expert(gate_up.detach(), down.detach()) for gate_up, down in pairs)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).topk(self.top_k)
        weights, total = weights / weights.sum(-1, keepdim=True), torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, choices = (chosen == number).nonzero(as_tuple=True)
            total = total.index_add(0, rows, expert(tokens[rows]) * weights[rows, choices, None])
        return total.view_as(x)


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
         "num_key_value_heads": 4, "head_dim": 4, "vocab_size": 61, "max_position_embeddings": 16,
         "num_local_experts": 4}  # fmt: skip
TRAINED = (*ATTENTION, "expert_gate", "expert_up", "expert_down")
SETTINGS = {"learning_rate": 3e-3, "warmup_steps": 0, "schedule": "constant", "clip_grad_norm": 0.5, "epsilon": 1e-8}


def released(folder: Path) -> Any:
    """A small Mixtral of transformers, saved, with its experts as linear maps under their names of then."""
    from transformers import MixtralConfig, MixtralForCausalLM  # seconds, and most tests do without

    torch.manual_seed(0)
    mixtral = MixtralForCausalLM(MixtralConfig(**SIZES, tie_word_embeddings=False))
    mixtral.save_pretrained(folder)
    for layer in mixtral.model.layers:
        layer.block_sparse_moe = Mixture(layer.mlp)
        del layer.mlp
        layer.forward = _forward_of(layer)
    mixtral.config.model_type = "mixtral of linear maps"  # peft has other adapters for experts in one tensor
    return mixtral


def _forward_of(layer: Any) -> Any:
    def forward(x: Tensor, position_embeddings: Any = None, attention_mask: Any = None, **others: Any) -> Tensor:
        attended, _ = layer.self_attn(
            hidden_states=layer.input_layernorm(x), position_embeddings=position_embeddings,
            attention_mask=attention_mask, **others,
        )  # fmt: skip
        x = x + attended
        y: Tensor = x + layer.block_sparse_moe(layer.post_attention_layernorm(x))
        return y

    return forward


def job_over(folder: Path, **adapter: Any) -> JobSpec:
    fields = {"rank": 4, "alpha": 8.0, "targets": list(TRAINED)} | adapter
    model = {"weights": str(folder), "sequence": 16, "moe": {"aux_loss": "none"}, "adapter": fields}
    return job_of_fields(
        {"model": model, "batch": {"global_batch_size": 4}, "optimizer": SETTINGS}, [], "adapters in experts"
    )


def begun(job: JobSpec) -> Replica:
    return build(job, job_mesh(job, 0, CPU), initial_values(job, released_weights_of(job)))


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    return cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())


def test_ten_steps_are_those_of_peft_which_opens_what_is_exported(tmp_path: Path) -> None:
    """Over a released Mixtral in float32 whose adapters begin alike: losses to 1e-5; and peft's own file begins a run
    with the loss that it ends with."""
    peft = pytest.importorskip("peft", reason="peft is not among the wheels that tests are installed from")
    mixtral, job = released(tmp_path / "base"), job_over(tmp_path / "base")
    replica = begun(job)
    names = target_modules("mixtral", job.model)
    assert names == ["q_proj", "k_proj", "v_proj", "o_proj", "w1", "w3", "w2"]
    adapted = peft.get_peft_model(mixtral, peft.LoraConfig(r=4, lora_alpha=8, target_modules=names))
    others = dict(adapted.named_parameters())
    downs = {p.place.name: p for unit in replica.shards[0].units for p in unit.parameters}
    with torch.no_grad():
        for name, pieces in adapter_layout("mixtral", job.model).items():
            for piece in pieces:
                other = others[piece.name.replace(".weight", ".default.weight")]
                other.copy_(downs[name].detach()[tuple(slice(*ends) for ends in piece.region)].reshape(piece.shape))
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in trained) == num_trained_parameters(job.model)
    betas = (job.optimizer.beta1, job.optimizer.beta2)
    plain = torch.optim.AdamW(trained, lr=3e-3, betas=betas, eps=1e-8, weight_decay=job.optimizer.weight_decay)
    for step in range(10):
        tokens = made_up_tokens(job, step)
        loss = loss_of(adapted, tokens)
        plain.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        plain.step()
        assert train_step(replica, step, tokens).loss == pytest.approx(loss.item(), abs=1e-5)
    adapted.save_pretrained(tmp_path / "theirs")
    tokens = made_up_tokens(job, 10)
    again = begun(job_over(tmp_path / "base", weights=str(tmp_path / "theirs")))
    assert train_step(again, 10, tokens).loss == pytest.approx(loss_of(adapted, tokens).item(), abs=1e-5)


def exported(job: JobSpec, folder: Path) -> float:
    """Train some steps and export the adapters to FOLDER/out. Returns the loss of the next step."""
    replica = begun(job)
    for step in range(3):
        train_step(replica, step, made_up_tokens(job, step))
    writer = CheckpointWriter(job, replica, job_mesh(job, 0, CPU), folder)
    writer.save(3, 12, 0, {})
    writer.wait()
    storage = open_storage(str(folder / "checkpoints"))
    export_released(storage, manifest_of(storage, 3), folder / "out", file_bytes=2**30)
    return train_step(replica, 3, made_up_tokens(job, 3)).loss


def test_peft_opens_what_is_exported_over_experts_in_one_tensor(tmp_path: Path) -> None:
    """Over transformers' own Mixtral, whose experts are in one tensor: peft joins the adapters of gate and up."""
    peft = pytest.importorskip("peft", reason="peft is not among the wheels that tests are installed from")
    from transformers import MixtralForCausalLM  # seconds, and most tests do without

    released(tmp_path / "base")
    job = job_over(tmp_path / "base")
    loss, tokens = exported(job, tmp_path), made_up_tokens(job, 3)
    adapted = peft.PeftModel.from_pretrained(MixtralForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "out")
    assert loss_of(adapted, tokens).item() == pytest.approx(loss, abs=1e-5)


def test_what_is_exported_is_what_was_trained_and_begins_a_run(tmp_path: Path) -> None:
    mixtral, job = released(tmp_path / "base"), job_over(tmp_path / "base")
    loss, tokens = exported(job, tmp_path), made_up_tokens(job, 3)
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1.block_sparse_moe.experts.3"
    assert tensors[f"{prefix}.w1.lora_A.weight"].shape == (4, 32)
    assert tensors[f"{prefix}.w2.lora_B.weight"].shape == (32, 4)
    assert abs(loss_of(mixtral, tokens).item() - loss) > 1e-4  # the adapters matter
    for name, down in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            up = tensors[name.replace("lora_A", "lora_B")]
            mixtral.get_submodule(module).weight.data.add_(8 / 4 * up @ down)
    assert loss_of(mixtral, tokens).item() == pytest.approx(loss, abs=1e-5)
    again = begun(job_over(tmp_path / "base", weights=str(tmp_path / "out")))
    assert train_step(again, 3, tokens).loss == pytest.approx(loss, abs=1e-6)


def test_modules_are_named_so_that_no_other_is_meant() -> None:
    """Where shared experts have adapters and others of the same last name have none; and the reverse."""
    shared = job_of("qwen-moe", (*ATTENTION, "gate", "up", "down")).model
    assert target_modules("qwen2_moe", shared)[4:] == [f"shared_expert.{name}_proj" for name in ("gate", "up", "down")]
    routed = job_of("qwen-moe", ("expert_down",)).model
    assert target_modules("qwen2_moe", routed) == [f"{expert}.down_proj" for expert in range(4)]
    both = job_of("qwen-moe", IN_EXPERTS).model
    assert target_modules("qwen2_moe", both)[4:] == ["gate_proj", "up_proj", "down_proj"]


def test_experts_in_one_tensor_have_no_file_of_peft() -> None:
    with pytest.raises(PlanError, match="one matrix of this family"):
        adapter_layout("gpt_oss", job_of("mixtral", IN_EXPERTS).model)
