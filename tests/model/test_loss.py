"""The loss in chunks against torch's cross entropy on whole logits: value, gradients, and what there is of logits."""

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.plan import split_evenly
from shardwright.measure.saved_tensors import saved_bytes
from shardwright.memory.activations import head_working_bytes
from shardwright.model import loss as loss_module
from shardwright.model.loss import HeadWeights, LogitChange, Targets, microbatch_loss
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.linear import LayerSharding
from shardwright.parallel.tensor.parameter import PlacedParameter, sharded
from shardwright.sharding.block_sizes import loss_chunk_bytes, loss_positions, num_loss_chunks
from shardwright.train.build import job_mesh
from support.cases import small_job
from support.ranks import run_on_mesh

VOCAB, HIDDEN = 61, 32


def drawn(positions: int, batch: int, masked: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Hidden states [S, B, H], a head [V, H], targets [S x B], and which of these have a loss."""
    generator = torch.Generator().manual_seed(positions * 10 + batch)
    x_SBH = torch.randn(positions, batch, HIDDEN, generator=generator)
    weight_VH = torch.randn(VOCAB, HIDDEN, generator=generator)
    ids_T = torch.randint(VOCAB, (positions * batch,), generator=generator)
    counts_T = torch.rand(positions * batch, generator=generator) < 0.6 if masked else None
    return x_SBH, weight_VH, ids_T, counts_T


def expected(
    x_SBH: Tensor, weight_VH: Tensor, bias_V: Tensor, ids_T: Tensor, counts_T: Tensor | None, change: LogitChange
) -> tuple[Tensor, ...]:
    """The mean loss and its gradients, times 3, by torch in float64."""
    x, weight, bias = (values.double().requires_grad_() for values in (x_SBH, weight_VH, bias_V))
    logits_TV = (x @ weight.t() + bias).flatten(0, 1) * change.scale
    logits_TV = change.cap * (logits_TV / change.cap).tanh() if change.cap else logits_TV
    losses_T = functional.cross_entropy(logits_TV, ids_T, reduction="none")
    loss = (losses_T if counts_T is None else losses_T.where(counts_T, 0.0)).mean()
    (3 * loss).backward()
    assert x.grad is not None and weight.grad is not None and bias.grad is not None
    return loss.detach(), x.grad, weight.grad, bias.grad


def of_cut(
    mesh: Mesh, positions: int, batch: int, masked: bool, chunk: int, sp: bool, change: LogitChange, kind: str = "cpu"
) -> dict[str, float]:
    """The largest differences from what is expected, on one rank of a tp line, as a kind of device computes it."""
    tp = mesh.tp
    tp.ledger.kind = kind
    cut = LayerSharding.of_tp(tp, sequence_parallel=sp)
    x_SBH, weight_VH, ids_T, counts_T = drawn(positions, batch, masked)
    weight = sharded((VOCAB, HIDDEN), 0, tp, "zeros")
    first, end = split_evenly(VOCAB, tp.size, tp.index)
    own = PlacedParameter(weight_VH[first:end].clone(), weight.place)
    bias_V = weight_VH[:, 0] if masked else torch.zeros(VOCAB)
    bias = PlacedParameter(bias_V[first:end].clone(), sharded((VOCAB,), 0, tp, "zeros").place) if masked else None
    head = HeadWeights(own, bias)
    share = slice(None)
    if sp:
        share = slice(tp.index * positions // tp.size, (tp.index + 1) * positions // tp.size)
    x_sBH = x_SBH[share].clone().requires_grad_()
    targets = Targets(ids_T - first, None if counts_T is None else ~counts_T, chunk)
    loss = microbatch_loss(x_sBH, head, targets, cut, logit_change=change)
    assert float(loss.detach()) == 0.0  # it is there once the backward has run
    loss.backward(torch.tensor(3.0))
    with torch.no_grad():
        evaluated = microbatch_loss(x_sBH, head, targets, cut, logit_change=change)
    answer, dx_SBH, dweight_VH, dbias_V = expected(x_SBH, weight_VH, bias_V, ids_T, counts_T, change)
    assert x_sBH.grad is not None and own.gradient is not None
    return {
        "loss": abs(loss.item() - float(answer)) / max(1.0, abs(float(answer))),
        "evaluated": abs(evaluated.item() - loss.item()),
        "input": float((x_sBH.grad - dx_SBH[share]).abs().max()),
        "weight": float((own.gradient - dweight_VH[first:end]).abs().max()),
        "bias": 0.0 if bias is None else float((bias.gradient - dbias_V[first:end]).abs().max()),
    }


CHANGES = [LogitChange(), LogitChange(0.5), LogitChange(1.0, 4.0), LogitChange(0.5, 20.0)]


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 3), st.booleans(), st.integers(1, 10), st.sampled_from(CHANGES),
    st.sampled_from(["cpu", "cuda"]),
)  # fmt: skip
def test_chunks_give_what_whole_logits_do(
    positions: int, batch: int, masked: bool, chunk: int, change: LogitChange, kind: str
) -> None:
    """Sums of 61 products of numbers of about 6, and means of at most 27: 1e-5 is some hundred roundings. On CUDA the
    memory of logits has three columns more than the vocabulary."""
    job = small_job()
    (result,) = run_on_mesh(job, of_cut, positions, batch, masked, chunk, False, change, kind)
    assert max(result.values()) < 1e-5


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_chunks_over_tp(chunk: int, sp: bool) -> None:
    change = CHANGES[chunk % len(CHANGES)]
    for result in run_on_mesh(small_job(tp=2, sequence_parallel=sp), of_cut, 8, 2, True, chunk, sp, change):
        assert max(result.values()) < 1e-5


def test_its_forward_keeps_no_logits() -> None:
    x_SBH, weight_VH, ids_T, _ = drawn(8, 2, False)
    job = small_job()
    assert run_on_mesh(job, kept, x_SBH, weight_VH, ids_T) == [4 * x_SBH.numel() + 8 * ids_T.numel()]


def kept(mesh: Mesh, x_SBH: Tensor, weight_VH: Tensor, ids_T: Tensor) -> int:
    """Bytes that the forward saves."""
    weight = PlacedParameter(weight_VH, sharded((VOCAB, HIDDEN), 0, mesh.tp, "zeros").place)
    x_SBH.requires_grad_()
    cut = LayerSharding.of_tp(mesh.tp)
    return saved_bytes(lambda: microbatch_loss(x_SBH, HeadWeights(weight), Targets(ids_T, None, 8), cut), [weight])


def test_the_gradient_of_a_chunk_is_free_before_the_next_has_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    x_SBH, weight_VH, ids_T, _ = drawn(6, 2, False)
    gradients, tp = list[weakref.ref[Tensor]](), job_mesh(small_job(), 0, torch.device("cpu")).tp
    make, gradient = loss_module._Softmax.of, loss_module._Softmax.gradient

    def noted(*arguments: Any) -> Tensor:
        gradients.append(weakref.ref(result := gradient(*arguments)))
        return result

    def checked(*arguments: Any) -> Any:
        assert all(earlier() is None for earlier in gradients)
        return make(*arguments)

    monkeypatch.setattr(loss_module._Softmax, "gradient", noted)
    monkeypatch.setattr(loss_module._Softmax, "of", checked)
    weight = PlacedParameter(weight_VH, sharded((VOCAB, HIDDEN), 0, tp, "zeros").place)
    cut, targets = LayerSharding.of_tp(tp), Targets(ids_T, None, 2)
    microbatch_loss(x_SBH.requires_grad_(), HeadWeights(weight), targets, cut).backward()
    assert len(gradients) == 3


def large(**plan: Any) -> JobSpec:
    """A vocabulary of 128,256 above little else."""
    return make_job(
        {
            "model": {"layers": 2, "hidden": 512, "heads": 8, "vocab": 128_256, "sequence": 512},
            "plan": {"microbatch_size": 2} | plan,
            "batch": {"global_batch_size": 8},
        }
    )


@pytest.mark.parametrize("plan", [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}])
def test_a_large_vocabulary_needs_little(plan: dict[str, Any]) -> None:
    """Whole logits would take 501 MiB, or half of it, and as much for their gradient."""
    job = large(**plan)
    assert num_loss_chunks(job) > 4
    assert head_working_bytes(job) <= 64 * 2**20


@given(
    st.integers(1, 4096), st.integers(1, 8), st.sampled_from([61, 1000, 128_256]),
    st.sampled_from([0.0, 0.002, 1.0, 64.0]), st.sampled_from([1, 2, 4]), st.booleans(),
)  # fmt: skip
def test_chunks_are_within_their_limit(
    sequence: int, batch: int, vocab: int, mib: float, tp: int, sequence_parallel: bool
) -> None:
    job = small_job()
    plan = job.plan.model_copy(
        update={
            "tp": tp, "sequence_parallel": sequence_parallel, "microbatch_size": batch, "loss_chunk_mib": mib,
        }
    )  # fmt: skip
    model = job.model.model_copy(update={"sequence": sequence * tp, "vocab": vocab})
    job = job.model_copy(update={"plan": plan, "model": model})
    positions, chunks = loss_positions(job), num_loss_chunks(job)
    assert (chunks - 1) * positions < job.tokens_between <= chunks * positions
    logits_bytes = 4 * positions * batch * (tp if sequence_parallel else 1) * -(-vocab // tp)
    assert positions == 1 or logits_bytes <= loss_chunk_bytes(job)


@pytest.mark.parametrize(("vocab", "tp", "tokens"), [(128_256, 1, 5_232), (128_256, 4, 8_192), (32_000, 1, 8_192)])
def test_a_device_reads_and_writes_the_gradient_seldom(vocab: int, tp: int, tokens: int) -> None:
    """Few enough tokens that logits are 1/32 of 80 GiB, enough that a chunk is mostly arithmetic, and no more."""
    job = make_job(
        {
            "model": {"name": "llama3-8b", "vocab": vocab, "sequence": 65_536},
            "plan": {"tp": tp, "sequence_parallel": tp > 1},
            "run": {"device": "cuda"},
            "cluster": {"device": "h100-sxm"},
        }
    )
    assert loss_chunk_bytes(job) // (4 * -(-vocab // tp)) == tokens
    assert num_loss_chunks(job) == -(-65_536 // (tokens // tp * tp))
