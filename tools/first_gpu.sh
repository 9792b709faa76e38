#!/usr/bin/env bash
# The first ten minutes (at most 18) on one GPU of 80 GB, without a network: does it compute, how fast, does it stop and resume?
#
#     pip install --no-index --find-links=WHEELS -r requirements.txt pytest    # where packages are missing
#     bash tools/first_gpu.sh
#     bash tools/first_gpu.sh tiny                    # the same on a CPU, in two minutes: its numbers mean nothing
#
# Each part has a time limit in seconds, a log OUT/PART.log, and a line in OUT/record.jsonl, which it gets when it ends.
# So a stop loses the running part only, and a part that fails stops no other. records/README.md says how to read the
# lines. The data are this Python's standard library; copy data/first_gpu* to a machine to spare it 20 seconds.
set -u
export OUT=${OUT:-out/first_gpu} DATA=${DATA:-data/first_gpu}
export DATA_8B=$DATA-apertus
export TEXTS="--train_bpe=32768" BIG="configs/8b.py --micro_batch=2" SMALL="configs/gpu.py --sample_every=0"
export BRIEF="--batch_size=32 --total_samples=1280 --warmup_samples=64 --decay_samples=64 --parallel=fsdp"
export ADAPTERS="configs/continue_8b.py --batch_size=4 --total_samples=24 --warmup_samples=4 --decay_samples=8 \
    --eval_every=0 --last_eval_windows=4 --recompute=full"
export MACHINE="" MINUTES=2 STOP_AT=5
if [ "${1:-}" = tiny ]; then
    SMALL="configs/tiny.py --device=cpu --last_eval_windows=4" ADAPTERS=$SMALL
    BIG="configs/tiny.py --device=cpu --vocab_size=320 --block_size=16 --micro_batch=1 --n_steps=2"
    TEXTS="docs engine --tokenizer=byte --val_share=0.3" BRIEF="--total_samples=400"
    MACHINE="--device=cpu --seconds=0.1" MINUTES=0.05 DATA_8B=$DATA
elif [ $# -gt 0 ]; then
    echo "first_gpu.sh: got $*: want nothing, or tiny" >&2
    exit 2
fi
if [ -e "$OUT/record.jsonl" ]; then
    echo "first_gpu.sh: $OUT holds a record: OUT=FOLDER bash tools/first_gpu.sh writes another" >&2
    exit 2
fi
mkdir -p "$OUT"

# part NAME LIMIT COMMAND...: run a command, and append its line with the last step of OUT/NAME/log.jsonl, or with the
# last line that it printed
part() {
    local name=$1 limit=$2 began=$SECONDS code=0 result
    shift 2
    echo "$name: at most $limit s; $OUT/$name.log"
    timeout --kill-after=20 "$limit" "$@" > "$OUT/$name.log" 2>&1 || code=$?
    result=$(grep -sv val_loss "$OUT/$name/log.jsonl" | tail -n 1)
    [ -n "$result" ] || result="\"$(tail -n 1 "$OUT/$name.log" | tr -cd '[:print:]' | tr -d '"\\')\""
    printf '{"part": "%s", "code": %d, "seconds": %d, "result": %s}\n' \
        "$name" "$code" "$((SECONDS - began))" "$result" | tee -a "$OUT/record.jsonl"
}

# The data of configs/gpu.py; and of the 8B, if the package of its vocabulary is here, else the same
prepare_data() {
    [ -e "$DATA/meta.json" ] || python prepare.py $TEXTS --out="$DATA"
    [ -e "$DATA_8B/meta.json" ] || python prepare.py --tokenizer=apertus --out="$DATA_8B"
    [ -e "$DATA/meta.json" ]
}

# SIGTERM after some steps must save, and --resume continue. FSDP with one rank: shards, NCCL and saves as on a node
stop_and_resume() {
    local train="torchrun --standalone --nproc_per_node=1 train.py $SMALL $BRIEF --eval_every=0"
    $train --data="$DATA" --out="$OUT/stop" &
    until grep -qs "\"step\": $STOP_AT," "$OUT/stop/log.jsonl"; do
        kill -0 $! || return                            # it has ended
        sleep 0.2
    done
    kill -TERM $!
    wait $!
    $train --data="$DATA" --out="$OUT/stop" --resume && grep -q "resumed from" "$OUT/stop.log"
}

# LoRA on an int8 8B of random weights, which take 16 GB of disk for a minute
train_adapters() {
    [ -e "$DATA_8B/meta.json" ] || DATA_8B=$DATA
    python -m tools.first_gpu weights $BIG --data="$DATA_8B" --out="$OUT/random" || return
    python train.py $ADAPTERS --init_from="$OUT/random" --data="$DATA_8B" --lora_r=16 --base=int8 --out="$OUT/adapters"
    local code=$?
    rm -r "$OUT/random"
    return $code
}

export -f prepare_data stop_and_resume train_adapters
command -v nvidia-smi > /dev/null && nvidia-smi | tee "$OUT/nvidia-smi.log"
part machine 60 python -m tools.first_gpu machine $MACHINE --out="$OUT/machine"
part data 90 bash -c prepare_data
part tests 200 python -m pytest -q tests/test_cuda.py
part layers 100 python -m tools.first_gpu steps $BIG --n_layer=4 --out="$OUT/layers"
part stop 150 bash -c stop_and_resume
part train 200 python train.py $SMALL --minutes=$MINUTES --data="$DATA" --out="$OUT/train"
part fp8 80 python -m tools.first_gpu steps $BIG --n_layer=2 --fp8 --out="$OUT/fp8"
part adapters 200 bash -c train_adapters
echo "$OUT/record.jsonl has a line for each part; records/README.md says how to read them"
