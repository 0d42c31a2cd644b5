"""A generation of training software: its kernels, its fused operators, its overlaps.

A prediction takes from it whose kernels its elementwise operators are, because fusing changes the bytes that these
move (elementwise_kernels.py). Other numbers of bytes are (forward, backward) per element of the operator's tensor. They
are counted from the reads and writes of the kernels, not fitted.
"""

from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field

from shardwright.config import catalog, largest
from shardwright.config.adapter_code import AdapterMaker
from shardwright.config.attention_kernels import ATTENTION_KERNELS, KernelName
from shardwright.config.catalog_entry import read_entry
from shardwright.config.context_facts import ContextMethod
from shardwright.config.elementwise_kernels import (
    ActivationKernels,
    LossKernels,
    NormKernels,
    ResidualKernels,
    RotaryKernels,
)
from shardwright.config.field_types import Month
from shardwright.config.host_facts import HostFactsSpec
from shardwright.config.optimizer_facts import OptimizerName
from shardwright.config.product_modules import ModuleMaker
from shardwright.config.recompute_facts import RecomputeName
from shardwright.config.recompute_policy import RecomputedName
from shardwright.config.schedule_facts import ScheduleName
from shardwright.config.software_changes import changed_fields
from shardwright.config.software_memory import SoftwareMemorySpec
from shardwright.config.update_passes import GradientPass, UpdatePass
from shardwright.config.usual_runs import UsualSettingsSpec, UsualSpec
from shardwright.config.zero_facts import ZeroFactsSpec

Number = Annotated[float, Field(ge=0, le=largest.BYTES_BY_ELEMENT)]
Bytes = tuple[Number, Number]  # in the forward, in the backward
Counts = tuple[Number, Number]  # of kernels, in the forward and in the backward
# Dropout of scores in 16 bits and its backward: each reads 2 bytes, reads or writes a byte of the mask, and writes 2.
_DROPOUT = 5.0


