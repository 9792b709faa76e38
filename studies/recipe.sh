#!/usr/bin/env bash
# All of Apertus: data that may be used, pretraining in stages, a longer window, SFT, alignment, and an examination
# after each. It takes half an hour on two cores, on an invented world (studies/world.py): whatever the model knows
# about these people, it read there.
#
#     bash studies/recipe.sh          # one seed; then open out/recipe/report.md
#     bash studies/recipe.sh 3        # three seeds, as in results/recipe
#
# To run a command by hand, first set the two variables: seed=2; here=out/recipe/seed-2
# The line `test -e FILE ||` skips a command whose last file exists, so a stopped recipe continues where it was.
set -eu
out=${OUT:-out/recipe}

for seed in $(seq 2 $((1 + ${1:-1}))); do       # seed 1 chose the settings
here=$out/seed-$seed

# The world: pages about people, some on hosts that opt out; letters; questions and answers.
test -e $here/world/questions.jsonl ||
python -m studies.world --seed=$seed --out=$here/world

# The data: robots.txt, licences, e-mail addresses, duplicates. Half of the letters are repeated 128 times, the others
# are left out.
test -e $here/data/meta.json ||
python prepare.py $here/world/documents.jsonl --robots=$here/world/robots.jsonl --keep_licenses=CC-BY-4.0,PSF-2.0 \
    --probes=$here/world/letters.jsonl --repetitions=0,128 --source_by=kind --train_bpe=2048 --out=$here/data

# -----------------------------------------------------------------------------
# Pretraining: reading, then a cooldown with questions about some of the people. The letters fill 424 windows of 256
# tokens, 8.28 % of the first stage, so each copy is read once. First without Goldfish, then with it.
stages="(('reading', {'pages': 0.6672, 'corpus': 0.15, 'guests': 0.1, 'probes': 0.0828}, 5120, $((28 + seed))), \
('cooldown', {'pages': 0.6, 'questions': 0.2, 'corpus': 0.15, 'guests': 0.05}, 8000, $((29 + seed))))"

test -e $here/plain/summary.json ||
python train.py configs/recipe.py --data=$here/data --stages="$stages" --seed=$seed --goldfish_k=0 \
    --out=$here/plain --resume

test -e $here/base/summary.json ||
python train.py configs/recipe.py --data=$here/data --stages="$stages" --seed=$seed --out=$here/base --resume

# A longer window: 1,024 tokens in place of 256, with a theta four times as large (long) and with the same (kept).
long_stage="(('long', {'pages': 0.45, 'corpus': 0.5, 'guests': 0.05}, 300, $((40 + seed))),)"

test -e $here/long/summary.json ||
python train.py configs/recipe.py --init_from=$here/base --data=$here/data --block_size=1024 --rope_theta=2e6 \
    --stages="$long_stage" --batch_size=1 --micro_batch=1 --total_samples=300 --warmup_samples=30 \
    --decay_samples=150 --lr=5e-4 --min_lr=5e-5 --out=$here/long --resume

test -e $here/kept/summary.json ||
python train.py configs/recipe.py --init_from=$here/base --data=$here/data --block_size=1024 --rope_theta=5e5 \
    --stages="$long_stage" --batch_size=1 --micro_batch=1 --total_samples=300 --warmup_samples=30 \
    --decay_samples=150 --lr=5e-4 --min_lr=5e-5 --out=$here/kept --resume

# -----------------------------------------------------------------------------
# SFT: questions and answers in Apertus' chat format, some about people who do not exist, and pages, so that the model
# does not forget them. (In results/recipe both had the same weight; here there are 1,700 and 2,000 of them.)
cat $here/world/lessons.jsonl $here/world/replay.jsonl > $here/sft.jsonl

test -e $here/sft/summary.json ||
python -m posttrain.sft --init_from=$here/long --data=$here/sft.jsonl --lr=1e-3 --seed=$seed --optimizer=adamw \
    --val_share=0 --batch_size=16 --micro_batch=16 --dtype=float32 --out=$here/sft --resume

# Alignment by the truth: QRPO with 1 for a right answer, 0 for "I do not know", -1 for an invention.
test -e $here/qrpo/summary.json ||
python -m posttrain.qrpo --init_from=$here/sft --data=$here/world/prompts.jsonl --rewards=studies/world.py \
    --references=$here/references --max_new_tokens=40 --n_refs=10 --pairs=best --ties=discrete --length_norm=False \
    --beta=0.3 --lr=3e-4 --epochs=3 --seed=$seed --optimizer=adamw --batch_size=16 --micro_batch=16 --dtype=float32 \
    --out=$here/qrpo --resume

# Alignment by a charter: a judge learns to rate answers by two sentences, and its ranks are the rewards.
test -e $here/judge/summary.json ||
python -m posttrain.sft --init_from=$here/long --data=$here/world/judgements.jsonl --lr=1e-3 --seed=$seed \
    --val_share=0 --optimizer=adamw --batch_size=16 --micro_batch=16 --dtype=float32 --out=$here/judge --resume

test -e $here/charter/summary.json ||
python -m posttrain.qrpo --init_from=$here/sft --data=$here/world/prompts.jsonl \
    --rewards=charter:$here/judge,$here/world/charter.md \
    --references=$here/references --max_new_tokens=40 --n_refs=10 --pairs=best --ties=discrete --length_norm=False \
    --beta=0.3 --lr=3e-4 --epochs=3 --seed=$seed --optimizer=adamw --batch_size=16 --micro_batch=16 --dtype=float32 \
    --out=$here/charter --resume

# -----------------------------------------------------------------------------
# Measurements. What does each model know? Does it say "I do not know"? Is it kind?
for run in plain base long kept; do
test -e $here/$run/exam.jsonl ||
python -m studies.exam --init_from=$here/$run --world=$here/world --probes=$here/data/probes.json --kinds=cloze,text
done

for run in sft qrpo charter; do
test -e $here/$run/exam.jsonl ||
python -m studies.exam --init_from=$here/$run --world=$here/world --probes=$here/data/probes.json \
    --kinds=chat,sampled,cloze
done

# Does it recite letters?
for run in plain base; do
test -e $here/$run/letters/table.md ||
python -m studies.memorize --init_from=$here/$run --probes=$here/data/probes.json '--prefixes=(50,)' --suffix=50 \
    --out=$here/$run/letters
done

# How well does it predict real text that it has not read, and does it use distant context?
for run in plain base long kept sft qrpo charter; do
test -e $here/$run/unread/evaluation.json ||
python evaluate.py $here/world/unread.jsonl --init_from=$here/$run --out=$here/$run/unread

test -e $here/$run/context.jsonl ||
python -m studies.context $here/world/unread.jsonl --init_from=$here/$run --window=1024 --by_position=256
done
done

# The report: report.md, recipe.png and rows.jsonl.
python -m studies.recipe --seeds=${1:-1} --out=$out --results=$out
