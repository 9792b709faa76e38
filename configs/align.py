# The small pretrained model behind `make align`: two layers on the standard library's source, one or two minutes
# on two cores.
out = "out/align/pretrained"
data = "out/align/data"
block_size = 128
n_layer = 2
n_head = 4
n_kv_head = 2
n_embd = 128
ffn_dim = 512
init_std = 0.02
goldfish_k = 0
batch_size = 16
micro_batch = 16
total_samples = 16 * 600
warmup_samples = 16 * 30
decay_samples = 16 * 180
lr = 2e-3
min_lr = 2e-4
betas = (0.9, 0.999, 0.99)
alpha = 2.0
eval_every = 300
eval_windows = 32
sample_every = 0
checkpoint_every = 600
keep_checkpoints = 1
