#!/bin/bash
# A job of Megatron-LM's: `shardwright plan --from megatron docs/pretrain.sh --device a100-sxm-80g`
GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-4}
MODEL=(
    --num-layers 44 --hidden-size 6144 --num-attention-heads 48 --seq-length 2048 --max-position-embeddings 2048
    --tokenizer-type GPT2BPETokenizer --bf16
)
TRAINING=(
    --micro-batch-size 1 --global-batch-size 512 --train-iters 100000 --lr 1.0e-4 --min-lr 1.0e-5
    --lr-decay-style cosine --lr-warmup-iters 2000 --weight-decay 0.1 --clip-grad 1.0 --attention-dropout 0 --hidden-dropout 0
)
PLAN=(--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --recompute-granularity full
    --recompute-method uniform --recompute-num-layers 1)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES pretrain_gpt.py "${MODEL[@]}" "${TRAINING[@]}" \
    "${PLAN[@]}" --data-path corpus_text_document --split 99,1,0
