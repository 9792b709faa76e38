# The size of the committed studies: the model and windows of configs/laptop.py (1.9M parameters, over half of them embeddings) for a
# quarter of its run, 0.4M tokens: 2 to 3 minutes of one core a run, eager, because compiling would take half as long as training.
# `ablate.py --size=configs/laptop.py` takes the laptop's whole run, --size=configs/ablations/size_gpu.py a model for a GPU.
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
total_samples = 4 * 390
warmup_samples = 4 * 20
decay_samples = 4 * 117
grad_clip = 0.1
betas = (0.9, 0.999, 0.99)     # 390 steps: a slow average of 100 steps at most
alpha = 2.0
eval_every = 65
eval_windows = 0               # all 212, as at the end: the curves are compared with final values
sample_every = 0
checkpoint_every = 390
keep_checkpoints = 1
compile = False
