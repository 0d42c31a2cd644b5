"""Blocks of many families are theirs: same weights, same logits, loss and gradients as transformers' models."""

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from block_families import FAMILIES, Family, our_layout, reference
from hugging_face import our_gradients
from shardwright.config.plan import PlanSpec
from shardwright.model.decoder import DecoderStage, stage_span
from shardwright.parallel.comm.process_groups import make_mesh
from shardwright.parallel.tensor.linear import LayerSharding
from shardwright.parallel.tensor.parameter import placed_parameters

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
# Some hundreds of float32: a gradient is a sum over tokens, of products that each came through as many sums.
ROUNDINGS = 512 * 2.0**-24


def both(family: Family):
    """Ours and theirs, with the same weights."""
    theirs, spec = reference(family), family.spec
    mesh = make_mesh(PlanSpec(), 0, torch.device("cpu"), 30)
    ours = DecoderStage(spec, stage_span(PlanSpec(), spec.layers, 0), LayerSharding.of_tp(mesh.tp))
    ours.initialise(0, torch.device("cpu"))
    if spec.tied_embeddings:
        ours.head.weight.data = ours.embedding.weight.data
    weights = our_layout(family, dict(theirs.named_parameters()), are_weights=True)
    with torch.no_grad():
        for parameter in placed_parameters(ours).values():
            parameter.copy_(
                weights.pop(parameter.place.name) if not parameter.place.is_tied else weights[parameter.place.name]
            )
    return ours, theirs


@pytest.mark.parametrize("name", FAMILIES)
def test_block_is_theirs(name: str):
    family = FAMILIES[name]
    spec, (ours, theirs) = family.spec, both(family)
    text = torch.randint(spec.vocab, (3, spec.sequence + 1), generator=torch.Generator().manual_seed(2))
    tokens, targets = text[:, :-1], text[:, 1:]
    their_logits = theirs(tokens).logits
    with torch.no_grad():
        assert_close(ours.logits(ours(tokens)).transpose(0, 1), their_logits.detach(), **TOLERANCE)
    assert their_logits.std() > 0.3, "logits are too small for the tolerance to say something"
    their_loss = functional.cross_entropy(their_logits.flatten(0, 1), targets.flatten())
    our_loss = ours(tokens, targets)
    their_loss.backward()
    our_loss.backward()
    assert_close(our_loss, their_loss, **TOLERANCE)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    expected, actual = our_layout(family, gradients, are_weights=False), our_gradients(ours)
    assert actual.keys() == expected.keys()
    for tensor, gradient in expected.items():
        worst, largest = (actual[tensor] - gradient).abs().max(), gradient.abs().max()
        assert worst < ROUNDINGS * largest, f"gradient of {tensor}"
