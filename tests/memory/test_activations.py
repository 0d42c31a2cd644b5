"""Tensors that autograd saves, unique storages without parameters, are as memory/activations.py says: to the byte."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.config.attention_sections import LatentSpec
from shardwright.config.job import JobSpec
from shardwright.config.plan import layer_policies
from shardwright.config.recompute_policy import KEEP_ALL, OPERATORS, WHOLE_LAYER
from shardwright.layers.layer_tensors import ATTENTION, MLP
from shardwright.measure.saved_tensors import saved_bytes
from shardwright.memory.activations import documents_kept, embedding_kept, head_kept, layer_of
from shardwright.memory.kept_tensors import IN_ATTENTION, IN_MLP
from shardwright.memory.layer_memory import further_layers
from shardwright.model.decoder import DecoderStage
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.context.document_mask import without_marks
from shardwright.parallel.pipeline.pipeline_stage import Microbatch
from shardwright.parallel.tensor.parameter import placed_parameters
from shardwright.train.build import build
from support.cases import ATTENTIONS, BLOCKS, KINDS, LATENT, RULES, small_job
from support.ranks import leaves_nothing, run_on_mesh

SHAPES: dict[str, dict[str, Any]] = {
    "small": {},
    "one-sample": {"microbatch_size": 1},
    "wide": {"microbatch_size": 3, "model": {"hidden": 64, "sequence": 24, "head_dim": 6}},
    "bf16": {"precision": {"compute": "bf16"}},
    "tiles": {"precision": {"compute": "bf16", "float8": "blockwise", "float8_weight_gradients": True}},
    "rows": {"precision": {"compute": "bf16", "float8": "rowwise", "float8_weight_gradients": True}},
    "tensors": {"precision": {"compute": "bf16", "float8": "tensorwise", "float8_weight_gradients": True}},
}
POLICIES: dict[str, list[str]] = {
    "none": [], "norm": ["norm"], "attention": ["attention"], "activation": ["activation"],
    "cheap": ["norm", "attention", "activation"], "qkv": ["qkv", "attention"], "up": ["up", "activation"],
    "all": list(OPERATORS), "full": ["layer"],
}  # fmt: skip
OTHERS = {
    "plain": {"positions": "learned", "gated_mlp": False, "activation": "gelu", "norm": "layernorm"},
    "plain-grouped": {"positions": "learned", "kv_heads": 4, "norm": "layernorm"},
    "biased-rotary": {"bias": True, "kv_heads": 4},
    "normed-plain": {"qk_norm": "head", "positions": "learned", "kv_heads": 4, "norm": "layernorm", "bias": True},
    "wide-values": {"latent": LatentSpec(**LATENT | {"value_dim": 8})},
}


UNTURNED: dict[str, dict[str, Any]] = {
    "unturned": {"no_rotary_every": 1, "kv_heads": 4},
    "unturned-biased": {"positions": "none", "kv_heads": 8, "qkv_bias": True},
    "normed-unturned": {"qk_norm": "full", "positions": "none", "kv_heads": 4, "bias": True},
}


def shaped(kind: str, shape: str, policy: list[str], layers: int = 0, **plan: Any) -> JobSpec:
    fields = SHAPES[shape]
    chosen: dict[str, Any] = {"recompute": "selective", "recompute_operators": policy}
    if policy in ([], ["layer"]):
        chosen = {"recompute": "full" if policy else "none"}
    size = fields.get("microbatch_size", 2)
    job = small_job(
        "llama" if kind in OTHERS | UNTURNED else kind, 2 * size, layers, microbatch_size=size, **plan, **chosen
    )
    model = job.model.model_copy(update=fields.get("model", {}) | (OTHERS | UNTURNED).get(kind, {}) | {"dropout": 0.1})
    precision = job.precision.model_copy(update=fields.get("precision", {}))
    return job.model_copy(update={"model": model, "precision": precision})


def constants(stage: DecoderStage) -> list[Tensor]:
    return [p.detach() for p in placed_parameters(stage).values()] + stage.tables.tensors


def input_of(job: JobSpec, stage: DecoderStage) -> Tensor:
    return stage.empty_hidden(job.plan.microbatch_size).normal_().requires_grad_()


@leaves_nothing
def saved_by_layers(mesh: Mesh, jobs: list[JobSpec]) -> list[int]:
    """Of jobs with the same mesh."""
    return [saved_by_layer(mesh, job) for job in jobs]


@leaves_nothing
def saved_by_layer(mesh: Mesh, job: JobSpec, number: int = 0) -> int:
    stage = build(job, mesh).stages[0]
    x = input_of(job, stage)
    run = stage.forward_pass(Microbatch(1, 0, 0))
    return saved_bytes(lambda: stage.layers[str(number)](x, run), constants(stage))


def in_pairs() -> list[tuple[str, str, str]]:
    """Kinds, shapes and policies: any two of any two of these together, in a third of all threes."""
    kinds = [*KINDS, *OTHERS, *ATTENTIONS]
    return [
        (kind, shape, policy)
        for i, kind in enumerate(kinds)
        for j, shape in enumerate(SHAPES)
        for k, policy in enumerate(POLICIES)
        if (i + j + k) % 3 == 0
    ]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kind", "shape", "policy"), in_pairs())
def test_layer_on_one_rank(kind: str, shape: str, policy: str) -> None:
    job = shaped(kind, shape, POLICIES[policy])
    assert run_on_mesh(job, saved_by_layer, job) == [layer_of(job).kept_bytes(frozenset(POLICIES[policy]))]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("kind", [*RULES, *UNTURNED])
def test_layer_of_a_rule_on_one_rank(kind: str, number: int) -> None:
    """Shapes and policies go round."""
    for shape, policy in (("wide", "none"), ("bf16", "none"), ("small", "cheap"), ("bf16", "all"), ("small", "full")):
        job = shaped(kind, shape, POLICIES[policy])
        measured = run_on_mesh(job, saved_by_layer, job, number)
        assert measured == [layer_of(job, number).kept_bytes(frozenset(POLICIES[policy]))], (shape, policy)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", ["small", "bf16", "rows"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_other_blocks_on_one_rank(kind: str, shape: str) -> None:
    for names in POLICIES.values():
        job = shaped(kind, shape, names)
        assert run_on_mesh(job, saved_by_layer, job) == [layer_of(job).kept_bytes(frozenset(names))], names


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt", *ATTENTIONS, *BLOCKS])
def test_layer_on_two_ranks(kind: str, sequence_parallel: bool) -> None:
    cases = [(kind, policy) for policy in ("none", "cheap", "all", "full")]
    check_layers(cases, tp=2, sequence_parallel=sequence_parallel)


def check_layers(cases: list[tuple[str, str]], **plan: Any) -> None:
    """Of kinds under policies, in layers of shape "wide", one after the other on the same ranks."""
    jobs = [shaped(kind, "wide", POLICIES[policy], **plan) for kind, policy in cases]
    expected = [
        layer_of(job).kept_bytes(frozenset(POLICIES[policy])) for job, (_, policy) in zip(jobs, cases, strict=True)
    ]
    for rank, measured in enumerate(run_on_mesh(jobs[0], saved_by_layers, jobs)):
        assert dict(zip(cases, measured, strict=True)) == dict(zip(cases, expected, strict=True)), f"rank {rank}"


CONTEXT = {
    "ring-2": {"cp": 2}, "ring-4": {"cp": 4}, "all-gather-2": {"cp": 2, "cp_method": "all-gather"},
    "ulysses-2": {"cp": 2, "cp_method": "ulysses"}, "ulysses-4": {"cp": 4, "cp_method": "ulysses"},
    "ring-2-tp2-sp": {"cp": 2, "tp": 2, "sequence_parallel": True},
    "more-ranks-than-keys": {"cp": 4, "tp": 2, "cp_method": "ulysses"},
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plan", CONTEXT)
def test_layer_over_ranks_that_share_sequences(plan: str) -> None:
    """Each kind with one plan after the other would be many: policies and kinds go round within a plan."""
    cases = [("llama", "none"), ("gpt", "none"), ("plain-grouped", "attention"), ("biased-rotary", "all")]
    cases += [("olmo", "none"), ("gpt-oss", "none"), ("bloom", "none"), ("llama4", "none")]
    check_layers(cases, **CONTEXT[plan])


@pytest.mark.parametrize("plan", [{}, *({"cp": 2, "cp_method": m, "pp": 2} for m in ("ring", "ulysses"))])
@pytest.mark.parametrize(("kind", "separate"), [("gpt", False), ("gpt", True), ("llama4", True)])
def test_stages_that_share_sequences(plan: dict[str, Any], kind: str, separate: bool) -> None:
    """Layers of Llama 4 come in kinds, which keep numbers of documents of their own: a stage has both."""
    job = shaped(kind, "small", [], 4 if kind == "llama4" else 0, **plan)
    job = job.model_copy(update={"data": job.data.model_copy(update={"separate_documents": separate})})
    for rank, measured in enumerate(run_on_mesh(job, saved_by_stage, job)):
        stage, num_stages = rank // job.plan.cp, job.plan.num_stages
        kept = [documents_kept(job)]
        kept += [embedding_kept(job)] if stage == 0 else []
        kept += [head_kept(job)] if stage == num_stages - 1 else []
        held = range(job.model.layers // num_stages)
        layers = sum(layer_of(job, layer).kept_bytes(KEEP_ALL) for layer in held)
        assert measured == layers + sum(sum(tensors.values()) for tensors in kept)


@leaves_nothing
def saved_by_stage(mesh: Mesh, job: JobSpec) -> int:
    """As the executor runs it; what separate documents take is counted."""
    stage = next(iter(build(job, mesh).stages.values()))
    tokens_BS = torch.zeros(job.plan.microbatch_size, job.model.sequence + 1, dtype=torch.int64)
    x = tokens_BS[:, :-1] if stage.span.is_first else input_of(job, stage)
    targets_BS = tokens_BS[:, 1:] if stage.span.is_last else None
    if not job.data.separate_documents:
        return saved_bytes(lambda: stage(x, targets_BS, Microbatch(1, 0, 0)), [*constants(stage), tokens_BS])
    x = without_marks(x) if stage.span.is_first else x
    ids_BS = None if targets_BS is None else without_marks(targets_BS)
    return saved_bytes(lambda: stage(x, ids_BS, Microbatch(1, 0, 0), tokens_BS), [*constants(stage), tokens_BS])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("separate", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("kind", ["llama-mtp", "gpt-tied-mtp"])
@pytest.mark.parametrize(
    "plan", [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}, {"pp": 2}],
    ids=["one", "tp2", "tp2-sp", "cp2", "pp2"],
)  # fmt: skip
def test_what_predicts_further_tokens(kind: str, plan: dict[str, Any], separate: bool) -> None:
    job = shaped(kind, "small", [], 2, **plan)
    job = job.model_copy(update={"data": job.data.model_copy(update={"separate_documents": separate})})
    further = sum(layer.kept_bytes for layer in further_layers(job, KEEP_ALL, works=False))
    num_stages = job.plan.num_stages
    for rank, measured in enumerate(run_on_mesh(job, saved_by_stage, job)):
        stage = rank * num_stages // job.plan.world
        kept = [documents_kept(job)]
        kept += [embedding_kept(job)] if stage == 0 else []
        kept += [head_kept(job)] if stage == num_stages - 1 else []
        layers = job.model.layers // num_stages * layer_of(job).kept_bytes(KEEP_ALL)
        layers += further if stage == num_stages - 1 else 0
        assert measured == layers + sum(sum(tensors.values()) for tensors in kept)


@pytest.mark.parametrize("plan", [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}], ids=["tp1", "tp2", "tp2-sp"])
@pytest.mark.parametrize("kind", ["llama", "gpt", "unweighed"])
def test_stages_with_their_ends(kind: str, plan: dict[str, Any]) -> None:
    job = shaped(kind, "small", ["attention"], 4, pp=2, recompute_every=2, **plan)
    layer = layer_of(job)
    policies = layer_policies(job.plan, job.model.layers)
    ends = [embedding_kept(job), head_kept(job)]
    for rank, measured in enumerate(run_on_mesh(job, saved_by_stage, job)):
        stage = rank // job.plan.tp
        layers = sum(layer.kept_bytes(policies[i]) for i in range(2 * stage, 2 * stage + 2))
        expected = layers + sum(ends[stage].values())
        assert measured == expected


@leaves_nothing
def deferred(mesh: Mesh, job: JobSpec) -> int:
    """Bytes that products wait with, between I and W: what their closures hold, parameters apart."""
    stage = build(job, mesh).stages[0]
    tokens_BS = torch.zeros(job.plan.microbatch_size, job.model.sequence + 1, dtype=torch.int64)
    loss = stage(tokens_BS[:, :-1], tokens_BS[:, 1:], Microbatch(1, 0, 0))
    with stage.deferred.keeping(0):
        loss.sum().backward()
    apart = {tensor.untyped_storage().data_ptr() for tensor in constants(stage)}
    storages = {}
    for work in stage.deferred._deferred_work[0]:
        for cell in getattr(work, "__closure__", None) or ():  # of what is no product nothing is counted
            if isinstance(cell.cell_contents, Tensor):
                storage = cell.cell_contents.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(size for address, size in storages.items() if address not in apart)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", [{}, {"tp": 2, "sequence_parallel": True}], ids=["tp1", "tp2-sp"])
@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize(
    "kind", ["llama", "gpt", "llama-mtp", "gpt-tied-mtp", *ATTENTIONS, "after", "one-norm", "two-norms"]
)
def test_what_waits_for_its_weight_gradient(kind: str, policy: str, plan: dict[str, Any]) -> None:
    job = shaped(kind, "small", POLICIES[policy], **plan)
    layers = job.model.layers * layer_of(job).deferred_bytes()
    layers += sum(layer.deferred_bytes for layer in further_layers(job, frozenset(POLICIES[policy]), works=False))
    assert run_on_mesh(job, deferred, job) == [layers] * job.plan.tp  # the head waits for nothing


@pytest.mark.parametrize("tp", [1, 2])
def test_published_formula_by_its_terms(tp: int) -> None:
    """Korthikanti et al. 2022, equations 1 to 4: 34 s b h of a GPT layer are ours and what we do not keep."""
    job = shaped("gpt", "bf16", [], tp=tp, sequence_parallel=tp > 1)
    sbh = job.model.sequence * job.plan.microbatch_size * job.model.hidden
    sizes = layer_of(job).sizes
    own = layer_of(job).kept(KEEP_ALL)
    tokens = job.model.sequence * job.plan.microbatch_size
    small = own[ATTENTION.log_sum_exp] + own[IN_ATTENTION.norm_statistics] + own[IN_MLP.norm_statistics]
    assert small == (4 * tokens * job.model.heads + 8 * tokens) // tp
    assert sizes[MLP.inner] == 8 * sbh // tp  # F = 4 H
    masks = 2 * sbh // tp  # one byte an element after each branch; ours are computed again
    # Theirs: norms 4; qkv input 2, Q and K 4, V 2, output input 2, mask 1; up input 2, GELU 8, down input 8, mask 1.
    reference = 34 * sbh // tp
    assert sum(own.values()) - small == reference - masks
    full = layer_of(job).kept(WHOLE_LAYER)
    assert sum(full.values()) == 2 * sbh // tp
