"""Claims about models: a number of parameters that their widths do not make. A note of each prediction says so, too, of
models whose files state the told number; here a name is enough."""

import math
import re

from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.phrase import Phrase, say
from shardwright.explain.contradictions.told_claim import ToldClaim
from shardwright.sharding.stage_parameters import num_parameters

# A number of parameters in the name of a model: "100b" in "gpt-100b", and neither "7b" in "mixtral-8x7b" nor "a3b".
_SIZE = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)([mbt])(?![a-z0-9])")
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}
_FAR = 1.4  # names round, and some leave tables of large vocabularies out


def another_size(job: JobSpec) -> Phrase | None:
    """A name, or a told number of parameters, that is far from the model's, with its tables and without them."""
    sizes = [float(number) * _UNITS[unit] for number, unit in _SIZE.findall(job.model.name.lower())]
    if not sizes and not job.model.told_parameters_b:
        return None
    model, shape = job.model, shape_of(job.model)
    told = model.told_parameters_b * _UNITS["b"] or max(sizes)
    whole = num_parameters(model)
    of_layers = whole - shape.table_elements * (1 if shape.shares_table else 2)
    if any(told / _FAR < size < told * _FAR for size in (whole, of_layers)):
        return None
    return say(
        "{layers:,} layers of {hidden:,} with an inner width of {ffn:,} have {of_layers:,.4g} billion parameters, with "
        "tables {whole:,.4g} billion; for {told:,g} billion the widths would have to be {share:.0f} % of these",
        layers=model.layers,
        hidden=model.hidden,
        ffn=model.ffn,
        of_layers=of_layers / 1e9,
        whole=whole / 1e9,
        told=told / 1e9,
        share=100 * math.sqrt(told / of_layers),
    )


CLAIMS = (ToldClaim("another-size", say("the model has as many parameters as its name says"), another_size),)
