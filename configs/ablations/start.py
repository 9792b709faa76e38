# The teacher of the committed study `distill`, and the model that posttrain/quantised.py measures: configs/laptop.py as
# it was when they ran, with four layers, and 1.5M tokens.
out = "out/start"
data = "data/stdlib"

block_size = 256
n_layer = 4
n_head = 2
n_kv_head = 1
n_embd = 128
ffn_dim = 672                # 5.25 C, as in the 8B
init_std = 0.02

# In windows of 256 tokens scope 'window' trains every label that it should drop 24 times in 128 repetitions.
goldfish_scope = "stream"

batch_size = 4               # 1,024 tokens a step
micro_batch = 4
total_samples = 4 * 1440
warmup_samples = 4 * 72
decay_samples = 4 * 432      # the last 30 %

lr = 1e-3
min_lr = 1e-4
betas = (0.9, 0.999, 0.99)
alpha = 2.0

eval_every = 240
sample_every = 720
checkpoint_every = 360
