#!/usr/bin/env bash
# Train the runs of notebook/clock.md: accuracy against simulated time, synchronous and asynchronous methods, on five
# classes of devices, 10 clients in flight.
#
#   experiments/clock.sh DATA_DIR [FOLDER [digits]]      # FOLDER: folder of the runs. Default: runs/clock
#
# digits: only the runs of the digits, which need no data. The others: CIFAR-10, LeNet-5, Dirichlet(0.5).
# All methods have the same number of client trainings: 100 rounds of 10 are 1,000 versions of one arrival.
#
# The same command continues after an interruption. Two such commands with the same FOLDER share the work, one core each.
# SWEEP_FLAGS=--kept=experiments/results skips the runs that are kept there.
set -euo pipefail
data="$1" folder="${2:-runs/clock}"
cd "$(dirname "$0")/.."

sweep() { # flags; the last one of a name counts, so a flag file comes first
  "${PYTHON:-python}" -m fedjax_mr.sweep "$@" --fleet=classes --devices=1 ${SWEEP_FLAGS:-} || echo "code $?"
}

# trainings NAME ROUNDS EVERY BUDGET [flags]: all methods. ROUNDS and EVERY count synchronous rounds of 10 clients,
# BUDGET is the simulated seconds by which GitFL shifts its selection: about what its versions take.
trainings() {
  local name="$1" rounds="$2" every="$3" budget="$4"
  shift 4
  local all=("$@" --sweep_dir="$folder/$name")
  local one=(--mode=async --in_flight=10 --cohort=1 --rounds=$((10 * rounds)) --eval_every=$((10 * every)))
  local five=(--mode=async --in_flight=10 --cohort=5 --rounds=$((2 * rounds)) --eval_every=$((2 * every)))
  local synchronous=(--cohort=10 --rounds="$rounds" --eval_every="$every")
  sweep "${all[@]}" "${synchronous[@]}" --strategies=fedavg,fedmr,fedcross
  sweep "${all[@]}" "${synchronous[@]}" --strategies=fedavg --deadline=350 --late=drop
  sweep "${all[@]}" "${synchronous[@]}" --strategies=fedavg --deadline=350 --late=partial
  sweep "${all[@]}" "${five[@]}" --strategies=fedmr
  sweep "${all[@]}" "${five[@]}" --strategies=fedbuff --refill=arrival
  sweep "${all[@]}" "${one[@]}" --strategies=fedasync,fedcross
  sweep "${all[@]}" "${one[@]}" --import=experiments/plugins/cabafl.py --strategies=cabafl
  sweep "${all[@]}" "${one[@]}" --strategies=gitfl --gitfl_budget="$budget"
}

trainings digits 100 5 28000 --seeds=0:2
[ "${3:-}" = digits ] && exit
trainings cifar10 300 5 84000 --flagfile=exp/cifar10.flags --data_dir="$data" --seeds=0
