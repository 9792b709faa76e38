# A small Apertus on the source of Python's standard library: five minutes of training on two CPU cores. The default.
# What the values were chosen by: LOG.md.
out = "out/laptop"
data = "data/stdlib"

block_size = 256
n_layer = 4
n_head = 3
n_kv_head = 1
n_embd = 192
ffn_dim = 1024               # 5.3 C, as in the 8B
init_std = 0.02              # the report's 0.008944 is too small for a 200-wide model: 1.756 against 1.669 bits/byte after a minute

goldfish_scope = "stream"    # at 256-token windows the scope 'window' trains every forgotten label 24 times in 128 repetitions

batch_size = 8               # 2,048 tokens a step: at so few tokens many small steps beat few large ones
micro_batch = 8
total_samples = 8 * 3360     # 6.9M tokens
warmup_samples = 8 * 168
decay_samples = 8 * 1008

lr = 1e-3
lr_floor = 1e-4
betas = (0.9, 0.999, 0.995)  # a run of 3,000 steps needs a short memory: 0.9999 looks back 10,000
alpha = 2.0

eval_every = 240
sample_every = 840
checkpoint_every = 840
