#!/usr/bin/env bash
# Train the runs of a comparison: a vision transformer from CIFAR-100 to CIFAR-10, Dirichlet(0.1), by adapters, as a
# whole, by the classifier alone, and as a whole from a random start. For a GPU: one core trains 36 to 40 images per second.
# The runs that are kept were made on a CPU by MODEL=vit_tiny_patch8 EPOCHS=8 ROUNDS=48, which leaves a quarter of the
# patches.
#
#   experiments/vit.sh DATA_DIR [FOLDER]      # FOLDER: folder of the runs. Default: runs/vit
#
# DATA_DIR holds cifar10/3.0.2 and cifar100/3.0.2 as TensorFlow Datasets writes them. The same command continues after an
# interruption. SIZE=small tries all commands in some minutes of a CPU with 80 images, FIRST=cifar10 without CIFAR-100.
set -euo pipefail
data="$(realpath "$1")" folder="${2:-runs/vit}"
cd "$(dirname "$0")/.."
PYTHON="$(command -v "${PYTHON:-python}")"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$folder"
cd "$folder" # so that runs name the exported network without the folders of this machine

common=(--data_dir="$data" --model="${MODEL:-vit_tiny}" --devices=1)
epochs=(--clients=1 --cohort=1 --partition=iid --rounds="${EPOCHS:-30}" --eval_every=2)
rounds=(--clients=100 --cohort=10 --partition=dirichlet --alpha=0.1 --local_epochs=1 --batch_size=50
  --rounds="${ROUNDS:-200}" --eval_every=4 --seeds=0 --sweep_dir=runs)
if [ "${SIZE:-}" = small ]; then
  epochs=(--clients=1 --cohort=1 --partition=bootstrap --samples_per_client=80 --rounds=1)
  rounds=(--clients=4 --cohort=2 --partition=bootstrap --samples_per_client=20 --rounds=1 --seeds=0 --sweep_dir=runs)
fi

if [ ! -f vit/network.json ]; then
  "$PYTHON" -m fedjax_mr.main "${common[@]}" "${epochs[@]}" --strategy=centralized --dataset="${FIRST:-cifar100}" \
    --optimizer=adam --lr=0.001 --batch_size=64 --local_epochs=1 --augment=crop_flip --run_dir=base $([ ! -d base ] || echo --resume)
  "$PYTHON" -m fedjax_mr.export base vit
fi
sweep() { "$PYTHON" -m fedjax_mr.sweep "${common[@]}" "${rounds[@]}" --dataset=cifar10 "$@" || echo "code $?"; }
sweep --strategies=fedavg,fedmr --pretrained=vit --adapter=lora --lora_rank=8 --lr=0.05 --seeds=0:3
sweep --strategies=fedavg --pretrained=vit --adapter=lora --lora_rank=8 --lr=0.02
sweep --strategies=fedavg,fedmr --pretrained=vit --lr=0.05
sweep --strategies=fedavg --pretrained=vit --trainable='classifier/*' --lr=0.05
sweep --strategies=fedavg --lr=0.05
