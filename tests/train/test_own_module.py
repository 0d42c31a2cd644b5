"""A module of one's own under data parallel and ZeRO is what one process would have made of it."""

import copy
import os
import re
import socket
import sys
import time
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shardwright as sw
from shardwright.config.optimizer import OptimizerSpec
from shardwright.parallel.zero.module_units import compiled_faults, module_units
from support.forked_commands import ForkedCommand
from support.own_modules import MODULES, Tricky, batch_number, example, resnet_loss, trained_in_turn
from support.ranks import PATIENCE_S, RankFailedError, in_group, run_ranks

ADAMW = {"name": "adamw", "learning_rate": 1e-2, "clip_grad_norm": 0.0}
SGD = {"name": "sgd", "learning_rate": 1e-1, "clip_grad_norm": 0.0, "weight_decay": 0.0, "momentum": 0.0}
STEPS = 2


def spec_of(optimizer: dict[str, Any]) -> OptimizerSpec:
    return OptimizerSpec(**optimizer, schedule="constant", warmup_steps=0)


def trained(
    name: str, plan: dict[str, Any], rank: int = 0, world: int = 1, steps: int = STEPS, **options: Any
) -> sw.ShardedModule:
    """A module, trained for some steps on a rank's own batches."""
    net, loss = MODULES[name]()
    accumulate = options.get("accumulate", 1)
    with torch.random.fork_rng():
        if rank:  # replicas begin as rank 0 does, whatever they have drawn
            for parameter in net.parameters():
                nn.init.normal_(parameter)
        model = sw.shard(net, plan, **{"optimizer": ADAMW, **options})
    for step in range(steps):
        for number in range(accumulate):
            model.backward(loss(model, batch_number(world, rank, step * accumulate + number)))
        model.step()
    return model


def differences(model: sw.ShardedModule, expected: nn.Module) -> float:
    """The largest between a module and what it should be, buffers included."""
    result, wanted = model.state_dict(), expected.state_dict()
    assert result.keys() == wanted.keys()
    return max(float((result[key] - wanted[key]).abs().max()) for key in wanted)


def equal_to_one(rank: int, world: int) -> dict[str, float]:
    """How far each module and stage of ZeRO is from one process, on two ranks."""
    result = {}
    for name in MODULES:
        expected = trained_in_turn(*MODULES[name](), world, STEPS, spec_of(ADAMW))[rank]
        for zero in range(4):
            result[f"{name} {zero}"] = differences(trained(name, {"dp": 2, "zero": zero}, rank, world), expected)
    expected = trained_in_turn(*MODULES["encoder"](), world, STEPS, spec_of(ADAMW))[rank]
    for plan in (
        {"zero": 3, "offload_parameters": True, "offload_optimizer": 1.0},
        {"zero": 1, "offload_optimizer": 0.5},
    ):
        result[f"encoder {plan}"] = differences(trained("encoder", plan, rank, world), expected)
    named = trained("encoder", {"zero": 3}, rank, world, units=["layers.1", "head"])
    result["encoder, units named"] = differences(named, expected)
    return result


def whole_batch(rank: int, world: int) -> float:
    """How far two ranks, each with half of a batch, are from one process with all of it."""
    of = example("resnet")
    torch.manual_seed(0)
    net = of.ResNet(width=4, depth=1, norm=partial(nn.GroupNorm, 2))
    plain, images = copy.deepcopy(net), of.drawn_images(8, torch.Generator().manual_seed(5))
    model = sw.shard(net, {"zero": 3}, optimizer=SGD)
    for _ in range(3):
        own = [part[4 * rank : 4 * rank + 4] for part in images]
        model.backward(nn.functional.cross_entropy(model(own[0]), own[1]))
        model.step()
        plain.zero_grad()
        nn.functional.cross_entropy(plain(images[0]), images[1]).backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter -= SGD["learning_rate"] * parameter.grad
    return differences(model, plain)


def test_halves_of_a_batch_are_the_whole() -> None:
    """Without statistics of a batch only the order of its sums differs: rounding of numbers below 1."""
    assert max(run_ranks(2, in_group, 2, whole_batch)) < 1e-6


