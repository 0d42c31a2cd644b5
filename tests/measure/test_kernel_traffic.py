"""The catalog's description of this runtime against what its own operators read and write, counted in dry runs.

Counted is what a step has more with one layer and one microbatch more. Numbers of the description are rounded, and the
small tensors of a layer (weights of norms, one number a token) are in no formula: 3 % of each number. A number that
depends on a ratio of the model that the formulas leave out has a wider bound, said where it stands.
"""

from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial

import pytest
import torch

from shardwright.config.elementwise_kernels import (
    activation_traffic,
    loss_traffic,
    norm_traffic,
    residual_traffic,
    rotary_traffic,
)
from shardwright.config.load import load_job, make_job
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.software import software_of
from shardwright.cost.from_job import run_of
from shardwright.cost.update_time import update_bytes
from shardwright.layers.chains import chains
from shardwright.layers.operators import Operator
from shardwright.parallel.comm.collectives import Axis
from shardwright.parallel.comm.ledger import Ledger
from shardwright.parallel.optimizers.adafactor import Adafactor
from shardwright.parallel.optimizers.elementwise import make_optimizer
from shardwright.parallel.optimizers.muon import Muon
from shardwright.parallel.zero.master_weights import Masters, MatrixSteps, ShardPiece
from shardwright.parallel.zero.unit_setting import dtype_of
from shardwright.schedule.action import Kind
from shardwright.schedule.pipeline_shape import PipelineShape
from shardwright.schedule.shape_program import shape_program
from shardwright.sharding.buckets import unit_layout
from shardwright.sharding.factored_sums import FactoredSums
from shardwright.sharding.matrix_exchange import MatrixExchange
from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.sharding.unit_update import Updates
from support.kernel_traffic import Kernel, KernelTraffic, layer_kernels, step_kernels

pytestmark = pytest.mark.long

OWN = software_of("shardwright")
NORM, RESIDUAL, LOSS = norm_traffic(OWN.norm), residual_traffic(OWN.residual), loss_traffic(OWN.loss)
ACTIVATION, ROTARY = activation_traffic(OWN.activation), rotary_traffic(OWN.rotary)
BASE = (
    "model.sequence=512", "model.vocab=1024", "model.hidden=256", "model.heads=8", "model.kv_heads=4", "model.ffn=640",
    "plan={dp=1, zero=1, microbatch_size=1}", 'precision.compute="bf16"', "cluster.software=shardwright",
)  # fmt: skip
STREAM = 512 * 256  # elements of the residual stream
LLAMA = BASE
GPT = (*BASE, "model.kv_heads=8", 'model.norm="layernorm"', "model.bias=true", 'model.activation="gelu"',
       "model.gated_mlp=false", 'model.positions="learned"')  # fmt: skip
MOE = (*BASE, "model.moe={experts=8, top_k=2, ffn=320}")
WIDE_MOE = (*BASE, "model.moe={experts=16, top_k=8, ffn=320}")
LATENT = (*BASE, "model.kv_heads=8",
          "model.latent={q_rank=192, kv_rank=128, nope_dim=32, rope_dim=16, value_dim=32}")  # fmt: skip
HEAD_NORMS = (*BASE, "model.qk_norm='head'")
AROUND = (*BASE, 'model.norm_place="around"', "model.residual_scale=0.5")
ONE_NORM, TWO_NORMS = ((*BASE, f'model.parallel_block="{kind}"') for kind in ("one-norm", "two-norms"))
MODELS = {
    "llama": LLAMA, "gpt": GPT, "moe": MOE, "wide moe": WIDE_MOE, "latent": LATENT, "head norms": HEAD_NORMS,
    "around": AROUND, "one norm": ONE_NORM,
}  # fmt: skip

LAUNCHED = {"split_and_turn": 3}  # kernels of an operator: of queries, of keys and of values
layer = lru_cache(maxsize=16)(lambda fields: layer_kernels(*fields))
PRODUCTS = ("mm", "addmm", "addmm_", "_grouped_mm")
CORE = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward")


