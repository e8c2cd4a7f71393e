#!/usr/bin/env bash
# Fine-tune SmolLM2-135M by 30 roles of Shakespeare (docs/recipes/language_models.md): LoRA over one frozen base, 4 roles per
# round, 20 rounds, one seed, the same settings for all methods.
#
#   WEIGHTS=FILE.gguf DATA=FOLDER experiments/smollm2.sh [FOLDER]   # DATA holds shakespeare_roles.json.gz (plugins/letters_of_roles.py)
#
# FOLDER has the texts and the runs. Default: runs/smollm2. The same command continues after an interruption. METHODS=NAMES
# replaces the methods, FLAGS adds flags. A run of 20 rounds trains on 81,920 tokens.
#
#   python experiments/record.py keep FOLDER/runs --name=smollm2_roles    # keeps the runs
#   python experiments/studies/roles.py FOLDER/runs/*                     # the perplexity of each role
set -euo pipefail
folder="${1:-runs/smollm2}"
cd "$(dirname "$0")/.."
mkdir -p "$folder"
PYTHONPATH="experiments/plugins${PYTHONPATH:+:$PYTHONPATH}" "${PYTHON:-python}" - "$DATA" "$folder/roles.jsonl" <<'PYTHON'
import json, sys

from letters_of_roles import roles_in

HELD_OUT = 1_300  # characters
with open(sys.argv[2], "w") as file:
    for role, text in roles_in(sys.argv[1]):
        end = int(0.8 * len(text))
        for split, part in ("train", text[:end]), ("test", text[end : end + HELD_OUT]):
            file.write(json.dumps({"text": part, "client": role, "split": split}) + "\n")
PYTHON
for method in $(tr , ' ' <<< "${METHODS:-fedavg,fedmr,fedcross,ditto,local}"); do
  [ -f "$folder/runs/$method/summary.json" ] && continue
  resume=$([ -d "$folder/runs/$method" ] && echo --resume || true)
  "${PYTHON:-python}" -m fedjax_mr.main --dataset="$folder/roles.jsonl" --task=language --text_length=64 --join_texts \
    --partition=natural --clients=0 --strategy="$method" --cohort=4 --model=smollm2_135m --pretrained="$WEIGHTS" \
    --adapter=lora --lora_targets='*/kernel' --optimizer=adam --lr=0.001 --batch_size=4 --local_steps=4 --rounds=20 \
    --eval_every=20 --eval_clients --checkpoint_every=5 --run_dir="$folder/runs/$method" ${FLAGS:-} $resume ||
    echo "$method: code $?"
done