def test_two_ranks_are_one() -> None:
    """Each rank is held against its own replica, which has its own running statistics."""
    for results in run_ranks(2, in_group, 2, equal_to_one):
        # The last elements of a tensor, which do not fill a vector, are updated with another rounding.
        assert {name: of for name, of in results.items() if of > 1e-8} == {}
        assert len(results) == 4 * len(MODULES) + 3


def options_on_ranks(rank: int, world: int) -> dict[str, Any]:
    """Results under the other options, by name, on two ranks: differences from expected weights, and checks."""
    result: dict[str, Any] = {}
    # Sums of four gradients in another order: as many roundings of steps that are at most the learning rate each.
    expected = trained_in_turn(*MODULES["tricky"](), world, STEPS, spec_of(SGD), accumulate=2)[rank]
    for zero in (0, 1, 2, 3):
        model = trained("tricky", {"zero": zero}, rank, world, optimizer=SGD, accumulate=2)
        result[f"accumulate {zero}"] = differences(model, expected)
    bf16 = {"compute": "bf16"}
    # In bf16 stages of ZeRO compute the same numbers, and add up the same gradients. SGD's first step shows them.
    steps = [trained("resnet", {"zero": zero}, rank, world, 1, optimizer=SGD, precision=bf16) for zero in (0, 3)]
    result["bf16 stages"] = differences(steps[1], _as_module(steps[0]))
    two_steps = trained("resnet", {"zero": 3}, rank, world, precision=bf16)
    result["bf16 norms"] = two_steps.module.stem[1].weight.dtype == torch.float32
    exact = trained_in_turn(*MODULES["resnet"](), world, STEPS, spec_of(ADAMW))[rank]
    result["bf16 and float32"] = differences(two_steps, exact)
    norms = {}
    for method, zero in product(("none", "bf16", "int8", "powersgd", "topk"), (0, 3)):
        plan = {"zero": zero, "compress": method} | ({} if method == "none" else {"compress_least": 64})
        model = trained("encoder", plan, rank, world, steps=1, optimizer=SGD)
        model.backward(MODULES["encoder"]()[1](model, batch_number(world, rank, 1)))
        norms[method, zero] = model.step().grad_norm
        everywhere = [None, None]
        dist.all_gather_object(everywhere, {key: of.sum().item() for key, of in model.state_dict().items()})
        result[f"{method} {zero}"] = everywhere[0] == everywhere[1]
        # Numbers of 8 and 16 bits are near; a low rank and a few elements are parts, and what was left out comes later.
        share = norms[method, zero] / norms["none", zero]
        result[f"{method} {zero} norm"] = (
            abs(share - 1) < 0.02 if method in ("none", "bf16", "int8") else 0.1 < share < 3
        )
    clipped = trained("encoder", {"zero": 3}, rank, world, optimizer=ADAMW | {"clip_grad_norm": 1e-3})
    result["clipped"] = clipped.num_steps
    return result


def _as_module(model: sw.ShardedModule) -> nn.Module:
    net, _ = MODULES["resnet"]()
    net.load_state_dict(model.state_dict())
    return net


def test_options() -> None:
    for results in run_ranks(2, in_group, 2, options_on_ranks):
        for name in [name for name in results if name.startswith("accumulate")]:
            assert results.pop(name) < 1e-6, name
        # A vector and what is left of a tensor behind the last one may be updated with other roundings: two of a weight
        # and of its step, both below 4. A gradient that was added up in another order would differ by 2^-9 of itself.
        assert results.pop("bf16 stages") <= 4 * 2 * 2**-24
        # Adam's first steps are as long as the rate, whichever way a gradient near 0 is rounded.
        assert 0 < results.pop("bf16 and float32") <= 2 * STEPS * 1e-2 + 0.05
        assert all(results.values()), results


def predicted_memory(rank: int, world: int) -> list[tuple[Any, Any]]:
    """The memory of each module on a rank, as predicted and as measured after its first update."""
    results = []
    zeros: list[dict[str, Any]] = [{"zero": zero} for zero in range(4)]
    on_host = {"zero": 3, "offload_optimizer": 0.5, "offload_parameters": True}
    for name, plan, compute in product(("resnet", "encoder"), [*zeros, on_host], ("float32", "bf16")):
        asked: dict[str, Any] = {"optimizer": ADAMW, "precision": {"compute": compute}}
        model = trained(name, {"dp": 2, **plan}, rank, world, **asked)
        results.append((sw.memory_of(MODULES[name]()[0], {"dp": 2, **plan}, **asked).memory, model.memory()))
    return results


