# Apertus 8B, the pretraining run (swiss-ai/pretrain-code submit_apertus_8b.sh). 8,053,338,176 parameters.
#
# Eight GPUs of 80 GB hold it in shards, four windows at a time; without recomputation two, which is slower by the plan.
# One GPU of 141 GB (H200) holds all of it with
#
#     --state_dtype=bfloat16 --recompute=selective --micro_batch=1 --eval_every=20
#
# 16 bytes a parameter are 128.9 GB: weights 32.2, gradients 32.2, averages in bf16 32.2, squares 32.2. With averages in
# fp32 it would be 161 GB. The rest of the memory holds one window. A step of 4.2M tokens would take about ten minutes,
# so 15T tokens would take 71 years: use this with continue_8b.py, or set your own --total_samples. No GPU has run it
# yet.
#
# The warm-up, 4,000 steps, is 16.8B tokens: 3.1 days on one node of 8 H100, at 40 % of
# their peak. For a run of two days there, 2,600 steps of
# which 100 warm up:
#
#     --minutes=2880 --warmup_samples=102_400 --alpha_warmup=2_600
from configs.pretraining import *

out = "out/8b"
data = "data/8b"

n_layer = 32
n_head = 32
n_embd = 4096
ffn_dim = 21504

batch_size = 1024                 # 4.2M tokens a step
batch_ramp_at = 1_718_272_000     # then 2048: after 7.04T tokens, step 1,678,000 (the report's text says 8T)
micro_batch = 4
recompute = "cheap"

lr = 1.1e-4
min_lr = 1.1e-5
checkpoint_every = 2000

# Stages end after 7,038B, 12,000B, 13,345B and 15,000B tokens; the last one is the cooldown. Stage 2 was skipped.
stages = stages_until({"1": 1_678_000, "3": 2_269_525, "4": 2_429_920}, batch_size, batch_ramp_at)
