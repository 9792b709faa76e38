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