def test_memory_is_as_predicted() -> None:
    for of_rank in run_ranks(2, in_group, 2, predicted_memory):
        for predicted, measured in of_rank:
            assert replace(predicted, buffers_bytes=0) == replace(measured, buffers_bytes=0)
            # When the root's gradients begin to arrive is not known.
            assert measured.buffers_bytes <= predicted.buffers_bytes <= 1.25 * measured.buffers_bytes


def hybrid_and_saved(rank: int, world: int, folder: str) -> float:
    """Hybrid sharding on four ranks beside one process; and a checkpoint of it."""
    expected = trained_in_turn(*MODULES["resnet"](), world, STEPS, spec_of(ADAMW))[rank]
    model = trained("resnet", {"zero": 3, "zero_ranks": 2}, rank, world)
    model.save(folder)
    return differences(model, expected)


def test_hybrid_sharding_and_a_checkpoint_on_another_number_of_ranks(tmp_path: Path) -> None:
    assert max(run_ranks(4, in_group, 4, hybrid_and_saved, str(tmp_path))) < 1e-8
    one, again = (trained("resnet", {"zero": zero}, steps=0) for zero in (0, 3))
    assert one.load(tmp_path) == again.load(tmp_path) == STEPS
    expected = trained_in_turn(*MODULES["resnet"](), 4, STEPS, spec_of(ADAMW))[0]
    assert differences(one, expected) < 1e-8 and differences(again, expected) < 1e-8
    loss = MODULES["resnet"]()[1]
    for model in (one, again):  # and the optimizer goes on with what it remembers
        model.backward(loss(model, 7))
        assert model.step().number == STEPS + 1
    assert differences(one, _as_module(again)) == 0.0
    with pytest.raises(sw.RunError, match="shape"):
        sw.shard(example("resnet").ResNet(width=6, depth=1), optimizer=ADAMW).load(tmp_path)
    with pytest.raises(sw.PlanError, match="has no checkpoint"):
        one.load(tmp_path / "nothing")


def dying(rank: int, world: int) -> None:
    model = trained("encoder", {"zero": 3}, rank, world)
    if rank == 1:
        os._exit(3)
    loss = MODULES["encoder"]()[1]
    model.backward(loss(model, 0))


def test_a_rank_that_dies_ends_the_others() -> None:
    start_s = time.monotonic()
    with pytest.raises(RankFailedError, match=r"exit code 3|Connection|closed"):
        run_ranks(2, in_group, 2, dying)
    assert time.monotonic() - start_s < 60


def waiting(rank: int, store: str, port: int, notes_file: str) -> None:
    """Ranks of torchrun, of which one never comes to the step."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if rank == 0:
        sys.stderr = Path(notes_file).open("w", encoding="utf-8")  # noqa: SIM115 (it ends with the rank)
    net, loss = MODULES["encoder"]()
    model = sw.shard(net, {"zero": 2}, optimizer=ADAMW, timeout_s=2.0)
    model.backward(loss(model, rank))
    if rank == 1:
        time.sleep(PATIENCE_S)
    model.step()


def test_who_waited_for_whom_is_told(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(RankFailedError, match="exit code 1"):
        run_ranks(2, waiting, port, str(tmp_path / "told"))
    answer = (tmp_path / "told").read_text()
    assert re.search(r"rank 0 .* waited 2 s .* for rank 1 .*raise timeout_s", answer, flags=re.DOTALL), answer


LEAVING = """
import os, sys, torch
import shardwright as sw

