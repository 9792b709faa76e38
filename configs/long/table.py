# Long context: Apertus' four stages from windows of 4,096 to 65,536 tokens (report sec. 2.5, Tables 5 and 8;
# swiss-ai/pretrain-code). 8k.py, 16k.py, 32k.py and 64k.py each take one row. Name one after the config of a size,
# and start from the weights of the stage before, with a fresh optimizer:
#
#     python train.py configs/8b.py configs/long/8k.py --init_from=out/8b --data=data/long-8k --out=out/8b-8k
#     python data.py data/stage5 data/fineweb-long data/books --join=data/long-8k        # what --stage=8k reads
#
# A step has as many tokens as at the end of pretraining, 8.4M (8B) and 16.8M (70B). After 1.2B tokens of warm-up the
# learning rate is constant, at pretraining's floor. Goldfish and clipping stay; so do AdEMAMix' own warm-ups of 100,000
# steps, so the slow average never weighs more than 0.75: nearly AdamW. RoPE's factor 8 and original context of 8,192
# never change; theta is that of the report and the released models (the 70B's script has 8e6 at 64k).
#
# The table has the billions of tokens of stage 5's data, of long documents (the top tenth of FineWeb-HQ and
# FineWeb-2-HQ) and of books. Each stage takes documents from half a window to a whole one, so none is repeated: 16k by
# prepare.py --min_tokens=8192 --max_tokens=16383.
#
# The seeds are ours: the scripts have 28 in every stage.
#
# window      theta   steps of 8B, 70B   stage 5  long documents  books   seed
STAGES = {
    "8k": (8192,    1e6,  9350, 4680,      55.80,          15.87,  6.88,   33),    # 78.4B tokens
    "16k": (16384,  2e6,  6930, 3470,      41.31,          11.83,  5.15,   34),    # 58.1B
    "32k": (32768,  4e6,  7000, 3500,      41.62,          12.09,  5.16,   35),    # 58.7B
    "64k": (65536, 12e6,  3480, 1742,      20.74,           5.58,  2.96,   36)}    # 29.2B


def settings_of(name, before):
    """The settings of a stage, a dict. before: those of the size that it is stacked on."""
    window, theta, *steps, stage5, documents, books, seed = STAGES[name]
    large = before["n_layer"] == 80
    batch = (2 if large else 1) * 2**23 // window
    total = batch * steps[large]
    # Both scripts of the last stage leave the mask out. (They also learn what follows an end of text; we never do.)
    mask = dict(doc_mask=False) if name == "64k" else {}
    return mask | dict(
        block_size=window,
        rope_theta=theta,
        batch_size=batch,
        batch_ramp_at=0,
        micro_batch=1,
        total_samples=total,
        warmup_samples=batch * (75 if large else 150),
        decay_samples=0,
        lr=1e-6 if large else 1.1e-5,
        eval_every=250,
        last_eval_windows=2**24 // window,
        checkpoint_every=250,
        stages=((name, {"stage5": stage5, "fineweb-long": documents, "books": books}, total, seed),))
