#!/usr/bin/env bash
# Train the runs of notebook/channel.md: compression, attacks and robust rules on CIFAR-10, LeNet-5, Dirichlet(0.5),
# 300 rounds, seed 0.
#
#   experiments/channel.sh DATA_DIR [FOLDER [digits]]      # FOLDER: folder of the runs. Default: runs/channel
#
# digits: only the runs of the digits, which need no data.
#
# The same command continues after an interruption. Two such commands with the same FOLDER share the work, one core each.
# SWEEP_FLAGS=--kept=experiments/results skips the runs that are kept there.
set -euo pipefail
data="$1" folder="${2:-runs/channel}"
cd "$(dirname "$0")/.."

sweep() {
  "${PYTHON:-python}" -m fedjax_mr.sweep --flagfile=exp/cifar10.flags --data_dir="$data" --devices=1 --rounds=300 \
    --seeds=0 --sweep_dir="$folder" ${SWEEP_FLAGS:-} "$@" || echo "code $?"
}

# 0. The embedded digits: 10 of 20 clients, 100 rounds, two seeds; minutes for all of them (notebook/channel.md)
digits() {
  "${PYTHON:-python}" -m fedjax_mr.sweep --strategies=fedavg,fedmr,fedcross,scaffold --cohort=10 --rounds=100 --seeds=0:2 \
    --sweep_dir="$folder/digits" ${SWEEP_FLAGS:-} "$@" || echo "code $?"
}
digits
digits --attack=sign_flip --attackers=0.2
digits --attack=sign_flip --attackers=0.2 --robust=multi_krum --robust_outliers=3
models=fedavg,fedmr,fedcross # SCAFFOLD refuses the median
digits --strategies=$models --attack=sign_flip --attackers=0.2 --robust=median --robust_outliers=3
digits --attack=alie --attackers=0.2
digits --strategies=$models --attack=alie --attackers=0.2 --robust=median --robust_outliers=3
digits --attack=alie --attackers=0.2 --robust=multi_krum --robust_outliers=3
digits --compress=topk --compress_ratio=0.01
digits --compress=topk --compress_ratio=0.01 --error_feedback=ef
digits --compress=int8 --compress_download=int8
digits --fleet=classes
digits --fleet=classes --mode=async --in_flight=20 --cohort=5 --rounds=200
# Clipping and noise, one seed; PYTHON must have the extra privacy
private() { digits --seeds=0 --partition=bootstrap_dirichlet "$@"; }
for clients in 10000 100; do
  for noise in 1 4; do
    private --strategies=fedavg --fedavg_weights=uniform --clients=$clients --dp_clip=0.1 --dp_noise=$noise --dp_noise_on=mean
    private --strategies=scaffold --clients=$clients --dp_clip=0.1 --dp_noise=$noise --dp_noise_on=mean
    private --strategies=fedmr,fedcross --clients=$clients --dp_clip=0.1 --dp_noise=$noise
    private --strategies=fedmr,fedcross --clients=$clients --dp_clip=0.01 --dp_noise=$noise
  done
done
[ "${3:-}" = digits ] && exit

# The most telling runs come first: 27 in all, 11 to 24 minutes of one core each
# 1. 20 % of the clients upload the opposite of their change; without and with Multi-Krum (f = 3 of 10)
sweep --strategies=$models --attack=sign_flip --attackers=0.2
sweep --strategies=$models --attack=sign_flip --attackers=0.2 --robust=multi_krum --robust_outliers=3
# 2. The largest 1 % of each tensor, with and without error feedback
sweep --strategies=$models --compress=topk --compress_ratio=0.01 --error_feedback=ef
sweep --strategies=$models --compress=topk --compress_ratio=0.01
# 3. 8 bits in both directions
sweep --strategies=$models --compress=int8 --compress_download=int8
# 4. The other rule, the other attack
sweep --strategies=$models --attack=sign_flip --attackers=0.2 --robust=median --robust_outliers=3
sweep --strategies=$models --attack=alie --attackers=0.2
# 5. SCAFFOLD, whose messages are twice as long
sweep --strategies=scaffold --attack=sign_flip --attackers=0.2
sweep --strategies=scaffold --attack=sign_flip --attackers=0.2 --robust=multi_krum --robust_outliers=3
sweep --strategies=scaffold --compress=topk --compress_ratio=0.01 --error_feedback=ef
sweep --strategies=scaffold --compress=topk --compress_ratio=0.01
sweep --strategies=scaffold --compress=int8 --compress_download=int8
sweep --strategies=scaffold --attack=alie --attackers=0.2