rank, how = int(os.environ["RANK"]), sys.argv[1]
torch.set_num_threads(1)
model = sw.shard(torch.nn.Linear(4, 4), {"zero": 2}, optimizer={"name": "adamw"}, timeout_s=60.0)
for step in range(3):
    if rank == 1 and step == 1:
        if how == "raises":
            raise ValueError("no more data")
        (sys.exit if how == "ends" else os._exit)(0)
    model.backward(model(torch.ones(2, 4)).sum())
    model.step()
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("how", "why"), [
    ("raises", "has left, at step 1, the end of a step: ValueError: no more data"),
    ("ends", "has left, at step 1, the end of a step: its script is over"),
    ("dies", "has been silent for "),
])  # fmt: skip
def test_who_left_is_told(how: str, why: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        around = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        around["MASTER_PORT"] = str(probe.getsockname()[1])
    ranks = [ForkedCommand(LEAVING, how, environment=around | {"RANK": str(rank)}) for rank in range(2)]
    try:
        answer, _ = (rank.communicate()[1] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[0].returncode == 1
    assert re.search(r"RunError: lost the connection in .* with rank 1: .*rank 1.* " + why, answer), answer


def weighed(rank: int, world: int) -> list[float]:
    """Gradients of a sum over targets, of which ranks and backwards have different numbers, and one of them none."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(4, 6, 3, generator=generator), torch.randn(4, 6, generator=generator)
    counts = (6, 1, 0, 3)  # of the two backwards of rank 0, and of those of rank 1
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    plain, results = copy.deepcopy(net), []
    for zero in range(4):
        model = sw.shard(copy.deepcopy(net), {"zero": zero}, optimizer=SGD, accumulate=2)
        for part in (0, 1):
            number = 2 * rank + part
            n = counts[number]
            model.backward((model(x[number, :n]).flatten() - y[number, :n]).square().sum(), num_targets=n)
        step = model.step()
        assert (step.num_targets, step.number, step.skipped) == (10, 1, False)
        plain.zero_grad()
        sums = [(plain(x[i, :n]).flatten() - y[i, :n]).square().sum() for i, n in enumerate(counts)]
        (sum(sums) / 10).backward()
        norm = float(sum(p.grad.square().sum() for p in plain.parameters()) ** 0.5)
        expected = {name: p - SGD["learning_rate"] * p.grad for name, p in plain.named_parameters()}
        after = model.state_dict()
        results += [abs(step.grad_norm - norm) / norm]
        results += [float((after[name] - of).abs().max()) for name, of in expected.items()]
        for _ in range(2):  # of no targets at all there is no mean
            model.backward(model(x[0, :0]).sum(), num_targets=0)
        step = model.step()
        assert (step.num_targets, step.number, step.skipped) == (0, 1, True)
        assert all(torch.equal(of, after[name]) for name, of in model.state_dict().items())
        for part in (0, 1):  # all ranks must be asked alike
            model.backward(model(x[0]).sum(), num_targets=None if (rank, part) == (1, 1) else 6)
        with pytest.raises(sw.RunError, match="3 of the 4 backwards of step 2 on all ranks said num_targets"):
            model.step()
    return results


def test_targets_of_all_ranks_weigh_the_same() -> None:
    for result in run_ranks(2, in_group, 2, weighed):
        assert max(result) < 1e-6
    with pytest.raises(sw.PlanError, match="num_targets is -1; use a whole number, 0 or more"):
        sw.shard(nn.Linear(2, 2), optimizer=SGD).backward(torch.zeros(()), num_targets=-1)


def test_units_are_the_modules_of_repeated_containers() -> None:
    result = module_units(example("resnet").ResNet(depth=2))
    assert list(result.units) == [f"groups.{group}.{block}" for group in range(3) for block in range(2)]
    encoder = module_units(example("encoder").Encoder())
    assert list(encoder.units) == ["layers.0", "layers.1"]
    assert [encoder.names[p] for p in encoder.regions[""]] == [
        "positions", "embedding.weight", "norm.weight", "norm.bias"
    ]  # fmt: skip
    tricky = module_units(Tricky())
    shared = {tricky.names[p] for p in tricky.regions[""]}
    assert {"layers.0.right.weight", "layers.1.left.weight", "bias"} <= shared
    assert "layers.0.frozen" not in tricky.names.values()
    tricky_net = Tricky()
    for compiled in (tricky_net.layers[1], tricky_net.layers[2].left):
        compiled._compiled_call_impl = compiled.forward  # as compile() leaves it, without loading a compiler
    (fault,) = compiled_faults(module_units(tricky_net), tricky_net)
    assert fault.startswith("layers.1 is compiled")
    plain = module_units(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))))
    assert list(plain.units) == []
    deep = module_units(nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Bilinear(2, 2, 2)]))
    assert list(deep.units) == ["0.0", "0.1", "1"]


class Again(nn.Module):
    """Layers that are computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.outer = nn.ModuleList(nn.Bilinear(6, 6, 6) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        for outer in self.outer:
            x = checkpoint(outer, x, x, use_reentrant=False)

        def rest(x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

        return checkpoint(rest, x, use_reentrant=False)


def test_state_of_the_whole_module_is_taken_up() -> None:
    net, _ = MODULES["tricky"]()
    model = trained("tricky", {"zero": 3})
    other = sw.shard(net, {"zero": 1}, optimizer=ADAMW)
    other.load_state_dict(model.state_dict())
    assert differences(other, _loaded(Tricky(), model)) == 0.0
    state = model.state_dict()
    state["layers.0.scale"] = torch.ones(3)
    state.pop("bias")
    with pytest.raises(sw.PlanError, match="2 faults"):
        other.load_state_dict(state)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_step_may_be_begun_anew(zero: int) -> None:
    def model() -> sw.ShardedModule:
        torch.manual_seed(1)
        return sw.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), plan={"zero": zero}, accumulate=2)

    def passes(of: sw.ShardedModule) -> None:
        for seed in (5, 6):
            of(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))).square().sum().backward()

    answer, wanted = model(), model()
    answer.zero_grad()  # as many loops begin: there is nothing to forget
    answer(torch.ones(3, 4)).sum().backward()
    answer.zero_grad()
    for _ in range(2):
        answer(torch.full((3, 4), float("nan"))).sum().backward()
    with pytest.raises(sw.RunError, match="norm of the gradient of step 1 is nan"):
        answer.step()
    for one in (answer, wanted):
        passes(one)
    assert answer.step() == wanted.step()
    for name, values in wanted.state_dict().items():
        assert torch.equal(answer.state_dict()[name], values), name


