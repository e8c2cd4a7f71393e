#!/usr/bin/env bash
# Train the runs of notebook/adapters.md, "Sentences": LoRA over a pretrained MiniLM, 100 clients in four domains, their
# labels by Dirichlet(0.5), 10 clients and one epoch per round, 60 rounds, one learning rate for all methods.
#
#   experiments/sentences.sh DATA_DIR NETWORK [FOLDER]      # FOLDER: folder of the runs. Default: runs/sentences
#
# DATA_DIR: as for --dataset=sentiment. NETWORK: folder of the network (docs/recipes/texts.md, "A pretrained encoder").
# A run takes 10 to 15 minutes of one core. The same command continues after an interruption.
set -euo pipefail
data="$(realpath "$1")" network="$(realpath "$2")" folder="${3:-runs/sentences}"
cd "$(dirname "$0")/.."
mkdir -p "$folder"
folder="$(realpath "$folder")"
PYTHON="$(command -v "${PYTHON:-python}")"
"$PYTHON" experiments/sentences.py "$data" "$folder/sentences.jsonl"
cd "$folder" # so that runs name their files without the folders of this machine
ln -sfn "$network" minilm

sweep() {
  "$PYTHON" -m fedjax_mr.sweep --dataset=sentences.jsonl --text_length=32 --model=minilm --pretrained=minilm \
    --partition=domain --alpha=0.5 --clients=100 --cohort=10 --local_epochs=1 --batch_size=8 --lr=0.01 --momentum=0.5 \
    --rounds=60 --eval_every=5 --devices=1 --sweep_dir=runs ${SWEEP_FLAGS:-} "$@" || echo "code $?"
}

sweep --adapter=lora --lora_rank=8 --fedexlora_weights=samples \
  --strategies=fedit,fedmr,fedcross,fedsalora,ffalora,fedexlora,local --seeds=0
sweep --trainable='classifier/*' --strategies=fedavg --seeds=0
sweep --adapter=lora --lora_rank=8 --lr=0.05 --strategies=fedit,fedmr,fedcross --seeds=0:3
sweep --trainable='classifier/*' --lr=0.05 --strategies=fedavg --seeds=0:3
sweep --adapter=lora --lora_rank=8 --lr=0.05 --fedexlora_weights=samples \
  --strategies=fedsalora,ffalora,fedexlora --seeds=0
