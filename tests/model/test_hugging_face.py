"""Our decoder is Llama and GPT-2, not something like them: same weights, same logits, loss and gradients.

The reference is transformers' model of the same shape, whose code shares nothing with ours.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from shardwright.config import catalog
from shardwright.config.model import ModelSpec
from shardwright.config.plan import PlanSpec
from shardwright.model.decoder import DecoderStage, stage_span
from shardwright.parallel.comm.process_groups import MeshNeeds, make_mesh
from shardwright.parallel.tensor.linear import LayerSharding
from shardwright.parallel.tensor.parameter import placed_parameters
from support.hugging_face import copy_weights, our_gradients, reference_gradients, reference_model

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
# Some hundreds of float32: a gradient is a sum over tokens, of products that each came through as many sums.
ROUNDINGS = 512 * 2.0**-24
# No two sizes are the same, so that hardly a matrix fits in the wrong place or the wrong way round.
SHAPE = {"layers": 2, "hidden": 48, "heads": 6, "ffn": 80, "vocab": 61, "sequence": 13}
LLAMA = ModelSpec(**SHAPE)
GPT = ModelSpec(
    **SHAPE, norm="layernorm", positions="learned", bias=True, gated_mlp=False, activation="gelu-tanh",
    tied_embeddings=True,
)  # fmt: skip

YARN = {"kind": "yarn", "factor": 4.0, "trained_sequence": 8, "fast": 2.0, "slow": 0.25}
LLAMA3 = {"kind": "llama3", "factor": 4.0, "trained_sequence": 8, "fast": 2.0, "slow": 0.25}
# Of three or eight pairs; the sequence is longer than 8 and shorter than 16.
LONG = {
    "kind": "longrope", "factor": 4.0, "trained_sequence": 8, "short_factors": [1.0, 1.1, 1.3],
    "long_factors": [1.5, 2.0, 4.0],
}  # fmt: skip

LLAMAS = {
    "multi-head": {},
    "grouped": {"kv_heads": 2},
    "one-kv-head": {"kv_heads": 1},
    "tied": {"tied_embeddings": True},
    "grouped-tied": {"kv_heads": 3, "tied_embeddings": True},
    "base-500000": {"kv_heads": 2, "rotary_base": 500000.0},
    "base-100": {"rotary_base": 100.0},
    "head-dim": {"kv_heads": 2, "head_dim": 14},
    "epsilon": {"norm_epsilon": 1e-2},
    "gelu": {"activation": "gelu"},
    "biases": {"kv_heads": 2, "bias": True},
    "yarn": {"kv_heads": 2, "head_dim": 16, "rotary_base": 1000.0, "rotary_scaling": YARN},
    "yarn-not-rounded": {"head_dim": 16, "rotary_base": 1000.0, "rotary_scaling": YARN | {"truncate": False}},
    "yarn-magnitude": {"head_dim": 16, "rotary_base": 1000.0, "rotary_scaling": YARN | {"magnitude": 1.5}},
    "linear": {"rotary_scaling": {"kind": "linear", "factor": 4.0}},
    "llama3": {"head_dim": 16, "rotary_base": 1000.0, "rotary_scaling": LLAMA3},
}
LATENT = {"q_rank": 20, "kv_rank": 12, "nope_dim": 10, "rope_dim": 6, "value_dim": 14}
OTHERS = {
    "qwen2": {"kv_heads": 2, "qkv_bias": True},
    "qwen2-tied": {"qkv_bias": True, "tied_embeddings": True, "rotary_scaling": YARN},
    "smollm3": {"kv_heads": 2, "layers": 5, "no_rotary_every": 2},
    "smollm3-biases": {"kv_heads": 2, "layers": 3, "no_rotary_every": 3, "bias": True},
    "phi3": {"kv_heads": 2, "rotary_dim": 4},
    "phi3-long": {"rotary_dim": 6, "rotary_scaling": LONG},
    "phi3-short": {"rotary_dim": 6, "rotary_scaling": LONG | {"trained_sequence": 16}},
    "mistral": {"kv_heads": 2, "window": {"size": 5}},
    "mistral-long-window": {"kv_heads": 2, "window": {"size": 13}},
    "qwen2-windows": {"qkv_bias": True, "layers": 3, "window": {"size": 4, "first_full": 2}},
    "phi3-window": {"kv_heads": 2, "rotary_dim": 4, "window": {"size": 7}},
    "olmoe-clipped": {"qk_norm": "full", "clip_qkv": 0.9, "moe": {"experts": 4}},
    "olmoe": {"qk_norm": "full", "moe": {"experts": 6, "top_k": 3, "normalise": False}},
    "olmoe-grouped": {"qk_norm": "full", "kv_heads": 2, "moe": {"experts": 4}},
}
QWENS = {
    "qwen3": {"kv_heads": 2, "head_dim": 14},
    "tied": {"kv_heads": 3, "tied_embeddings": True},
    "yarn": {"rotary_scaling": YARN},
}
DEEPSEEKS = {
    "deepseek-v3": {},
    "plain-queries": {"latent": LATENT | {"q_rank": 0}},
    "wide-values": {"latent": LATENT | {"value_dim": 16}},
    "no-nope": {"latent": LATENT | {"nope_dim": 0, "value_dim": 6}},
    "yarn": {"rotary_scaling": YARN | {"mscale_all_dim": 1.0}},
    "yarn-of-v2": {"rotary_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    "yarn-in-part": {"rotary_scaling": YARN | {"mscale_all_dim": 0.5}},
}
MIXTRALS = {
    "mixtral": {"moe": {"experts": 5, "softmax_over": "chosen"}},
    "three-of-four": {"kv_heads": 2, "moe": {"experts": 4, "top_k": 3, "ffn": 28, "softmax_over": "chosen"}},
}
QWEN_MOES = {
    "qwen3-moe": {"moe": {"experts": 6, "top_k": 3, "ffn": 28}},
    "not-normalised": {"layers": 3, "moe": {"experts": 6, "ffn": 28, "normalise": False, "every": 2}},
    "dense-first": {"layers": 3, "moe": {"experts": 4, "ffn": 28, "first_dense": 1}},
}
SIGMOID = {"gate": "sigmoid", "experts": 8, "top_k": 3, "ffn": 28, "shared_experts": 2, "routed_scaling": 2.5}
DEEPSEEK_MOES = {
    "deepseek-v3": {"moe": SIGMOID | {"first_dense": 1, "num_groups": 4, "groups_kept": 2}},
    "one-group": {"moe": SIGMOID | {"shared_experts": 1, "normalise": False}},
}
GPTS = {
    "gpt2": {},
    "untied": {"tied_embeddings": False},
    "epsilon": {"norm_epsilon": 1e-2},
    "gelu": {"activation": "gelu"},
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """The matrices are tiny: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def whole_model(spec: ModelSpec) -> DecoderStage:
    """The stage that is first and last, without memory yet."""
    mesh = make_mesh(MeshNeeds(PlanSpec()), 0, torch.device("cpu"), 30)
    return DecoderStage(spec, stage_span(PlanSpec(), spec.layers, 0), LayerSharding.of_tp(mesh.tp))