def _loaded(net: nn.Module, model: sw.ShardedModule) -> nn.Module:
    net.load_state_dict(model.state_dict())
    return net


def test_what_is_refused() -> None:
    def faults(module: nn.Module | None = None, **asked: Any) -> str:
        with pytest.raises(sw.PlanError) as refused:
            sw.shard(module or nn.Linear(2, 2), **asked)
        return str(refused.value)

    answer = faults(plan={"tp": 2, "schedule": "gpipe", "zero": 4}, optimizer={"rate": 1.0})
    assert "3 faults" not in answer and "plan.tp 2 cuts the matrices" in answer and "plan.schedule" in answer
    assert "plan.zero" in answer and "optimizer.rate" in answer
    answer = faults(plan={"tp": 2, "zero": 5}, optimizer={"name": "muon", "lr": 1}, precision={"compute": "fp16"})
    for part in ("plan.tp 2", "plan.zero = 5", "optimizer.lr is not", "'muon' updates whole", "'fp16' needs a scaled"):
        assert part in answer
    assert "1 rank was started" in faults(plan={"dp": 2})
    assert "does not divide" in faults(plan={"zero": 3, "zero_ranks": 2})
    assert "did you mean 0" not in faults(units=["left"]) and "no such submodule" in faults(units=["left"])
    assert "updates whole matrices" in faults(optimizer={"name": "muon"})
    assert "'fp16' needs a scaled loss" in faults(precision={"compute": "fp16"})
    assert "sparse=False" in faults(nn.Embedding(4, 4, sparse=True))
    assert "device meta" in faults(nn.Linear(2, 2, device="meta"))
    assert "no parameter that requires a gradient" in faults(nn.ReLU())
    for number in (0, 1.5, "2", True):
        assert f"accumulate, the backwards of a step, is {number!r}; use a whole number" in faults(accumulate=number)
    assert "timeout_s is 0" in faults(timeout_s=0) and "timeout_s is 'x'; use a number" in faults(timeout_s="x")
    answer = faults(plan=[1], optimizer=0.1, precision="bf16")
    assert (
        all(f"{name} is " in answer for name in ("plan", "optimizer", "precision")) and "a dictionary of its" in answer
    )
    assert "give a list of names of submodules" in faults(units="left")
    model = sw.shard(nn.Linear(2, 2))
    assert "sharded already" in faults(model)
    with pytest.raises(sw.RunError, match="stays where it is"):
        model.double()