class SoftwareSpec(SoftwareMemorySpec):
    """One generation of one framework."""

    name: str
    is_own: bool = Field(
        False,
        description="It is this runtime, whose memory is counted exactly (shardwright estimate) and not from the "
        "numbers here, where a job says all that it takes.",
    )
    is_usual: bool = Field(
        False,
        description="Many people run it, so that plans of this runtime are priced as it, too, where they are shown.",
    )
    title: str = Field("", description="Its name and generation, in a few words.")
    source: str = Field(description="Where these facts are from.")
    like: str = Field(
        "",
        description="Software, by its catalog name or TOML file, whose fields hold where this entry has none, but for "
        "its is_own, is_usual, title, source, frameworks, since, compiled and usual.",
    )
    frameworks: tuple[str, ...] = Field(
        (), description="Names by which people call it; generations of one framework share one."
    )
    since: Month = Field("", description="Month from which its framework was this generation, as 2023-10.")
    compiled: bool | None = Field(
        None, description="Its blocks are compiled, where its framework is used with and without."
    )
    usual: UsualSpec | None = Field(
        None, description="Of which runs it is assumed from then on, if nothing says what ran them; left out, of none."
    )
    usual_settings: tuple[UsualSettingsSpec, ...] = Field(
        (), description="Settings of measured runs that say nothing of them: the first that hold."
    )
    calibration: str = Field("", description="Name of the calibration with constants of its own, if it has some.")
    attention: KernelName = Field(
        description="Attention: torch's operators, a fused softmax, FlashAttention 1 or 2, or cuDNN's / version 3."
    )
    norm: NormKernels = Field(description="Whose kernels norms are.")
    residual: ResidualKernels = Field(description="Whose kernels sums with the residual stream are.")
    activation: ActivationKernels = Field(description="Whose kernels activations of MLPs are.")
    rotary: RotaryKernels = Field(description="Whose kernels make query, key and value ready for attention.")
    loss: LossKernels = Field(description="Whose kernels the cross entropy is.")
    modules: ModuleMaker = Field("torch", description="Whose modules products are in, which keep the host busy.")
    bias: Bytes = Field((0.0, 0.0), description="Sum with a bias in a kernel of its own, by element of it.")
    ring: Bytes = Field(
        (0.0, 0.0),
        description="Where ranks share sequences, and keys come to queries rank by rank: what is merged, by element of "
        "queries and rank.",
    )
    capped: Bytes = Field(
        (0.0, 0.0), description="Soft cap of attention's scores in kernels of its own, by score that a query sees."
    )
    latent: Bytes | None = Field(
        None,
        description="Norms and copies of latents, by element of latents and of the rotary part of keys. Left out, the "
        "forward moves the forward bytes of a norm and 2 more, twice for each element of latents and once for each of "
        "the rotary part, and the backward moves twice as many.",
    )
    router: Bytes = Field((32.0, 32.0), description="Scores of experts, their choice and its counts, by logit.")
    choices: Bytes = Field((0.0, 0.0), description="The same, by logit and choice of a token.")
    router_input: Bytes = Field(
        (0.0, 0.0), description="Casts of the router's input, and sums of its gradients, by its elements."
    )
    dispatch: Bytes | None = Field(
        None,
        description="Rows brought into the order of their experts, by element of the rows that are sent; those that "
        "come from other ranks are copied once more. Left out, each is one copy, as on the way back.",
    )
    combine: Bytes | None = Field(
        None, description="Rows brought back and added up with the weights of choices, by the same."
    )
    expert_limits: Bytes = Field(
        (0.0, 0.0),
        description="Limits of the inputs of experts' activation in kernels of their own, by element that leaves it.",
    )
    expert_bias: Bytes = Field(
        (0.0, 0.0),
        description="Experts' last bias times the weights of choices, where products do not add it, by element of it.",
    )
    expert_weights: Bytes = Field(
        (0.0, 0.0), description="More for that bias where the weights of choices are in float32, by the same."
    )
    float32_weights: bool = Field(False, description="Tokens are sent with the weights of their choices in float32.")
    expert_slices: Bytes = Field(
        (0.0, 0.0), description="Where experts are computed one after the other: copies of rows, by their elements."
    )
    one_expert_slices: Bytes = Field((0.0, 0.0), description="The same, by element and expert that a rank holds.")
    softmax: Bytes | None = Field(
        None,
        description="Scale, mask, softmax and dropout, by element of the scores; left out, as its attention's kernel, "
        "and 5 bytes more each way where dropout's masks are kept.",
    )
    float8: Bytes = Field((7.0, 7.0), description="Casts to fp8 and their transposes, by element of a product's input.")
    float8_fused: bool = Field(
        True, description="Casts to fp8 are in part fused into other kernels; if not, all their bytes count."
    )
    float8_weight_gradients: bool = Field(
        True, description="Products of weight gradients are in fp8 too; if not, in 16 bits."
    )
    float8_gradient: Number = Field(
        0.0,
        description="Casts along tokens for weight gradients in fp8, where they are kernels of their own, by element "
        "of a product's input and of the gradient of what it gives.",
    )
    float8_gradient_kernels: Number = Field(0.0, description="Kernels more in the backward for these casts.")
    float8_gather: bool = Field(
        False, description="Where products are in fp8, parameters of layers are gathered in a byte each."
    )
    kernels: Counts = Field((25.0, 45.0), description="Kernels that one layer launches.")
    layer_norm_kernels: Counts | None = Field(
        None, description="The same with LayerNorms, biases and no gate, if it is not as many."
    )
    float8_kernels: Counts = Field((0.0, 0.0), description="Kernels more where products are in fp8.")
    head_norm_kernels: Counts = Field((0.0, 0.0), description="Kernels more where queries and keys have norms.")
    norm_kernels: Counts = Field(
        (1.0, 2.0), description="Kernels more for each norm of the residual stream that a layer has beyond two."
    )
    ring_kernels: Counts = Field((0.0, 0.0), description="Kernels more for each rank whose keys come to queries.")
    latent_kernels: Counts = Field((0.0, 0.0), description="Kernels more with latent attention.")
    routing_kernels: Counts = Field((0.0, 0.0), description="Kernels more in a layer with experts.")
    choice_kernels: Counts = Field((0.0, 0.0), description="Kernels more for each choice of a token.")
    expert_kernels: Counts = Field((0.0, 0.0), description="Kernels more for each expert that a rank holds.")
    float8_expert_kernels: Counts = Field(
        (0.0, 0.0), description="Kernels more for each such expert where products are in fp8."
    )
    expert_bias_kernels: Counts = Field(
        (0.0, 0.0), description="Kernels more for each such expert where experts have biases."
    )
    adapters: AdapterMaker = Field("", description="Whose code adapters are; left out, it has none.")
    nf4_kernels: Counts = Field((1.0, 1.0), description="Kernels more for each matrix of a layer in NF4.")
    adds: Literal["product", "apart", "shards"] = Field(
        "product",
        description="How a weight's gradient is added to what other microbatches made: its product adds it; it is a "
        "tensor of its own, which is added then; or shards of it are, after it was reduced.",
    )
    update: Number = Field(
        34.0,
        description="Bytes of an update, by element: Adam reads a gradient and reads and writes two moments and the "
        "master weight, all in float32, and writes the weight in 16 bits; the norm of the gradients reads them once "
        "more.",
    )
    update_passes: tuple[UpdatePass, ...] = Field(
        (),
        description="Kernels of an update beside these, by element that a rank updates: a cast of gradients to "
        "float32, the division by the loss scale, clipping, weights in 16 bits from their masters, Adam by operators.",
    )
    gradient_passes: tuple[GradientPass, ...] = Field(
        (),
        description="Kernels over all gradients of a rank once a step: zeros, the division by the number of replicas, "
        "copies for one reduction and back.",
    )
    bf16_moments_update: Number | None = Field(
        None,
        description="The same with moments in bf16; left out, 8 bytes fewer: each is read and written in 2 bytes.",
    )
    narrow_update: Number = Field(
        16.0,
        description="The same with weights, gradients and moments in 16 bits, without master weights: one kernel reads "
        "and writes them in 2 bytes each, and the norm reads gradients once more.",
    )
    other_updates: tuple[tuple[OptimizerName, Number], ...] = Field(
        (),
        description="The same with other optimizers than AdamW and Adam, of matrices, with elements on their way in 2 "
        "bytes; left out, 8 bytes fewer for each moment fewer.",
    )
    loss_in_backward: bool = Field(
        False,
        description="Logits are computed in the backward alone, chunk by chunk, with their gradients and both products "
        "of these; the forward of the last stage ends before the head.",
    )
    vocab_multiple: Annotated[int, Field(ge=1, le=largest.VOCAB)] = Field(
        1,
        description="Rows of each tp rank's part of the vocabulary's table are padded to a multiple of this; 1 where "
        "they are computed as they are.",
    )
    head_parallel: bool = Field(True, description="tp ranks share the loss; if not, logits are gathered on each.")
    aggregated_trees: bool = Field(
        False,
        description="NCCL is 2.23 or newer, which gathers and scatters by aggregated trees where each rank has a node.",
    )
    zero: ZeroFactsSpec = Field(ZeroFactsSpec(), description="Where ZeRO keeps shards and gradients, and its buffers.")
    host: HostFactsSpec = Field(HostFactsSpec(), description="What it does where optimizer state is in host memory.")
    dropout: bool = Field(False, description="Dropout masks are kept.")
    causal: bool = Field(True, description="Attention skips what causality masks.")
    gradient_bytes: Literal[2, 4] = Field(4, description="Bytes of a gradient that is added up.")
    reduce_bytes: Literal[2, 4] = Field(4, description="Bytes of a gradient on its way.")
    moment_bytes: Literal[2, 4] = Field(
        4, description="Bytes of each of an optimizer's moments, where a job does not say them."
    )
    gradient_buckets: Literal[0, 2, 4] = Field(
        0,
        description="Bytes by element of buckets in which gradients wait for those of other replicas, beside the "
        "gradients that are added up, where each rank has all of them; no more than those have.",
    )
    bucket_mib: Number = Field(
        0.0,
        description="MiB of parameters whose gradients are reduced together, in runs that do not say; 0 is all.",
    )
    bf16_gradient_bytes: Literal[0, 2, 4] = Field(
        0,
        description="Both of these where products are in bfloat16, whose 8 bits many will not add up in; 0 is as in "
        "other numbers.",
    )
    bf16_gradient_copy: Literal[0, 2] = Field(
        0,
        description="Bytes by element of gradients in bfloat16 that stay beside float32 ones, read without step_bytes.",
    )
    reduce_whole: bool = Field(False, description="ZeRO-1 sums gradients on every rank, as without it.")
    reduce_overlap: bool = Field(False, description="Gradients are reduced during the last backward.")
    masters: bool = Field(
        True,
        description="Parameters in 16 bits have a copy in float32; if not, they are in float32 and cast where used.",
    )
    shard_overlap: bool = Field(True, description="ZeRO-3 gathers a layer's parameters while another one computes.")
    shard_pieces: Annotated[int, Field(gt=0, le=largest.WORKSPACES)] = Field(
        1, description="Collectives in which ZeRO-3 gathers a layer's parameters."
    )
    gather_overlap: bool = Field(False, description="Updated parameters are gathered during the next forward.")
    broadcasts_updates: bool = Field(
        False,
        description="ZeRO-1 updates whole tensors on one rank each, which broadcast them one rank after the other; if "
        "not, all ranks gather equal shares at once.",
    )
    update_overlap: bool = Field(
        False, description="Updated parameters are gathered while others are updated, and waited for after that."
    )
    message_overlap: bool = Field(False, description="Messages of the pipeline pass while others compute.")
    message_split: bool = Field(True, description="tp ranks each send their part of a message.")
    tensor_overlap: bool = Field(False, description="Tensor-parallel collectives are hidden behind their products.")
    gathers_again: bool = Field(
        True,
        description="Under sequence parallel products keep a tp rank's share of their input, and gather the rest again "
        "for the weight gradient; if not, they keep what they gathered.",
    )
    sum_overlap: bool = Field(
        False,
        description="What tp ranks sum of an input gradient travels while the product's weight gradient is computed, "
        "where a schedule does not put that off.",
    )
    pair_overlap: bool = Field(
        True,
        description="Where a schedule pairs a forward with a backward, one computes while tokens of the other "
        "travel; if not, they run one after the other.",
    )
    expert_overlap: bool = Field(False, description="Tokens travel to and from experts while others are computed.")
    dispatch_bytes: Literal[1, 2] = Field(
        2, description="Bytes of an element on its way to experts, kept there as it came; what comes back has 2."
    )
    returned_kept: Literal[0, 2, 4] = Field(
        2,
        description="Bytes kept by element of what comes back from experts: 2, or 4 of float32, where it meets the "
        "weights of choices, whose gradients need it, 0 where experts apply the weights inside.",
    )
    key_gradient_bytes: Literal[0, 2, 4] = Field(
        0,
        description="Bytes of a gradient of a key or value on its way between the ranks that share a sequence; 0 is as "
        "of a key.",
    )
    expert_gather: bool = Field(
        False,
        description="Tokens are gathered on all ranks that share experts, and the results are summed and scattered.",
    )
    expert_dedupe: bool = Field(
        False,
        description="A token crosses the network once for each domain that has experts for it, not for each expert.",
    )
    expert_pipelined: bool = Field(
        False,
        description="A domain sends such tokens on to its ranks while it receives others; if not, one after the other.",
    )
    graphs_step: bool = Field(
        False, description="A step is one CUDA graph, whose kernels the host does not launch one by one."
    )
    graphs_parts: bool = Field(
        False, description="Parts of layers before their experts are CUDA graphs, of which the same holds."
    )
    rank_dedupe: bool = Field(
        False,
        description="A token travels once to each rank that has experts for it, not once for each expert.",
    )
    stages_by_cost: bool = Field(
        False,
        description="Blocks are divided over stages by the size of their products, the head among them, not by number.",
    )
    schedules: tuple[ScheduleName, ...] | None = Field(
        None,
        description="Schedules of a pipeline that it has. It is left out where that is not known, as are the fields "
        "that follow, and for this runtime, which has all schedules.",
    )
    zero_stages: tuple[Literal[0, 1, 2, 3], ...] | None = Field(
        None, description="ZeRO stages that it has beside a pipeline."
    )
    sequence_parallel: bool | None = Field(None, description="It has sequence parallel.")
    context_parallel: bool | None = Field(None, description="It splits sequences over ranks.")
    context_methods: tuple[ContextMethod, ...] | None = Field(
        None, description="Methods by which it splits sequences over ranks."
    )
    recomputes: tuple[RecomputeName, ...] | None = Field(None, description="Policies of recomputation that it has.")
    recomputed_operators: tuple[tuple[RecomputedName, ...], ...] | None = Field(
        None, description="Sets of operators that its selective recomputation can compute again."
    )
    hybrid_sharding: bool | None = Field(None, description="It shards over a part of the replicas.")
    offloads: tuple[Literal["optimizer", "parameters", "activations"], ...] | None = Field(
        None, description="Of what it can keep in host memory."
    )
    uneven_stages: bool | None = Field(None, description="Its stages may hold other numbers of layers.")

    @property
    def scattered_bytes(self) -> int:
        """Bytes of a gradient on its way under ZeRO-3."""
        return self.zero.scattered_bytes or self.reduce_bytes

    @property
    def softmax_bytes(self) -> Bytes:
        """Bytes by score of scale, mask, softmax and dropout."""
        if self.softmax is not None:
            return self.softmax
        forward, backward = ATTENTION_KERNELS[self.attention].softmax
        return forward + _DROPOUT * self.dropout, backward + _DROPOUT * self.dropout

    @property
    def updated_bytes(self) -> float:
        """Bytes of an update per element, for the number type of its moments."""
        if self.moment_bytes == 4:
            return self.update
        return max(0.0, self.update - 8) if self.bf16_moments_update is None else self.bf16_moments_update


@lru_cache(maxsize=64)
def software_of(name: str) -> SoftwareSpec:
    """Software by its catalog name or TOML file. NAME+CHANGE+... is a catalog entry with changes of it
    (software_changes.py)."""
    if catalog.is_file(name) or "+" not in name:
        return read_entry("software", name, SoftwareSpec)
    name, *changes = name.split("+")
    software = read_entry("software", name, SoftwareSpec)
    for change in changes:
        software = software.model_copy(update=changed_fields(change, dict(software)))
    return software
