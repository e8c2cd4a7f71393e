#!/usr/bin/env bash
# Train the runs of notebook/personal.md, the personal methods: the digits with 20 clients in every round, each with its own
# test samples (exp/fedme_digits.flags), after a small, equal tuning budget.
#
#   experiments/personal.sh [FOLDER]      # FOLDER: folder of the runs. Default: runs/personal
#
# The same command continues after an interruption: it skips finished runs and resumes unfinished ones.
# SWEEP_FLAGS=--kept=experiments/results skips the runs that are kept there.
#
# python experiments/record.py keep FOLDER/table --name=digits_personal (and so on) then keeps the runs.
set -euo pipefail
folder="${1:-runs/personal}"
cd "$(dirname "$0")/.."

sweep() { # name of the sub-folder, then flags
  local name="$1"
  shift
  "${PYTHON:-python}" -m fedjax_mr.sweep --devices=1 --sweep_dir="$folder/$name" --flagfile=exp/fedme_digits.flags \
    --eval_clients ${SWEEP_FLAGS:-} "$@" || echo "$name: code $?"
}

# One network for all clients; the same with BatchNorm; four random networks.
one=(--model=cnn_digits)
norm=(--model=cnn_digits_norm --import=experiments/plugins/digits_norm.py)
bayes=(--strategies=pfedbayes --model=cnn_digits --pfedbayes_zeta=0.1 --pfedbayes_rho=-5)

# 1. Three learning rates per method on a seed that is not in the table. Selected by the clients' validation samples
#    (analysis best FOLDER/tuning --over=lr): results/digits_personal_tuning.jsonl.gz
tuning() { sweep tuning --seeds=10 --grid=lr=0.02,0.05,0.1 "$@"; }
tuning "${one[@]}" --strategies=fedavg,ditto,fedrep,fedper,lgfedavg,pfedme,perfedavg,local
tuning "${norm[@]}" --strategies=fedavg,fedbn
tuning --strategies=fedme,local
prototypes=(--projection=64 --fedproto_evaluate=prototypes) # they need representations of equal width
tuning "${prototypes[@]}" --strategies=fedproto,fedtgp
sweep tuning --seeds=10 "${bayes[@]}" --grid=pfedbayes_lr=0.001,0.003,0.01
# 2. Three seeds at the best rate of each method
table() { # learning rate, then flags
  local lr="$1"
  shift
  sweep table --seeds=0:3 --eval_every=5 --lr="$lr" "$@"
}
table 0.1 "${one[@]}" --strategies=fedavg,fedrep,pfedme,perfedavg
table 0.02 "${one[@]}" --strategies=ditto,lgfedavg,local
table 0.05 "${one[@]}" --strategies=fedper
table 0.1 "${prototypes[@]}" --strategies=fedproto
table 0.05 "${prototypes[@]}" --strategies=fedtgp
table 0.02 "${norm[@]}" --strategies=fedavg,fedbn
table 0.1 --strategies=fedme,local
table 0.05 "${bayes[@]}" --pfedbayes_lr=0.001
