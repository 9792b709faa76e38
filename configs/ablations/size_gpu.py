# Studies on one GPU: the 1.5B ablation model's shape at a quarter of its width and half its depth, Apertus'
# windows of 1,024.
block_size = 1024
n_layer = 8
n_head = 8
n_kv_head = 2
n_embd = 512
ffn_dim = 3072
init_std = 0.02
goldfish_scope = "stream"
batch_size = 32
micro_batch = 32
total_samples = 32 * 6000
warmup_samples = 32 * 300
decay_samples = 32 * 1800
grad_clip = 0.1
betas = (0.9, 0.999, 0.995)
alpha = 2.0
eval_every = 500
eval_windows = 0
sample_every = 0
checkpoint_every = 1000
keep_checkpoints = 1
