#!/usr/bin/env bash
# Train the runs of notebook/mixing.md: D-PSGD by graph, beside Gossip-MR, FedMR, FedCross and FedAvg, on the digits.
#
#   experiments/mixing.sh [FOLDER]      # FOLDER: folder of the runs. Default: runs/mixing
#
# 16 clients with Dirichlet(0.1), all of them in every round. The same command continues after an interruption.
# python experiments/record.py keep FOLDER --name=mixing_digits then keeps the runs.
set -euo pipefail
folder="${1:-runs/mixing}"
cd "$(dirname "$0")/.."

sweep() { # flags
  "${PYTHON:-python}" -m fedjax_mr.sweep --devices=1 --sweep_dir="$folder" --dataset=digits --model=mlp --clients=16 \
    --cohort=16 --partition=dirichlet --alpha=0.1 --rounds=60 --local_epochs=2 --batch_size=20 --lr=0.05 --eval_every=2 \
    --checkpoint_every=60 --seeds=0:3 "$@" ${SWEEP_FLAGS:-} || echo "code $?"
}

sweep --strategies=dpsgd --grid=dpsgd_graph=ring,torus,regular,exponential,one_peer,star,complete
sweep --strategies=gossipmr --grid=gossipmr_graph=ring,torus,complete
sweep --strategies=kgt --grid=kgt_graph=ring,complete
sweep --strategies=fedavg,fedmr,fedcross
