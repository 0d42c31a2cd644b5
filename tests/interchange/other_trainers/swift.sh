#!/bin/bash
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
NNODES=2 \
NPROC_PER_NODE=4 \
megatron sft \
    --model harbour/Harbour-8B \
    --dataset 'harbour/letters' \
    --tensor_model_parallel_size 4 \
    --sequence_parallel true \
    --micro_batch_size 2 \
    --global_batch_size 32 \
    --recompute_granularity full \
    --recompute_method uniform \
    --recompute_num_layers 1 \
    --num_train_epochs 2 \
    --finetune true \
    --use_distributed_optimizer true \
    --lr 1e-5 \
    --max_length 4096 \
    --packing true \
    --save_steps 100 \
    --attention_backend flash
