# The model of `make recipe` (studies/recipe.sh): the size of configs/laptop.py with more heads, on an invented
# world and real text.
block_size = 256
n_layer = 4
n_head = 4
n_kv_head = 2
n_embd = 128
ffn_dim = 672
init_std = 0.02

# One label in four is dropped, because a letter has a hundred tokens and not a thousand.
goldfish_k = 4
goldfish_h = 13
goldfish_hash = "mix"
goldfish_scope = "stream"

batch_size = 4               # 1,024 tokens a step
micro_batch = 4
total_samples = 4 * 2000     # 2.0M tokens
warmup_samples = 4 * 100
decay_samples = 4 * 600

lr = 2e-3                    # at 1e-3 facts are learnt later
min_lr = 2e-4
betas = (0.9, 0.999, 0.99)
alpha = 2.0
grad_clip = 1.0              # at Apertus' 0.1 nearly every step is clipped, and 2,000 steps are few

eval_every = 200
eval_windows = 32
sample_every = 0
checkpoint_every = 500
keep_checkpoints = 1