def moved(kernels: Counter[Kernel], passes: bool, *files: str, but: tuple[str, ...] = ()) -> float:
    """Bytes of the elementwise kernels of some files, of the forward or the backward (`passes`)."""
    return sum(
        count * of.num_bytes
        for of, count in kernels.items()
        if of.backward is passes and of.file in files and of.operator not in (*PRODUCTS, *CORE, *but)
    )


def by_element(fields: tuple[str, ...], elements: float, *files: str) -> list[float]:
    """The same by element: (forward, backward)."""
    return [moved(layer(fields), passes, *files) / elements for passes in (False, True)]


def added(kernels: Counter[Kernel], operator: str) -> float:
    """Bytes that autograd itself moves with an operator in a backward."""
    return sum(
        count * k.num_bytes for k, count in kernels.items() if k.backward and not k.file and k.operator == operator
    )


def test_norms() -> None:
    assert by_element(LLAMA, 2 * STREAM, "model/norm.py") == pytest.approx(NORM.rms, rel=0.03)
    assert by_element(GPT, 2 * STREAM, "model/norm.py") == pytest.approx(NORM.layer, rel=0.03)
    of_heads = 1.5 * STREAM  # 8 query heads and 4 keys of a model of 8 heads
    both = by_element(HEAD_NORMS, 1.0, "model/norm.py")
    plain = by_element(LLAMA, 1.0, "model/norm.py")
    forward, backward = (a - b for a, b in zip(both, plain, strict=True))
    backward += added(layer(HEAD_NORMS), "cat")  # of the gradients of queries, keys and values
    assert [forward / of_heads, backward / of_heads] == pytest.approx(NORM.heads, rel=0.03)


def test_residual_stream() -> None:
    forward = moved(layer(LLAMA), False, "model/block.py")
    assert [forward / (2 * STREAM), added(layer(LLAMA), "add") / (2 * STREAM)] == pytest.approx(RESIDUAL)


def test_other_blocks() -> None:
    """Norms of both sides, scaled sums, and both halves at once, whose parts are added up first, and the gradients of
    what they take: with one norm where their products are made."""
    assert by_element(AROUND, 4 * STREAM, "model/norm.py") == pytest.approx(NORM.rms, rel=0.03)
    assert moved(layer(AROUND), False, "model/block.py") == pytest.approx(2 * STREAM * RESIDUAL[0])
    for fields in (ONE_NORM, TWO_NORMS):
        files = "model/block.py", "model/parallel_block.py"
        assert moved(layer(fields), False, *files) == pytest.approx(2 * STREAM * RESIDUAL[0])
    assert added(layer(TWO_NORMS), "add") == pytest.approx(2 * STREAM * RESIDUAL[1])
    sums = moved(layer(ONE_NORM), True, "parallel/tensor/column_products.py")
    assert sums == pytest.approx(STREAM * RESIDUAL[1])
    assert added(layer(ONE_NORM), "add") == pytest.approx(STREAM * RESIDUAL[1])


def test_changed_logits() -> None:
    """One pass that reads and writes them in float32."""
    fields = (*LLAMA, "model.logit_softcap=30.0")
    whole, fewer = (step_kernels(*fields, layers=1, num_microbatches=number) for number in (3, 2))
    more, less = (
        sum(count * k.num_bytes for k, count in kernels.items() if k.operator == "change_logits")
        for kernels in (whole, fewer)
    )
    assert (more - less) / (512 * 1024) == pytest.approx(8.0)


def test_activations() -> None:
    """The formula counts two bytes more, the element that leaves."""
    inner = 2.5 * STREAM
    fused = by_element(LLAMA, inner, "model/activation.py")
    assert [number - 2 for number in fused] == pytest.approx(ACTIVATION.gated, rel=0.03)
    forward, backward = moved(layer(GPT), False, "model/activation.py"), added(layer(GPT), "gelu_backward")
    assert [forward / inner - 2, backward / inner - 2] == pytest.approx(ACTIVATION.plain, rel=0.03)


