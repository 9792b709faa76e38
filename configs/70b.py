# Apertus 70B, the pretraining run (swiss-ai/pretrain-code submit_apertus_70b.sh). 70,599,864,480 parameters.
from configs.pretraining import *

out = "out/70b"
data = "data/70b"

n_layer = 80
n_head = 64
n_embd = 8192
ffn_dim = 43008

batch_size = 2048                 # 8.4M tokens a step
batch_ramp_at = 1_072_164_864     # then 4096: after 4.39T tokens, step 523,518
micro_batch = 1
# On nodes of 8 GPUs of 80 GB. By the plan a copy over 32 nodes and recompute = "cheap" is faster, on an ideal network.
hsdp_shard = 64
recompute = "selective"

lr = 1e-5                         # the report's own retrospective (sec. 2.6): probably too low for this size
min_lr = 1e-6
checkpoint_every = 250

# Stages end after 5,165B, 8,845B, 12,209B, 13,431B and 15,000B tokens; the last one is the cooldown.
stages = stages_until({"1": 569_655, "2": 789_001, "3": 989_501, "4": 1_062_328}, batch_size, batch_ramp_at)
