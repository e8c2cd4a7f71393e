#!/usr/bin/env bash
# Everything that only a GPU can tell, without a network: is it right there, how fast is it beside PyTorch on the same GPU,
# which settings are best, and the runs of the record that take hours elsewhere. A call takes at most nine minutes. The same
# call again skips the parts that have finished, and goes on with the record's runs.
#
#   experiments/lab/gpu.sh [--out=FOLDER] [--wheels=FOLDER] [--data_dir=FOLDER] [--only=PART,...] [--minutes=9] [--dry_run]
#
# Needs Python 3.11 or newer with JAX for CUDA and the packages of pyproject.toml (PYTHON=... chooses another Python). The
# package itself need not be installed. --wheels is a folder of wheels of what is missing. Without PyTorch for CUDA its rows
# are left out. Written to FOLDER (default: runs/gpu) after every row: gpu.json, gpu.txt (the tables), gpu.log.
# --dry_run tries every part on the CPU with tiny sizes. --help lists the parts.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
exec "${PYTHON:-python3}" "$here/gpu.py" "$@"
