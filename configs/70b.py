# Apertus 70B, the pretraining run (report Table 1 and sec. 2; swiss-ai/pretrain-code submit_apertus_70b.sh).
# 70,599,864,480 parameters.
out = "out/70b"
data = "data/70b"

block_size = 4096
vocab_size = 131072
n_layer = 80
n_head = 64
n_kv_head = 8
n_embd = 8192
ffn_dim = 43008
rope_theta = 500_000.0

goldfish_scope = "window"

batch_size = 2048                 # 8.4M tokens a step
batch_ramp_at = 1_072_164_864     # then 4096: after 4.39T tokens, step 523,518
micro_batch = 1
total_samples = 3_662_109_375
warmup_samples = 4_096_000
decay_samples = 403_905_806

lr = 1e-5                         # the report's own retrospective (sec. 2.6): probably too low for this size
lr_floor = 1e-6
alpha_warmup = 100_000
beta3_warmup = 100_000

eval_every = 1000
sample_every = 0
checkpoint_every = 250

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
S2 = ("fineweb-hq-33", "fineweb-2-33", "fineweb-edu-score-3", "starcoder", "finemath", "gutenberg-v1-poison")
S3 = ("fineweb-hq-33", "fineweb-2-33", "fineweb-edu-score-3", "starcoder", "megamath-web", "finemath",
      "infimm-webmath", "gutenberg-v2")
S4 = ("dclm-edu", "fineweb-2-10", "starcoder", "finemath", "infimm-webmath", "megamath-web-pro")
S5 = ("dclm-edu", "fineweb-2-10", "starcoder-edu", "stack-v2-edu", "wikipedia", "finemath", "parallel",
      "infimm-webmath", "megamath-web-pro", "flan", "euroblocks", "euroblocks", "euroblocks")
# name, sources, until so many samples, seed of the order. From the first steps of report Table F.7. The seeds
# of the later stages are not published, only that each had its own.
stages = (("1", S1, batch_ramp_at + (569_655 - 523_518) * 2 * batch_size, 28),            #  5,165B tokens
          ("2", S2, batch_ramp_at + (789_001 - 523_518) * 2 * batch_size, 29),            #  8,845B
          ("3", S3, batch_ramp_at + (989_501 - 523_518) * 2 * batch_size, 30),            # 12,209B
          ("4", S4, batch_ramp_at + (1_062_328 - 523_518) * 2 * batch_size, 31),          # 13,431B
          ("5", S5, total_samples, 32))                                                   # 15,000B, the cooldown