def test_a_state_that_is_of_another_module_is_refused_with_every_fault() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4).requires_grad_(False))
    model = sw.shard(net, {"zero": 3}, optimizer=ADAMW)
    state = model.state_dict()
    wrong = {"0.weight": torch.zeros(3, 3), "1.running_mean": torch.zeros(5), "2.weight": torch.zeros(2), "2.bias": [1]}
    with pytest.raises(sw.PlanError) as refused:
        model.load_state_dict(state | wrong | {"other": torch.zeros(1)})
    assert len(refused.value.faults) == 5
    for printed in (
        "0.weight is [3, 3] in it, and [4, 4] here",
        "1.running_mean is [5]",
        "2.weight is [2]",
        "type list",
    ):
        assert printed in str(refused.value)
    with pytest.raises(sw.PlanError, match="give a dictionary of tensors"):
        model.load_state_dict([state])  # type: ignore[arg-type]
    with pytest.raises(sw.PlanError, match=r"prefix='x\.' is given"):
        model.state_dict(prefix="x.")
    assert all(torch.equal(state[name], of) for name, of in model.state_dict().items())
    model.load_state_dict(state)


def test_what_shard_refuses_has_no_account() -> None:
    complex_ones = nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=torch.complex64))])
    for module in (nn.Linear(4, 4).double(), complex_ones, nn.ReLU(), nn.Embedding(4, 4, sparse=True)):
        with pytest.raises(sw.PlanError) as refused:
            sw.memory_of(module)
        with pytest.raises(sw.PlanError) as of_shard:
            sw.shard(module)
        assert refused.value.faults == of_shard.value.faults
    with pytest.raises(sw.PlanError, match="plan is \\[1\\]; use a dictionary"):
        sw.memory_of(nn.Linear(4, 4), [1])  # type: ignore[arg-type]
    assert sw.memory_of(nn.Linear(4, 4, device="meta"), {"dp": np.int64(2)}).num_ranks == 2


def computed_again() -> float:
    torch.manual_seed(0)
    net, x = Again(), torch.randn(4, 6)
    plain = copy.deepcopy(net)
    model = sw.shard(net, {"zero": 3}, optimizer=SGD)
    for _ in range(2):
        model(x).square().mean().backward()
        plain.zero_grad()
        plain(x).square().mean().backward()
        model.step()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter -= 0.1 * parameter.grad
    return differences(model, plain)


def other_passes(rank: int, world: int) -> list[float]:
    """Evaluation, two forwards before one backward, activations that are computed again, wrong use."""
    net, loss = MODULES["tricky"]()
    plain = copy.deepcopy(net)
    model = sw.shard(net, {"zero": 3}, optimizer=SGD)
    with torch.inference_mode():
        assert torch.equal(loss(model, 3), loss(plain, 3))
    with torch.no_grad():
        assert torch.equal(loss(model, 0), loss(plain, 0))
    model.eval()
    plain.eval()
    assert torch.equal(loss(model, 1), loss(plain, 1))  # and no backward follows
    layer = net.layers[0].left.weight
    model.backward(loss(model, 2) + loss(model, 4))
    assert torch.isnan(layer).all() and not torch.isnan(plain.layers[0].left.weight).any()
    with model.gathered() as whole:
        assert torch.equal(whole.layers[0].left.weight, plain.layers[0].left.weight)
    (loss(plain, 2) + loss(plain, 4)).backward()
    model.step()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter -= 0.1 * parameter.grad if parameter.grad is not None else 0.0
    return [differences(model, plain), computed_again(), *wrong_use()]


def wrong_use() -> list[float]:
    net, loss = resnet_loss()
    model = sw.shard(net, {"zero": 3}, optimizer=SGD)
    with pytest.raises(sw.RunError, match=r"after 0 backwards, .*; call loss.backward\(\) before"):
        model.step()
    model.backward(loss(model, 0))
    with pytest.raises(sw.RunError, match="backward 2 since the last step"):
        model.backward(loss(model, 1))
    outside = sw.shard(Outside(), {"zero": 3}, optimizer=SGD)
    loss_there = outside(torch.randn(2, 3)).sum()
    assert torch.isnan(loss_there)
    with pytest.raises(sw.RunError, match="when its values had been released"):
        outside.backward(loss_there)
    return []


