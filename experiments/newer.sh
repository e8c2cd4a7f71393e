#!/usr/bin/env bash
# Train the runs of notebook/newer.md, the newer global methods: the digits with a small, equal tuning budget, the first 30
# rounds of CIFAR-10, and 500 rounds of the best.
#
#   experiments/newer.sh DATA_DIR [FOLDER]      # FOLDER: folder of the runs. Default: runs/newer
#
# DATA_DIR holds cifar10/3.0.2 as TensorFlow Datasets writes it. The same command continues after an interruption: it skips
# finished runs and resumes unfinished ones. SWEEP_FLAGS=--kept=experiments/results skips the runs that are kept there.
#
# python experiments/record.py keep FOLDER/digits --name=digits_newer_300 (and so on) then keeps the runs.
set -euo pipefail
data="$1" folder="${2:-runs/newer}"
cd "$(dirname "$0")/.."

sweep() { # name of the sub-folder, then flags
  local name="$1"
  shift
  "${PYTHON:-python}" -m fedjax_mr.sweep --devices=1 --sweep_dir="$folder/$name" ${SWEEP_FLAGS:-} "$@" || echo "$name: code $?"
}

newer=feddyn,feddc,fedntd,fedlc,fedsam,mofedsam,fedgamma,fedspeed,fedsmoo,fedswa,fedmoswa,fedmerge,heterofl,adaptivefl

# 1. Three learning rates per method on a seed that is not in the tables. Selected by validation accuracy (analysis best
#    FOLDER/tuning --over=lr): results/digits_newer_tuning.jsonl.gz
sweep tuning --flagfile=exp/quickstart.flags --strategies=fedavg,scaffold,$newer --seeds=10 --rounds=100 \
  --validation_share=0.2 --eval_clients --grid=lr=0.02,0.05,0.1
# 2. 300 rounds of the quickstart setting at the best rate of each method
rates() { sweep digits --flagfile=exp/quickstart.flags --seeds=0:3 --grid=alpha=0.5,0.1 --lr="$1" --strategies="$2"; }
rates 0.02 scaffold,fedgamma,fedsam,fedspeed,mofedsam
rates 0.05 feddyn,feddc,fedsmoo,fedmerge,heterofl,adaptivefl
rates 0.1 fedavg,fedntd,fedlc,fedswa,fedmoswa
# 3. CIFAR-10, Dirichlet(0.5): two learning rates per method, 10 rounds on a separate seed. FedAvg's published rate and one
#    five times as large (results/cifar10_newer_tuning.jsonl.gz)
sweep cifar10_tuning --flagfile=exp/cifar10.flags --data_dir="$data" --strategies=fedavg,scaffold,$newer --seeds=10 \
  --rounds=10 --eval_every=10 --validation_share=0.2 --eval_clients --grid=lr=0.01,0.05
# 4. All methods for 30 rounds at the better rate, which is the larger one for each of them
sweep cifar10_30 --flagfile=exp/cifar10.flags --data_dir="$data" --seeds=0 --rounds=30 --lr=0.05 \
  --strategies=fedavg,scaffold,$newer
# 5. The best three of the newer methods for all 500 rounds, at 0.01 as FedMR's authors
sweep cifar10 --flagfile=exp/cifar10.flags --data_dir="$data" --seeds=0 --strategies=fedntd,fedgamma,fedlc
