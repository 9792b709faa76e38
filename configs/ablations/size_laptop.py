# The size of the committed studies: configs/laptop.py with four layers (1.9M parameters, over half of them embeddings),
# as it was when they ran, for 300 steps, 0.3M tokens. A run takes 2 minutes on one core: 4.8 steps/s compiled, 2.9
# eager; the first run of an arm also compiles for 50 s. `python -m studies.ablate NAME --size=configs/laptop.py` takes
# the laptop's whole run.
block_size = 256
n_layer = 4
n_head = 2
n_kv_head = 1
n_embd = 128
ffn_dim = 672
init_std = 0.02
goldfish_scope = "stream"
batch_size = 4                 # 1,024 tokens a step
micro_batch = 4
total_samples = 4 * 300
warmup_samples = 4 * 15
decay_samples = 4 * 90
grad_clip = 0.1
betas = (0.9, 0.999, 0.99)     # 300 steps allow a slow average of at most 100 steps
alpha = 2.0
eval_every = 60
eval_windows = 0               # all, as at the end: curves are compared with final values
sample_every = 0
checkpoint_every = 300
keep_checkpoints = 1
# The same on every CPU: auto would take bf16 where there is hardware for it, and studies would mix both.
dtype = "float32"
