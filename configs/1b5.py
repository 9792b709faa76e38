# The report's "1.5B" ablation model (sec. 2.4, Table 3), 100B tokens: the shape of Llama 3.2 1B, untied.
# Apertus: 1,510,019,104 parameters. The Llama that it is compared with, 1,510,017,024, takes a second config:
#     python train.py configs/1b5.py configs/ablations/llama.py
out = "out/1b5"
data = "data/1b5"
device = "cuda"                   # not auto, which takes the CPU if the driver is too old for this torch

block_size = 4096
vocab_size = 131072
n_layer = 16
n_head = 32
n_kv_head = 8
n_embd = 2048
ffn_dim = 12288                   # SwiGLU takes 8192

batch_size = 504                  # 2.1M tokens a step
micro_batch = 3
total_samples = 504 * 48_441
warmup_samples = 504 * 2000
decay_samples = 504 * 9688        # the last fifth

lr = 1.5e-4                       # half of the cosine baseline's, by the report's rule of thumb for WSD
min_lr = 1.5e-5
grad_clip = 0.1
alpha_warmup = 48_441

eval_every = 1000
sample_every = 0
