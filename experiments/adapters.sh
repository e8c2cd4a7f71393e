#!/usr/bin/env bash
# Train the runs of notebook/adapters.md on sentences: LoRA of rank 8 over a pretrained MiniLM, four domains with 25
# clients each, labels by Dirichlet(0.5), 5 clients per round.
#
#   experiments/adapters.sh DATA_DIR NETWORK_DIR [FOLDER]
#
# DATA_DIR has the prepared file of --dataset=sentiment, and NETWORK_DIR the weights and the tokenizer
# (docs/recipes/texts.md). FOLDER: folder of the runs. Default: runs/adapters
#
# The same command continues after an interruption. SWEEP_FLAGS=--rounds=60 trains longer, from the last checkpoints.
set -euo pipefail
data="$1" network="$2" folder="${3:-runs/adapters}"
cd "$(dirname "$0")/.."

sweep() {
  "${PYTHON:-python}" -m fedjax_mr.sweep --dataset=sentiment --data_dir="$data" --text_length=32 --model=minilm \
    --pretrained="$network" --partition=domain --alpha=0.5 --clients=100 --cohort=5 --local_epochs=1 --batch_size=16 \
    --optimizer=adam --lr=0.001 --rounds=30 --eval_every=10 --seeds=0 --devices=1 --sweep_dir="$folder" "$@" ${SWEEP_FLAGS:-} \
    || echo "code $?"
}

for strategy in fedit fedmr fedcross fedsalora ffalora fedexlora local_only; do
  sweep --strategies=$strategy --adapter=lora --lora_rank=8
done
# The classifier alone
sweep --strategies=fedavg --trainable='classifier/*'
