#!/bin/bash
# A Slurm cluster of one node on this machine, with its own files and ports, for tests and for trying things out.
#
#   tests/sweep/slurm.sh start FOLDER    then: export SLURM_CONF=FOLDER/slurm.conf; sinfo
#   tests/sweep/slurm.sh stop FOLDER     also ends its jobs
#
# It needs slurmctld, slurmd and munged (Debian: apt-get install slurmctld slurmd munge), neither systemd nor cgroups
# nor a database nor a certain user; jobs run as the user that starts it. The node claims four times the cores of this
# machine, so that several jobs run side by side, and two GPUs that are none, to try --slurm_gpus.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
action=$1
mkdir -p "$2"
folder=$(cd "$2" && pwd)

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'; }

start() {
    for program in munged slurmctld slurmd; do
        command -v $program >/dev/null || { echo "$program is not installed (apt-get install slurmctld slurmd munge)"; exit 1; }
    done
    mkdir -p "$folder"/{controller,node}
    (umask 077 && head -c 128 /dev/urandom >"$folder/munge.key")
    cat >"$folder/slurm.conf" <<END
ClusterName=tests
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$folder/controller
SlurmdSpoolDir=$folder/node
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=1,sched_interval=2,sched_min_interval=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait=30
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=$(hostname -s) NodeAddr=127.0.0.1 CPUs=$((4 * $(nproc))) RealMemory=4000 Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
    printf 'Name=gpu File=%s\n' /dev/null /dev/zero >"$folder/gres.conf"
    export SLURM_CONF=$folder/slurm.conf
    munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
        --log-file="$folder/munged.log" --seed-file="$folder/munged.seed"
    slurmctld -c
    slurmd
    for _ in $(seq 100); do
        if sinfo -h -t idle -o %n 2>/dev/null | grep -q .; then return; fi
        sleep 0.2
    done
    echo "the node is not idle after 20 s; see $folder/*.log"
    stop
    exit 1
}

stop() {
    export SLURM_CONF=$folder/slurm.conf
    scancel --user="$(id -un)" 2>/dev/null || true
    for _ in $(seq 100); do
        if [ -z "$(squeue -h 2>/dev/null)" ]; then break; fi
        sleep 0.2
    done
    for name in slurmd slurmctld munged; do
        if [ ! -s "$folder/$name.pid" ]; then continue; fi
        pid=$(cat "$folder/$name.pid")
        kill "$pid" 2>/dev/null || true
        for _ in $(seq 100); do
            if ! kill -0 "$pid" 2>/dev/null; then break; fi
            sleep 0.2
        done
    done
}

$action
