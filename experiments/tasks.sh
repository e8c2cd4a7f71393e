#!/usr/bin/env bash
# Train the runs of notebook/tasks.md: seven methods on one federation for each task, three seeds, the same settings for all.
#
#   DATA=FOLDER experiments/tasks.sh [FOLDER]      # DATA: see plugins/letters_of_roles.py; FOLDER: the runs. Default: runs/tasks
#
# The same command continues after an interruption: it skips finished runs and resumes unfinished ones. ONLY=TASK trains one
# task, and LR=NUMBER replaces its learning rate. TUNE=1 tries four learning rates of FedAvg on seed 10 in FOLDER/tuning;
# `python -m fedjax_mr.analysis best FOLDER/tuning/TASK --over=lr` chooses by the clients' validation samples. The rates of
# multilabel, movielens, segmentation and language were chosen so; the others were set without a search. METHODS=NAMES
# replaces the methods.
#
# python experiments/record.py keep FOLDER/TASK --name=tasks_TASK then keeps the runs.
set -euo pipefail
folder="${1:-runs/tasks}"
cd "$(dirname "$0")/.."
data=(${DATA:+--data_dir="$DATA"})
methods=${METHODS:-fedavg,fedmr,fedcross,scaffold,ditto,local,centralized}

sweep() { # name of the task, learning rate, then flags
  local name="$1" lr="$2"
  shift 2
  if [ "${TUNE:-0}" = 1 ]; then
    "${PYTHON:-python}" -m fedjax_mr.sweep --devices=1 --sweep_dir="$folder/tuning/$name" --partition=natural --clients=0 \
      --strategies="${METHODS:-fedavg}" --seeds=10 --validation_share=0.1 --grid=lr="${RATES:-0.01,0.03,0.1,0.3}" "$@" || echo "$name: code $?"
  else
    "${PYTHON:-python}" -m fedjax_mr.sweep --devices=1 --sweep_dir="$folder/$name" --partition=natural --clients=0 \
      --strategies="$methods" --seeds=0:3 --eval_clients --lr="$lr" ${SWEEP_FLAGS:-} "$@" || echo "$name: code $?"
  fi
}

want() { [ -z "${ONLY:-}" ] || [ "${ONLY:-}" = "$1" ]; }
want survival && sweep survival "${LR:-0.1}" --dataset=lung --model=mlp_table --cohort=9 --rounds=40 --batch_size=64 \
  --local_epochs=2
want multilabel && sweep multilabel "${LR:-0.3}" --import=experiments/plugins/digit_properties.py \
  --dataset=digit_properties --model=cnn_digits --cohort=5 --rounds=60
want classification && sweep classification "${LR:-0.1}" --dataset=watch --model=gru --cohort=5 --rounds=40 \
  --local_epochs=2 --batch_size=20 --metrics=macro_f1,accuracy,auroc
want regression && sweep regression "${LR:-0.03}" --dataset=flights --model=mlp_table --cohort=8 --rounds=30 \
  --local_epochs=1 --batch_size=100
want movielens && methods=${METHODS:-fedavg,fedsubavg,fedper,local} sweep movielens "${LR:-0.03}" \
  --dataset=movielens --model=mlp_table --fedper_part='columns/column0/*' --cohort=50 --rounds=300 --local_epochs=2 \
  --batch_size=10
want segmentation && sweep segmentation "${LR:-0.3}" --dataset=masks --model=unet --cohort=10 --rounds=20 \
  --local_epochs=2 --batch_size=20
want language && sweep language "${LR:-3}" "${data[@]}" --import=experiments/plugins/letters_of_roles.py --dataset=roles \
  --model=lstm1 --cohort=5 --rounds=40 --local_epochs=1 --batch_size=10
true