class Outside(nn.Module):
    """It uses the weight of a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2](self.layers[1](x @ self.layers[0].weight))


@st.composite
def modules(draw: st.DrawFn, depth: int = 3) -> nn.Module:
    """Containers within each other, of layers that may be used at several places."""
    layers = draw(st.just([nn.Linear(2, 2), nn.Linear(2, 2), nn.LayerNorm(2), nn.ReLU()]))

    def made(depth: int) -> nn.Module:
        if not depth or draw(st.integers(0, 3)) == 0:
            fresh = draw(st.booleans())
            return draw(st.sampled_from([nn.Linear(2, 2), nn.ReLU(), nn.LayerNorm(2)] if fresh else layers))
        kind = draw(st.sampled_from([nn.ModuleList, lambda of: nn.Sequential(*of)]))
        return kind([made(depth - 1) for _ in range(draw(st.integers(1, 3)))])

    return nn.ModuleDict({"first": made(depth), "second": made(depth)})


@given(module=modules())
@settings(max_examples=60, deadline=None)
def test_every_parameter_is_in_one_unit_that_is_around_all_its_uses(module: nn.Module) -> None:
    result = module_units(module)
    held = [parameter for of in result.regions.values() for parameter in of]
    assert len(held) == len(set(held)) and set(held) == {p for p in module.parameters() if p.requires_grad}
    uses = list(module.named_parameters(remove_duplicate=False))
    for region, parameters in result.regions.items():
        for parameter in parameters:
            paths = [path for path, used in uses if used is parameter]
            assert not region or all(path.startswith(f"{region}.") for path in paths)


class Numbers(nn.Module):
    """Buffers of many kinds, of which one is not kept."""

    def __init__(self, first: float) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.full((3,), first)))
        self.register_buffer("mask", torch.tensor([True, False, first > 1]))
        self.register_buffer("count", torch.tensor(int(first)))
        self.register_buffer("table", torch.full((4,), first), persistent=False)


def buffers(rank: int, world: int, folder: str) -> bool:
    model = sw.shard(Numbers(1.0 + rank), {"zero": 3}, optimizer=SGD)
    model.save(folder)
    return all(torch.equal(a, b) for a, b in zip(model.module.buffers(), Numbers(1.0).buffers(), strict=True))


def test_buffers_of_all_kinds_are_those_of_rank_0_and_are_saved(tmp_path: Path) -> None:
    assert all(run_ranks(2, in_group, 2, buffers, str(tmp_path)))
    model = sw.shard(Numbers(5.0), optimizer=SGD)
    model.load(tmp_path)
    assert torch.equal(model.module.turns, Numbers(1.0).turns) and torch.equal(model.module.mask, Numbers(1.0).mask)
    assert model.module.count == 1 and model.module.table[0] == 5.0


class Scaled(nn.Module):
    """A parameter without dims, frozen ones, and a parameter and a buffer without elements."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(scale))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("none", torch.zeros(0))


def test_numbers_and_frozen_parameters_are_saved_and_taken_up(tmp_path: Path) -> None:
    saved, taken = (sw.shard(Scaled(scale), plan={"zero": 3}, optimizer=ADAMW) for scale in (2.5, -1.0))
    saved.save(tmp_path)
    assert taken.load(tmp_path) == 0
    result, wanted = taken.state_dict(), saved.state_dict()
    assert float(result["scale"]) == 2.5 and all(torch.equal(result[name], wanted[name]) for name in wanted)
    frozen_since = Scaled(0.0)
    frozen_since.linear.requires_grad_(False)
    taken = sw.shard(frozen_since, optimizer=ADAMW)
    taken.load(tmp_path)
    assert torch.equal(taken.state_dict()["linear.weight"], wanted["linear.weight"])


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "sgd"])
def test_what_was_frozen_is_trained_later(tmp_path: Path, optimizer: str) -> None:
    def stepped(model: Any) -> Any:
        model.backward(model(torch.ones(2, 4)).square().sum())
        model.step()
        return model

    first = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first[0].requires_grad_(False)
    saved = stepped(sw.shard(first, optimizer={"name": optimizer}))
    saved.save(tmp_path)
    wanted = saved.state_dict()
    taken = sw.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), plan={"zero": 3}, optimizer={"name": optimizer})
    assert taken.load(tmp_path) == 1
    assert all(torch.equal(values, wanted[name]) for name, values in taken.state_dict().items())
    stepped(taken)
    assert all(not torch.equal(values, wanted[name]) for name, values in taken.state_dict().items())


def test_other_passes() -> None:
    for result in run_ranks(2, in_group, 2, other_passes):
        assert max(result) < 1e-6
