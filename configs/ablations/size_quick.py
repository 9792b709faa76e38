# The size of `python -m studies.ablate swiglu xielu`: configs/laptop.py for 240 steps, 0.25M tokens. Not compiled,
# because compiling takes longer than it saves in a run of a minute: 50 s a run on one core.
block_size = 256
n_layer = 2
n_head = 2
n_kv_head = 1
n_embd = 128
ffn_dim = 672
tie_embeddings = True
init_std = 0.06
goldfish_scope = "stream"
batch_size = 4                 # 1,024 tokens a step
micro_batch = 4
total_samples = 4 * 240
warmup_samples = 4 * 12
decay_samples = 4 * 72
betas = (0.9, 0.999, 0.99)
alpha = 2.0
eval_every = 60                # on 64 windows; at the end on all
sample_every = 0
checkpoint_every = 0
dtype = "float32"
compile = False
