"""The decoder on one rank, with torch's own optimizer: a few steps on one sentence.

python examples/one_rank.py
"""

import torch

from shardwright.config.load import make_job
from shardwright.config.plan import PlanSpec
from shardwright.model.decoder import DecoderStage, stage_span
from shardwright.parallel.comm.collectives import Axis
from shardwright.parallel.comm.ledger import Ledger
from shardwright.parallel.tensor.linear import LayerSharding
from shardwright.parallel.tensor.parameter import placed_parameters

TEXT = b"a plan is data, and what is predicted is what runs; "
CPU = torch.device("cpu")


def main() -> None:
    """Train 40 steps, and print the loss of every tenth."""
    shape = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 256, "sequence": len(TEXT) - 1}
    model = make_job({"model": shape}).model
    alone = Axis("tp", (0,), 0, None, Ledger(CPU), None)
    stage = DecoderStage(model, stage_span(PlanSpec(), model.layers, 0), LayerSharding.of_tp(alone)).initialise(0, CPU)
    parameters = list(placed_parameters(stage).values())
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    tokens = torch.tensor([list(TEXT)])
    for step in range(40):
        loss = stage(tokens[:, :-1], tokens[:, 1:])
        loss.backward()  # the loss is computed here, chunk by chunk with its gradients
        for parameter in parameters:  # layers add up gradients in memory of their own, which training shards
            parameter.grad, parameter.has_gradient = parameter.gradient, False
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