def test_biases() -> None:
    """Of query, key and value, the MLP's inner width, and twice the residual stream."""
    elements = (3 + 2.5 + 2) * STREAM
    files = "model/attention.py", "model/mlp.py", "parallel/tensor/linear.py"
    summed = added(layer(GPT), "sum")
    assert [moved(layer(GPT), False, *files) / elements, summed / elements] == pytest.approx(OWN.bias, rel=0.03)


@pytest.mark.parametrize("kv_heads", [4, 8, 32])
def test_rotary_positions(kv_heads: int) -> None:
    """Queries and keys are turned and values copied, whatever the ratio of their heads. Tables of sines are read for
    each of 32 heads' worth of queries and keys once, which is in no formula: 5 %."""
    kernels = layer((*LLAMA, "model.hidden=1024", "model.heads=32", f"model.kv_heads={kv_heads}"))
    turned, copied = 4 * STREAM * (1 + kv_heads / 32), 4 * STREAM * kv_heads / 32
    for passes, of_turned, of_copied in zip((False, True), ROTARY.turned, ROTARY.copied, strict=True):
        counted = moved(kernels, passes, "model/rotary.py")
        assert counted == pytest.approx(turned * of_turned + copied * of_copied, rel=0.05)


def test_head() -> None:
    """Cross entropy, by logit."""
    whole, fewer = (step_kernels(*LLAMA, layers=1, num_microbatches=number) for number in (3, 2))
    files = "model/loss.py", "model/fused_softmax.py"
    counted = [(moved(whole, passes, *files) - moved(fewer, passes, *files)) / (512 * 1024) for passes in (False, True)]
    assert counted == pytest.approx(LOSS, rel=0.03, abs=0.01)


@pytest.mark.parametrize(("fields", "experts", "choices"), [(MOE, 8, 2), (WIDE_MOE, 16, 8)])
def test_experts(fields: tuple[str, ...], experts: int, choices: int) -> None:
    """Rows and logits. A sum over K choices is begun once and rounded once, which takes 6 / K bytes less by row, and
    the description has one number for all K: 8 %."""
    kernels = layer(fields)
    rows, kinds = choices * STREAM, ("model/gates/choice.py", "model/gates/softmax.py", "model/router.py",
                                     "model/router_state.py", "parallel/expert/grouped_linear.py")  # fmt: skip
    carried = "parallel/expert/dispatch.py", "parallel/comm/collectives.py"
    both = zip(OWN.dispatch or (), OWN.combine or (), strict=True)
    for passes, of_rows in zip((False, True), map(sum, both), strict=True):
        assert moved(kernels, passes, *carried) / rows == pytest.approx(of_rows, rel=0.08)
    inner = choices * 512 * 320
    weighed = by_element(fields, inner, "model/weighed_activation.py")
    assert [number - 2 for number in weighed] == pytest.approx(ACTIVATION.gated, rel=0.03)
    logits = 512 * experts
    assert moved(kernels, False, *kinds) / logits == pytest.approx(OWN.router[0] + OWN.choices[0] * choices, rel=0.1)
    casts = [moved(kernels, passes, "model/float32_linear.py") / STREAM for passes in (False, True)]
    sums = added(kernels, "add") / STREAM - 2 * RESIDUAL[1]  # of the gradients of router and experts
    assert [casts[0], casts[1] + sums] == pytest.approx(OWN.router_input, rel=0.05)


