#!/bin/bash
# AI Runtime runs this on each node, with the numbers of the node and of all nodes in these variables.
set -euo pipefail
program=$(find "$CODE_SOURCE_PATH" -name train.py -print -quit)
exec torchrun --nnodes="$NUM_NODES" --node-rank="$NODE_RANK" --nproc-per-node="$LOCAL_WORLD_SIZE" \
    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "$program"
