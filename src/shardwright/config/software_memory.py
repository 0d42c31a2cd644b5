"""Facts of what a generation of training software holds in memory: what its operators keep for the backward, what its
loss, its libraries and its update need, and how its allocator loses blocks.

Numbers are bytes by element of the tensor that is named.
"""

from typing import Annotated, Literal

from pydantic import Field

from shardwright.config import largest
from shardwright.config.base import Spec
from shardwright.config.update_blocks import UpdateBlocksSpec

Number = Annotated[float, Field(ge=0, le=largest.BYTES_BY_ELEMENT)]
Counts = tuple[Number, Number]  # in the forward, in the backward
Workspaces = Annotated[int, Field(ge=0, le=largest.WORKSPACES)]


class SoftwareMemorySpec(Spec):
    """Facts of memory; config/software.py has the others."""

    norm_kept: Number = Field(
        2.0,
        description="Bytes that a norm keeps for its backward, by element; a LayerNorm whose bytes are stated apart "
        "keeps its input.",
    )
    activation_kept: Number = Field(
        0.0,
        description="Bytes that the activation keeps beside the inputs of both products, by element that leaves it.",
    )
    copies_inputs: bool = Field(
        False,
        description="Without sequence parallel tp ranks give each column-parallel product a copy of its input, which "
        "it keeps; query, key and value are products of their own, and so are gate and up.",
    )
    float8_inputs: Literal[1, 2] = Field(
        2,
        description="Bytes by element of a product's input that is kept where products are in fp8: 1 as it was cast, 2 "
        "as it came.",
    )
    float8_weights: Literal[0, 1, 2] = Field(
        0,
        description="Bytes of casts by element of a layer's matrices that products in fp8 keep: 2 of a cast and its "
        "transpose.",
    )
    autocast: bool = Field(
        False,
        description="Weights are in float32, and products cast their inputs and weights to 16 bits and keep the casts, "
        "while norms and the residual stream stay in float32 (torch.autocast).",
    )
    whole_embedding: bool = Field(
        False, description="Each tp rank has the whole table of the embedding, with its gradients and its state."
    )
    enters_apart: bool = Field(
        False,
        description="tp ranks gather the input of each column-parallel product by itself, and sum its gradient so: of "
        "query, key, value, gate and up.",
    )
    rotary_kept: Number = Field(0.0, description="Bytes kept beside query, key and value, by their elements.")
    repeats_keys: bool = Field(
        False, description="Keys and values of a group are copied for each head of its queries, and kept as copies."
    )
    visits_in_float32: bool = Field(
        False,
        description="Ranks that share a sequence attend to one rank's keys after another's, merge what they get in "
        "float32, and add up and pass on gradients so (torch's context_parallel); else gradients of all keys that were "
        "gathered are scattered.",
    )
    logit_peak: Number = Field(6.0, description="Most bytes by logit while the loss is computed.")
    placeholder_bytes: Literal[0, 2] = Field(
        0,
        description="Bytes of a placeholder by element of a weight: products add weight gradients up themselves, and "
        "give autograd an empty tensor instead: one for each shape that weights of layers have, which stays, and that "
        "of the head, which is there during its backward.",
    )
    workspaces: tuple[Workspaces, Workspaces] = Field(
        (0, 0), description="Workspaces of 32 MiB that products take from the allocator: always, more with experts."
    )
    stage_kept: Number = Field(
        0.0, description="Bytes that a stage keeps of each microbatch in flight beside its layers', by output element."
    )
    queued: Counts = Field(
        (0.0, 0.0),
        description="Kernels and collectives of one layer that wait in a device's queue while the host is ahead, where "
        "tensors that a collective reads stay out of use until its stream has passed; 0 where they do not.",
    )
    gathers_anew: bool = Field(
        False,
        description="What tp ranks gather is a new tensor each time, which its own pass frees, so that it stays out of "
        "use as what a collective reads; else it has a buffer that stays.",
    )
    waits_at_messages: bool = Field(
        False,
        description="In a pipeline the host waits for its device at each message, so that it is ahead by one pass.",
    )
    gathers_copies: bool = Field(
        False,
        description="ZeRO-1 gathers updated parameters into contiguous copies: one of each rank's share, one of all.",
    )
    fresh_gradients: bool = Field(False, description="The first backward of a step makes the tensors of gradients.")
    lone_loss: bool = Field(
        False, description="Where gradients are made so, the loss of a step of one microbatch has none beside it."
    )
    expandable_segments: bool = Field(
        False,
        description="torch's allocator has segments that grow, so that little is lost between blocks.",
    )
    memory_counter: Literal["allocated", "reserved"] = Field(
        "allocated", description="Counter of torch's allocator that it reports as a run's memory."
    )
    step_bytes: Number = Field(
        0.0, description="Bytes of copies during the update, by element of the optimizer state of a rank."
    )
    splits_inputs: bool = Field(
        False,
        description="Inputs that layers keep to be recomputed are split over tp ranks, and gathered in the backward.",
    )
    gradient_copies: Literal[0, 6] = Field(
        0,
        description="Where gradients are in 16 bits: bytes by element of those of the step before and of float32 "
        "copies for the update, which stay through a step.",
    )
    casts_gradients: bool = Field(
        False,
        description="Where gradients are in 16 bits, the update makes float32 copies of them, when activations are "
        "free.",
    )
    moment_copies: Number = Field(
        0.0,
        description="Copies of one of the optimizer's moments that the update makes at once, when activations are "
        "free.",
    )
    update_blocks: UpdateBlocksSpec | None = Field(
        None, description="What ZeRO allocates to reduce gradients and update; left out, nothing."
    )
    bf16_update_blocks: UpdateBlocksSpec | None = Field(None, description="The same where products are in bfloat16.")
    gathered_layers: Annotated[int, Field(gt=0, le=2)] = Field(
        2,
        description="Layers whose parameters ZeRO-3 has gathered at once: 2 where the next one's come while one "
        "computes, 1 where layers are the turns of a loop, whose body gathers what it uses and reduces each gradient "
        "where it makes it.",
    )