@pytest.mark.parametrize("cp", [2, 4])
def test_keys_that_come_rank_by_rank(cp: int) -> None:
    """By element of queries and rank. Gradients of a rank's own keys are in it, and weigh less among more ranks: 15 %.

    With as many heads for keys as for queries none is repeated and summed, and their gradients are four times as large.
    """
    wide = "model.sequence=2048", "model.hidden=1024", "model.heads=32", "model.kv_heads=8"
    kernels = layer((*LLAMA, *wide, f"plan={{dp=1, cp={cp}, microbatch_size=1}}"))
    files = "parallel/context/block_attention.py", "parallel/context/ring_attention.py"
    alone = layer((*LLAMA, *wide))
    for passes, answer, launched in zip((False, True), OWN.ring, OWN.ring_kernels, strict=True):
        merged = (
            k_count * k.num_bytes
            for k, k_count in kernels.items()
            if k.backward is passes and k.file in files and "attention" not in k.operator
        )
        assert sum(merged) / (2048 * 1024) == pytest.approx(answer, rel=0.15)
        more = sum(
            sign * count for sign, of in ((1, kernels), (-1, alone)) for k, count in of.items() if k.backward is passes
        )
        assert more / cp == pytest.approx(launched, rel=0.25)


def test_capped_scores() -> None:
    """By score that a query sees, of 8 heads of 4096 tokens in pieces of 512: an eighth more is computed."""
    kernels = layer((*LLAMA, "model.sequence=4096", "model.attention_softcap=50.0"))
    files = "parallel/context/capped_attention.py", "parallel/context/sight.py"
    for passes, answer in zip((False, True), OWN.capped, strict=True):
        counted = moved(kernels, passes, *files, but=("bmm",)) / (8 * 4096**2 / 2)
        assert counted == pytest.approx(answer, rel=0.03)


def test_added_weight_gradients() -> None:
    """A product in 16 bits adds to a sum in float32 itself; what is added apart are gradients of norms."""
    kernels = layer(LLAMA)
    added = [k for k in kernels if k.function == "add_product"]
    assert {k.operator for k in added} == {"addmm"} and OWN.adds == "product"
    apart = [k for k in kernels if k.function == "_add"]
    assert {k.operator for k in apart} == {"add_"} and max(k.num_bytes for k in apart) < 16 * 256


def more_kernels(kernels: Counter[Kernel], fewer: Counter[Kernel], passes: bool) -> int:
    """Kernels more, without products in fp8, which stand where those in 16 bits did, and copies of their scales."""
    return sum(
        sign * count
        for sign, counts in ((1, kernels), (-1, fewer))
        for kernel, count in counts.items()
        if kernel.backward is passes and kernel.file != "precision/scaled_mm.py"
    )


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_float8(recipe: str) -> None:
    """Casts of inputs and of gradients, and of weights by blocks their transposes: one number stands for both."""
    kernels, plain = layer((*LLAMA, f'precision.float8="{recipe}"')), layer(LLAMA)
    inputs, gradients = STREAM * (1 + 1 + 1 + 2.5), STREAM * (2 + 1 + 5 + 1)
    for passes, elements in ((False, inputs), (True, gradients)):
        counted = moved(kernels, passes, "precision/float8.py") / elements
        assert counted == pytest.approx(OWN.float8[passes], rel=0.2)
        assert more_kernels(kernels, plain, passes) + 4 == pytest.approx(OWN.float8_kernels[passes], abs=2)
    weights = [k for k in kernels if k.function == "add_product" and k.operator == "addmm"]
    assert weights and not OWN.float8_weight_gradients


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_float8_by_tensor(recipe: str) -> None:
    """The amax of a whole tensor is a pass of its own."""
    kernels = layer((*LLAMA, f'precision.float8="{recipe}"'))
    inputs, gradients = STREAM * (1 + 1 + 1 + 2.5), STREAM * (2 + 1 + 5 + 1)
    for passes, elements in ((False, inputs), (True, gradients)):
        counted = moved(kernels, passes, "precision/float8.py") / elements
        assert counted == pytest.approx(5 / 3 * OWN.float8[passes], rel=0.05)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_float8_weight_gradients(recipe: str) -> None:
    """The backward has more: of inputs and gradients casts along tokens, of weights a sum of two tensors. Blocks
    take a little more than rows; one number stands for both."""
    fields = (*LLAMA, f'precision.float8="{recipe}"')
    wide, narrow = layer((*fields, "precision.float8_weight_gradients=true")), layer(fields)
    casts = ("precision/float8.py", "precision/float8_product.py", "precision/float8_gradient.py")
    of_casts, of_sums = (
        moved(wide, True, *files) - moved(narrow, True, *files)
        for files in (casts, ("parallel/tensor/gradient_sums.py",))
    )
    elements = STREAM * (1 + 1 + 1 + 2.5 + 2 + 1 + 5 + 1)
    assert of_casts / elements == pytest.approx(OWN.float8_gradient, rel=0.07)
    weights = 256 * (512 + 256 + 3 * 640)
    assert of_sums == pytest.approx(12 * weights, rel=0.05)
    assert more_kernels(wide, narrow, True) == pytest.approx(OWN.float8_gradient_kernels, rel=0.05)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MODELS)
