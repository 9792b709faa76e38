# Apertus 8B, the pretraining run: 15T tokens (report Table 1 and sec. 2; swiss-ai/pretrain-code
# submit_apertus_8b.sh). 8,053,338,176 parameters.
out = "out/8b"
data = "data/8b"

block_size = 4096
vocab_size = 131072
n_layer = 32
n_head = 32
n_kv_head = 8
n_embd = 4096
ffn_dim = 21504
# 12e6 only after the long-context stages; the llama3 scaling is on from the first step.
rope_theta = 500_000.0

goldfish_scope = "window"         # at 4096 the first 49 labels of a window are 1.2 % of it

batch_size = 1024                 # 4.2M tokens a step
batch_ramp_at = 1_718_272_000     # then 2048: after 7.04T tokens, step 1,678,000 (the report's text says 8T)
micro_batch = 4
total_samples = 3_662_109_375
warmup_samples = 4_096_000
decay_samples = 403_905_806       # the cooldown begins at 13.35T tokens

lr = 1.1e-4
lr_floor = 1.1e-5
alpha_warmup = 100_000
beta3_warmup = 100_000

eval_every = 1000
sample_every = 0
checkpoint_every = 2000

# The data of each stage (report Table 6; swiss-ai/pretrain-code data lists). Within a stage all sources are one
# stream, in proportion to what each holds, and a source named twice counts twice: no hand-set weights. Billions
# of tokens that each held:
POOLS = {"fineweb-edu-score-2": 4815, "fineweb-edu-score-3": 1179, "fineweb-hq-33": 4064, "fineweb-2-33": 3557,
         "fineweb-2-10": 986, "dclm-edu": 1619, "starcoder": 235, "starcoder-edu": 182, "stack-v2-edu": 68,
         "finemath": 32, "infimm-webmath": 19, "megamath-web": 260, "megamath-web-pro": 15, "wikipedia": 33,
         "parallel": 21, "flan": 1, "euroblocks": 1, "gutenberg-v1-poison": 2, "gutenberg-v2": 1}
# fineweb-2-33: the best third of 20 languages and a random third of all others; starcoder-edu: score >= 2, and
# >= 3 once more.
S1 = ("fineweb-edu-score-2", "fineweb-2-33", "starcoder", "finemath", "gutenberg-v1-poison")
S3 = ("fineweb-hq-33", "fineweb-2-33", "fineweb-edu-score-3", "starcoder", "megamath-web", "finemath",
      "infimm-webmath", "gutenberg-v2")
S4 = ("dclm-edu", "fineweb-2-10", "starcoder", "finemath", "infimm-webmath", "megamath-web-pro")
S5 = ("dclm-edu", "fineweb-2-10", "starcoder-edu", "stack-v2-edu", "wikipedia", "finemath", "parallel",
      "infimm-webmath", "megamath-web-pro", "flan", "euroblocks", "euroblocks", "euroblocks")
# name, sources, until so many samples, seed of the order. From the first steps of report Table F.7; stage 2 was
# skipped. The seeds of the later stages are not published, only that each had its own.
stages = (("1", S1, batch_ramp_at, 28),                                                   #  7,038B tokens
          ("3", S3, batch_ramp_at + (2_269_525 - 1_678_000) * 2 * batch_size, 30),        # 12,000B
          ("4", S4, batch_ramp_at + (2_429_920 - 1_678_000) * 2 * batch_size, 31),        # 13,345B
          ("5", S5, total_samples, 32))                                                   # 15,000B, the cooldown
