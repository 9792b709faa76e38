# The size of the committed studies: 0.69M parameters, three quarters of them embeddings, 0.3M tokens, under a minute of one core a run.
# `ablate.py --size=configs/laptop.py` takes the laptop's model, --size=configs/ablations/size_gpu.py one for a GPU.
block_size = 128
n_layer = 3
n_head = 2
n_kv_head = 1
n_embd = 64
ffn_dim = 344
init_std = 0.02
goldfish_scope = "stream"
batch_size = 8                 # 1,024 tokens a step
micro_batch = 8
total_samples = 8 * 300
warmup_samples = 8 * 15
decay_samples = 8 * 90
grad_clip = 0.1
betas = (0.9, 0.999, 0.99)     # 300 steps: a slow average of 100 steps at most
alpha = 2.0
eval_every = 60
eval_windows = 0
sample_every = 0
checkpoint_every = 300
keep_checkpoints = 1
compile = False                # so small that compiling costs more than it saves