def test_kernels_of_a_layer(name: str) -> None:
    """Within a tenth: biases, padding and what is counted by router are a kernel more or less."""
    kernels, of = layer(MODELS[name]), run_of(load_job("quickstart", [*MODELS[name]])).shape
    counted = [
        sum(count * LAUNCHED.get(k.operator, 1) for k, count in kernels.items() if k.backward is passes)
        for passes in (False, True)
    ]
    for passes, result in enumerate(counted):
        answer = (OWN.layer_norm_kernels if of.layer_norm else None) or OWN.kernels
        number = answer[passes] + (of.latent is not None) * OWN.latent_kernels[passes]
        if of.experts:
            number += OWN.routing_kernels[passes] + of.experts.topk * OWN.choice_kernels[passes]
            number += of.experts.num * OWN.expert_kernels[passes]
        number += of.head_norms * OWN.head_norm_kernels[passes]
        number += (len(of.block_norms) - 2) * OWN.norm_kernels[passes]
        assert result == pytest.approx(number, rel=0.1)


@pytest.mark.parametrize("name", MODELS)
def test_elementwise_traffic_of_a_layer(name: str) -> None:
    """All that the cost model charges for a layer, and all that its operators move."""
    run = run_of(load_job("quickstart", [*MODELS[name], "model.layers=2", "batch.global_batch_size=1"]))
    chain = chains(run.shape, run.grid, OWN)["experts" if run.shape.experts else "dense"]
    of_pass: tuple[Callable[[Operator], float], ...] = (lambda o: o.forward_bytes, lambda o: o.backward_bytes)
    for passes, of in zip((False, True), of_pass, strict=True):
        counted = sum(
            count * k.num_bytes
            for k, count in layer(MODELS[name]).items()
            if k.backward is passes and k.operator not in (*PRODUCTS, *CORE) and "gradient_sums.py" not in k.file
        )
        assert sum(map(of, chain)) == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize(("name", "compute"), [("sgd", "bf16"), ("lion", "bf16"), ("adafactor", "bf16"),
                                                ("muon", "bf16"), ("muon", "float32")])  # fmt: skip
