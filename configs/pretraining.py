# Common settings of the pretraining runs 8b.py and 70b.py: 15T tokens (report Table 1, sec. 2; swiss-ai/pretrain-code).
device = "cuda"                   # not auto, which takes the CPU if the driver is too old for this torch

block_size = 4096
vocab_size = 131072
n_kv_head = 8
# 12e6 only after the long-context stages; the llama3 scaling is on from the first step.
rope_theta = 500_000.0

goldfish_scope = "window"         # at 4096 the first 49 labels of a window are 1.2 % of it

total_samples = 3_662_109_375
warmup_samples = 4_096_000
decay_samples = 403_905_806       # the cooldown begins at 13.35T tokens
alpha_warmup = 100_000

eval_every = 1000
sample_every = 0

# The data of the stages (report Table 6; swiss-ai/pretrain-code data lists). Within a stage all sources are one stream,
# in proportion to their sizes, and a source named twice counts twice; no weights are set by hand. Billions of tokens in
# each:
POOLS = {"fineweb-edu-score-2": 4815, "fineweb-edu-score-3": 1179, "fineweb-hq-33": 4064, "fineweb-2-33": 3557,
         "fineweb-2-10": 986, "dclm-edu": 1619, "starcoder": 235, "starcoder-edu": 182, "stack-v2-edu": 68,
         "finemath": 32, "infimm-webmath": 19, "megamath-web": 260, "megamath-web-pro": 15, "wikipedia": 33,
         "parallel": 21, "flan": 1, "euroblocks": 1, "gutenberg-v1-poison": 2, "gutenberg-v2": 1}
# fineweb-2-33: the best third of 20 languages and a random third of all others; starcoder-edu: all with score >= 2, and
# those with score >= 3 twice. Flan and EuroBlocks have 1 together, and are read three times.
SOURCES = {
    "1": ("fineweb-edu-score-2", "fineweb-2-33", "starcoder", "finemath", "gutenberg-v1-poison"),
    "2": ("fineweb-hq-33", "fineweb-2-33", "fineweb-edu-score-3", "starcoder", "finemath", "gutenberg-v1-poison"),
    "3": ("fineweb-hq-33", "fineweb-2-33", "fineweb-edu-score-3", "starcoder", "megamath-web", "finemath",
          "infimm-webmath", "gutenberg-v2"),
    "4": ("dclm-edu", "fineweb-2-10", "starcoder", "finemath", "infimm-webmath", "megamath-web-pro"),
    "5": ("dclm-edu", "fineweb-2-10", "starcoder-edu", "stack-v2-edu", "wikipedia", "finemath", "parallel",
          "infimm-webmath", "megamath-web-pro", *3 * ("flan", "euroblocks"))}


def stages_until(steps, batch_size, batch_ramp_at):
    """
    The table `stages`: name, sources, its end in samples, seed of the order. The last stage ends with the run.

    steps: {name: the next stage's first step}, from report Table H.8, which counts from 1 and so means one step less.
    The batch is doubled after batch_ramp_at samples, so step s, which comes later, has 2 * batch_size * s -
    batch_ramp_at samples before it.
    Stage 1 has seed 28. The seeds of the later stages are not published, only that each had its own.
    """
    ends = {name: 2 * batch_size * step - batch_ramp_at for name, step in steps.items()} | {"5": total_samples}
    return tuple((name, SOURCES[name], end, 27 + int(name)) for name, end in ends.items())
