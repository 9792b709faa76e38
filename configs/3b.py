# The report's 3B ablation model (sec. 2.4), 100B tokens: the shape of Llama 3.2 3B; 3.62B parameters untied.
out = "out/3b"
data = "data/3b"
device = "cuda"                   # not auto, which takes the CPU if the driver is too old for this torch

block_size = 4096
vocab_size = 131072
n_layer = 28
n_head = 24
n_kv_head = 8
n_embd = 3072
ffn_dim = 12288

batch_size = 512                  # 2.1M tokens a step
micro_batch = 2
total_samples = 512 * 47_684
warmup_samples = 512 * 2000
decay_samples = 512 * 9536

lr = 1.5e-4
min_lr = 1.5e-5
alpha_warmup = 47_684

eval_every = 1000
sample_every = 0
