#!/bin/bash
#SBATCH --nodes=4
NODES=4
TP=${1:-2}
srun python examples/megatron_gpt_pretraining.py \
    --config-path=conf --config-name=hydra-base \
    trainer.devices=8 trainer.num_nodes=$NODES trainer.precision=bf16 \
    model.tensor_model_parallel_size=$TP \
    model.pipeline_model_parallel_size=4 \
    ++model.sequence_parallel=True \
    model.global_batch_size=64 'model.optim.betas=[0.9,0.95]' \
    ~model.make_vocab_size_divisible_by \
    exp_manager.create_wandb_logger=False
