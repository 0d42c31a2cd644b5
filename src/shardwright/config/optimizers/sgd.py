"""Stochastic gradient descent, with momentum. Sutskever et al. 2013 (PMLR 28(3))."""

from shardwright.config.optimizer_facts import OptimizerFacts

FACTS = OptimizerFacts(
    name="sgd",
    place=30,
    title="SGD",
    rule="shardwright.parallel.optimizers.elementwise:sgd",
    moments=lambda spec: ("momentum_buffer",) if spec.momentum > 0 else (),
    decays=("momentum",),
    reads=frozenset({"momentum"}),
)