def both_models(spec: ModelSpec):
    """Ours and theirs, with the same weights."""
    reference = reference_model(spec, seed=1)
    own = whole_model(spec).initialise(0, torch.device("cpu"))
    if spec.tied_embeddings:
        own.head.weight.data = own.embedding.weight.data
    copy_weights(own, reference)
    return own, reference


def sample(spec: ModelSpec, batch: int = 3) -> tuple[Tensor, Tensor]:
    """Tokens and targets, each [B, S]."""
    text = torch.randint(spec.vocab, (batch, spec.sequence + 1), generator=torch.Generator().manual_seed(2))
    return text[:, :-1], text[:, 1:]


def logits_of(ours: DecoderStage, tokens: Tensor) -> Tensor:
    """[B, S, V], as theirs."""
    return ours.logits(ours(tokens)).transpose(0, 1)


def assert_equal(spec: ModelSpec) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Compare logits, loss and all gradients; returns the gradients, ours and theirs.

    A tensor's largest deviation must be small against its own largest element.
    """
    own, reference = both_models(spec)
    tokens, targets = sample(spec)
    their_logits = reference(tokens).logits
    with torch.no_grad():
        assert_close(logits_of(own, tokens), their_logits.detach(), **TOLERANCE)
    assert their_logits.std() > 0.5, "logits are too small for the tolerance to say something"

    their_loss = functional.cross_entropy(their_logits.flatten(0, 1), targets.flatten())
    our_loss = own(tokens, targets)
    their_loss.backward()
    our_loss.backward()  # it computes the loss, too
    assert_close(our_loss, their_loss, **TOLERANCE)
    expected, actual = reference_gradients(reference, spec), our_gradients(own)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        worst, largest = (actual[name] - gradient).abs().max(), gradient.abs().max()
        assert worst < ROUNDINGS * largest, f"gradient of {name}"
    return actual, expected


def llama_like(**fields) -> ModelSpec:
    return ModelSpec(**SHAPE | fields)


@pytest.mark.parametrize("fields", LLAMAS.values(), ids=LLAMAS.keys())
def test_llama_is_llama(fields):
    assert_equal(llama_like(**fields))


@pytest.mark.parametrize("fields", OTHERS.values(), ids=OTHERS.keys())
def test_what_attends_otherwise_is_as_theirs(fields):
    assert_equal(llama_like(**fields))


@pytest.mark.parametrize("fields", QWENS.values(), ids=QWENS.keys())
def test_qwen3_is_qwen3(fields):
    assert_equal(llama_like(qk_norm="head", **fields))


@pytest.mark.parametrize("fields", DEEPSEEKS.values(), ids=DEEPSEEKS.keys())
def test_latent_attention_is_deepseeks(fields):
    assert_equal(llama_like(**{"norm_epsilon": 1e-6, "latent": LATENT} | fields))


@pytest.mark.parametrize("fields", MIXTRALS.values(), ids=MIXTRALS.keys())
def test_mixtral_is_mixtral(fields):
    assert_equal(llama_like(**fields))


@pytest.mark.parametrize("fields", QWEN_MOES.values(), ids=QWEN_MOES.keys())
def test_qwen3_with_experts_is_qwen3_moe(fields):
    assert_equal(llama_like(**{"qk_norm": "head", "kv_heads": 2, "head_dim": 14} | fields))


@pytest.mark.parametrize("fields", DEEPSEEK_MOES.values(), ids=DEEPSEEK_MOES.keys())
def test_deepseek_v3_is_deepseek_v3(fields):
    """Its biases, which move choices and no weights, are not zero."""
    assert_equal(llama_like(**{"layers": 3, "norm_epsilon": 1e-6, "latent": LATENT} | fields))


@pytest.mark.parametrize("fields", GPTS.values(), ids=GPTS.keys())
def test_gpt_is_gpt2(fields):
    spec = GPT.model_copy(update=fields)
    actual, expected = assert_equal(spec)
    for layer in range(spec.layers):
        # [kv_heads, Q + 2, D]: the last but one along the second dim is the key. Its bias has no effect on the
        # softmax, so that their gradient is rounding noise; ours must not be, for Adam would follow it.
        name = f"layers.{layer}.attention.qkv_bias"
        assert actual[name][:, -2].count_nonzero() == 0
        assert expected[name][:, -2].abs().max() < 1e-6
        assert expected[name][:, :-2].abs().max() > 1e-4  # the queries' bias does have one


def test_rotary_gives_the_key_bias_a_gradient():
    """With rotary the scores do depend on it: nothing may detach it there."""
    spec = LLAMA.model_copy(update={"bias": True})
    actual, _ = assert_equal(spec)
    assert actual["layers.0.attention.qkv_bias"][:, -2].abs().max() > 1e-4


@pytest.mark.parametrize("kind", [LLAMA, GPT], ids=["llama", "gpt"])
def test_tied_table_is_one_memory_with_two_gradients(kind):
    """The comparison above sums the gradients of its two uses: that is right only for one tensor, used twice."""
    spec = kind.model_copy(update={"tied_embeddings": True})
    own, _ = both_models(spec)
    table, head = own.embedding.weight, own.head.weight
    assert table.data_ptr() == head.data_ptr()
    own(*sample(spec)).mean().backward()
    assert table.gradient.data_ptr() != head.gradient.data_ptr()
    assert not torch.equal(table.gradient, head.gradient)


def test_gate_and_up_are_not_interchangeable():
    """The logits that the tests above compare do depend on the order of a fused weight."""
    own, reference = both_models(LLAMA)
    tokens, _ = sample(LLAMA)
    with torch.no_grad():
        expected = reference(tokens).logits
        assert_close(logits_of(own, tokens), expected, **TOLERANCE)
        for block in own.layers.values():
            block.mlp.up.weight.copy_(block.mlp.up.weight.flip(0))
        assert (logits_of(own, tokens) - expected).abs().max() > 0.1


@pytest.mark.parametrize(("name", "count"), [("gpt2", 124_439_808), ("llama3-8b", 8_030_261_248)])
def test_catalog_models_have_the_published_number_of_parameters(name, count):
    """Counted from the shapes of the modules, without memory; the two uses of a tied table are one tensor."""
    stage = whole_model(ModelSpec(**catalog.read("models", name)))
    shapes = {p.place.name or path: p.place.full_shape for path, p in placed_parameters(stage).items()}
    assert all(p.is_meta for p in stage.parameters())
    assert sum(math.prod(shape) for shape in shapes.values()) == count
