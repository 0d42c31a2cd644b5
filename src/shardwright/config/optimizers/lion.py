"""Lion: steps of constant size, with the sign of a mean of gradients. Chen et al. 2023 (arXiv 2302.06675)."""

from shardwright.config.optimizer_facts import OptimizerFacts

FACTS = OptimizerFacts(
    name="lion",
    place=40,
    title="Lion",
    rule="shardwright.parallel.optimizers.elementwise:lion",
    in_blocks=True,
    moments=lambda spec: ("exp_avg",),
    decays=("beta2",),
    reads=frozenset({"beta1", "beta2"}),
)
