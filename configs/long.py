# Long context: Apertus' four stages from windows of 4,096 to 65,536 tokens (report sec. 2.5, Tables 5 and 8;
# swiss-ai/pretrain-code). The first word is the model, 8b or 70b, the second the window, 8k, 16k, 32k or 64k:
#
#     python configs/long.py 8b 8k          # prints the arguments of train.py: two configs and the flags of the stage
#     python train.py $(python configs/long.py 8b 8k) --init_from=out/8b --data=$DATA --out=out/8b-8k
#
# Each stage starts from the weights of the stage before, with a fresh optimizer.
# DATA=data/stage5,data/fineweb-long,data/books is what --stage=8k reads.
#
# After 1.26B tokens of warm-up the learning rate is constant, at pretraining's floor. Goldfish and clipping stay; so do
# AdEMAMix' own warm-ups of 100,000 steps, so the slow average never weighs more than 0.75: nearly AdamW. RoPE's factor
# 8 and original context of 8,192 never change; theta is that of the report and the released models (the 70B's script
# has 8e6 at 64k).
#
# Each stage takes documents from half a window to a whole one, so none is repeated: 16k by prepare.py --min_tokens=8192
# --max_tokens=16383. The seeds are ours: the scripts have 28 in every stage.
import sys

batch_ramp_at = 0
micro_batch = 1
decay_samples = 0

eval_every = 250
checkpoint_every = 250

# Tokens per step are those of the end of pretraining: 8.4M and 16.8M.
MODELS = {
    "8b": dict(tokens_of_step=2**23, warmup_steps=150, lr=1.1e-5),
    "70b": dict(tokens_of_step=2**24, warmup_steps=75, lr=1e-6),
}
# The steps of both models, and billions of tokens of stage 5's data, of long documents (the top tenth of FineWeb-HQ and
# FineWeb-2-HQ) and of books.
WINDOWS = {
    "8k": dict(
        block_size=8192, rope_theta=1e6, steps={"8b": 9350, "70b": 4680}, seed=33,
        sources={"stage5": 55.80, "fineweb-long": 15.87, "books": 6.88}),
    "16k": dict(
        block_size=16384, rope_theta=2e6, steps={"8b": 6930, "70b": 3470}, seed=34,
        sources={"stage5": 41.31, "fineweb-long": 11.83, "books": 5.15}),
    "32k": dict(
        block_size=32768, rope_theta=4e6, steps={"8b": 7000, "70b": 3500}, seed=35,
        sources={"stage5": 41.62, "fineweb-long": 12.09, "books": 5.16}),
    "64k": dict(
        block_size=65536, rope_theta=12e6, steps={"8b": 3480, "70b": 1742}, seed=36,
        sources={"stage5": 20.74, "fineweb-long": 5.58, "books": 2.96}),
}


def settings_of_stage(size, name):
    """The settings of a stage that are not at the top of this file, {name: value}."""
    model, window = MODELS[size], WINDOWS[name]
    batch = model["tokens_of_step"] // window["block_size"]
    end = window["steps"][size] * batch
    return dict(
        block_size=window["block_size"],
        rope_theta=window["rope_theta"],
        # As in both scripts, which also predict the token after an end of text; we never do.
        doc_mask=name != "64k",
        batch_size=batch,
        total_samples=end,
        warmup_samples=model["warmup_steps"] * batch,
        lr=model["lr"],
        last_eval_windows=2**24 // window["block_size"],
        stages=((name, window["sources"], end, window["seed"]),))


if __name__ == "__main__":
    size, name = sys.argv[1:] if len(sys.argv) == 3 else ("", "")
    if size not in MODELS or name not in WINDOWS:
        sys.exit(f"long.py: name a model, {' or '.join(MODELS)}, and a window, {', '.join(WINDOWS)}")
    flags = [f"--{key}={value}".replace(" ", "") for key, value in settings_of_stage(size, name).items()]
    print(f"configs/{size}.py configs/long.py", *flags)