def test_update_of_a_matrix(name: str, compute: str) -> None:
    """Other optimizers, by element; of Muon without its products."""
    side, place = 256, ParameterShard((256, 256), ((0, 256), (0, 256)), "normal", 1.0, "layers.0.mlp.down.weight")
    job = make_job({"optimizer": {"name": name}, "precision": {"compute": compute}})
    (group,) = Updates(job).groups([([place], unit_layout([place], 1))])
    update, line = group.update, axis_of_one()
    steps: MatrixSteps | None = None
    if isinstance(update, MatrixExchange):
        steps = Muon(update, line, line, dtype_of(compute), 0)
    elif isinstance(update, FactoredSums):
        steps = Adafactor(update, line, line)
    values = torch.zeros(side * side, dtype=dtype_of(compute))
    masters = Masters([ShardPiece(0, side * side, True, on_host=False)], values, torch.device("cpu"))
    by_matrix = Updates(job).is_by_matrix(place)
    masters.make_optimizer(partial(make_optimizer, job.optimizer), by_matrix, steps)
    gradients, scratch = torch.ones(side * side), torch.empty(group.scratch_bytes, dtype=torch.uint8)

    def step() -> None:
        masters.begin_step(gradients, 0.5, 1e-3)
        if steps is not None:
            steps([masters], scratch)
        masters.end_step()

    step()
    with KernelTraffic() as traffic:
        step()
        masters.write_values(values)
        torch.linalg.vector_norm(gradients.view(64, -1), dim=-1, dtype=torch.float32)
    counted = sum(count * k.num_bytes for k, count in traffic.kernels.items()) / side**2
    counted -= 4 * (name == "sgd")  # as with AdamW
    counted += 6 * (compute == "float32")  # there is no copy
    assert counted == pytest.approx(update_bytes(OWN, job.optimizer, by_matrix, dtype_of(compute).itemsize), rel=0.02)


def axis_of_one() -> Axis:
    return Axis("dp", (0,), 0, None, Ledger(torch.device("cpu")), None)


@pytest.mark.parametrize(
    ("moments", "master"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
def test_update(moments: torch.dtype, master: torch.dtype) -> None:
    """AdamW is one kernel, which reads gradients and does not write them though torch's schema would let it. Moments in
    bf16 take one more of each on their way to float32 and back; without master weights it takes all in bf16."""
    size = 4096
    values = torch.zeros(size, dtype=torch.bfloat16)
    masters = Masters([ShardPiece(0, size, True, on_host=False)], values, torch.device("cpu"), number=master)
    job = load_job("quickstart", [])
    masters.make_optimizer(partial(make_optimizer, job.optimizer, moments=moments))
    gradients = torch.ones(size, dtype=master)
    masters.step(gradients, 0.5, 1e-3)  # the first makes the moments
    with KernelTraffic() as traffic:
        masters.step(gradients, 0.5, 1e-3)
        masters.write_values(values)
        torch.linalg.vector_norm(gradients.view(64, 64), dim=-1, dtype=torch.float32)
    assert sum(k.operator == "_fused_adamw_" for k in traffic.kernels) == 1
    counted = sum(count * k.num_bytes for k, count in traffic.kernels.items()) / size
    answer = OWN.update if moments == torch.float32 else OWN.bf16_moments_update
    answer = OWN.narrow_update if master == torch.bfloat16 else answer
    assert counted - gradients.itemsize == pytest.approx(answer, rel=0.02)
    assert master == torch.bfloat16 or answer == OWN.model_copy(update={"moment_bytes": moments.itemsize}).updated_bytes


def test_it_has_all_that_a_plan_can_ask_for() -> None:
    assert OWN.schedules is None  # all
    assert OWN.zero_stages == (0, 1, 2, 3)
    assert OWN.sequence_parallel and OWN.context_parallel


@pytest.mark.parametrize("name", sorted(set(SCHEDULES.names) - {"pipedream", "pipedream-2bw"}))
def test_schedules_that_put_weight_gradients_off(name: str) -> None:
    """Where most backwards are split, sums of input gradients have no weight gradient to hide behind."""
    actions = [
        a
        for row in shape_program(
            name, PipelineShape(4, 12, SCHEDULES[name].stages_per_rank or (2 if name != "auto" else 1))
        ).ranks
        for a in row
    ]
    parts = [part for a in actions for part in a.parts or (a,)]
    split, whole = (sum(part.kind is kind for part in parts) for kind in (Kind.INPUT_GRAD, Kind.BACKWARD))
    assert SCHEDULES[name].splits_weights == (split > whole)
