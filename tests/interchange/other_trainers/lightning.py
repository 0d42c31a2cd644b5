"""A training program."""

import lightning
from lightning.pytorch.strategies import FSDPStrategy
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

NODES = 2


def letters():
    """The data."""


def main():
    model = AutoModelForCausalLM.from_pretrained("harbour/Harbour-8B")
    loader = DataLoader(letters(), batch_size=2, num_workers=4)
    trainer = lightning.Trainer(
        accelerator="gpu",
        devices=8,
        num_nodes=NODES,
        strategy=FSDPStrategy(sharding_strategy="SHARD_GRAD_OP", activation_checkpointing_policy={object}),
        precision="bf16-mixed",
        max_steps=500,
        accumulate_grad_batches=4,
        gradient_clip_val=1.0,
        log_every_n_steps=5,
    )
    trainer.fit(model, loader)
