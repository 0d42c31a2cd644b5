"""A scale for each token and each output.

Gradients stay e5m2, as in the recipe with a scale for each tensor: a row of dy has all outputs of a token, and a scale
for the row does not narrow their range.
"""

from shardwright.config.float8_facts import Float8Facts

FACTS = Float8Facts(name="rowwise", place=30, activation="row", weight="row", gradient="e5m2")
