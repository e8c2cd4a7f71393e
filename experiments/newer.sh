#!/usr/bin/env bash
# The queue behind the tables of the newer global methods: the digits with a small, equal tuning budget, CIFAR-10's first
# 30 rounds, and 500 rounds of the best.
#
#   experiments/newer.sh DATA_DIR [FOLDER]      # FOLDER: of the runs, default runs/newer
#
# DATA_DIR holds cifar10/3.0.2 as TensorFlow Datasets writes it. Finished runs are skipped and broken ones go on, so the
# same command continues the queue after any interruption. SWEEP_FLAGS=--kept=experiments/results leaves out the runs
# whose metrics are kept.
#
# python experiments/record.py keep FOLDER/digits --name=digits_newer_300 (and so on) then keeps the metrics.
set -euo pipefail
data="$1" folder="${2:-runs/newer}"
cd "$(dirname "$0")/.."

sweep() { # name of the sub-folder, then flags
  local name="$1"
  shift
  "${PYTHON:-python}" -m fedjax_mr.sweep --devices=1 --sweep_dir="$folder/$name" ${SWEEP_FLAGS:-} "$@" || echo "$name: code $?"
}

newer=feddyn,feddc,fedntd,fedlc,fedsam,mofedsam,fedgamma,fedspeed,fedsmoo,fedswa,fedmoswa,fedmerge,heterofl,adaptivefl

# 1. Every method has three learning rates on one seed that the tables do not have. By validation accuracy (analysis best
#    FOLDER/tuning --over=lr): results/digits_newer_tuning.
sweep tuning --flagfile=exp/quickstart.flags --strategies=fedavg,scaffold,$newer --seeds=10 --rounds=100 \
  --validation_share=0.2 --eval_clients --grid=lr=0.02,0.05,0.1
# 2. The main job's 300 rounds at each one's own rate
rates() { sweep digits --flagfile=exp/quickstart.flags --seeds=0:3 --grid=alpha=0.5,0.1 --lr="$1" --strategies="$2"; }
rates 0.02 scaffold,fedgamma,fedsam,fedspeed,mofedsam
rates 0.05 feddyn,feddc,fedsmoo,fedmerge,heterofl,adaptivefl
rates 0.1 fedavg,fedntd,fedlc,fedswa,fedmoswa
# 3. CIFAR-10, Dirichlet(0.5): two learning rates for each over 10 rounds on a seed of its own, FedAvg's published one and
#    one five times as large (results/cifar10_newer_tuning)
sweep cifar10_tuning --flagfile=exp/cifar10.flags --data_dir="$data" --strategies=fedavg,scaffold,$newer --seeds=10 \
  --rounds=10 --eval_every=10 --validation_share=0.2 --eval_clients --grid=lr=0.01,0.05
# 4. All for 30 rounds at the better one, which is the larger for each of them
sweep cifar10_30 --flagfile=exp/cifar10.flags --data_dir="$data" --seeds=0 --rounds=30 --lr=0.05 \
  --strategies=fedavg,scaffold,$newer
# 5. The best three of the new ones for all 500, at the FedMR authors' 0.01
sweep cifar10 --flagfile=exp/cifar10.flags --data_dir="$data" --seeds=0 --strategies=fedntd,fedgamma,fedlc
