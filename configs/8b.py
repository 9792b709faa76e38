# Apertus 8B, the pretraining run: 15T tokens (report Table 1 and sec. 2; swiss-ai/pretrain-code submit_apertus_8b.sh).
# 8,053,338,176 parameters.
out = "out/8b"
data = "data/8b"

block_size = 4096
vocab_size = 131072
n_layer = 32
n_head = 32
n_kv_head = 8
n_embd = 4096
ffn_dim = 21504
rope_theta = 500_000.0            # 12e6 only after the long-context stages; the llama3 scaling is on from the first step

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
