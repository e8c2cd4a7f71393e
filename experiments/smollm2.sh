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
"${PYTHON:-python}" - "$DATA/shakespeare_roles.json.gz" "$folder/roles.jsonl" <<'PYTHON'
import gzip, json, sys

ROLES, FEWEST, MOST, HELD_OUT = 30, 8_000, 16_000, 1_300  # characters; roles as in plugins/letters_of_roles.py
content = json.loads(gzip.open(sys.argv[1]).read())
roles = [pair for pair in zip(content["users"], content["text"], strict=True) if FEWEST <= len(pair[1]) <= MOST][:ROLES]
with open(sys.argv[2], "w") as file:
    for role, text in roles:
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
