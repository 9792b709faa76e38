# A small Apertus on the source of Python's standard library, as good as a machine makes it in five minutes.
# The default. What the values were chosen by: LOG.md.
out = "out/laptop"
data = "data/stdlib"

block_size = 256
n_layer = 4
n_head = 2
n_kv_head = 1
# Small beats wide in minutes: 1.615 bits/byte after 374 s, where 192 wide (3.5M parameters) had 1.677 after 398
# s.
n_embd = 128
ffn_dim = 672                # 5.25 C, as in the 8B
# The report's 0.008944 is too small for a 200-wide model: 1.756 against 1.669 bits/byte after a minute.
init_std = 0.02

# At 256-token windows the scope 'window' trains every forgotten label 24 times in 128 repetitions.
goldfish_scope = "stream"

batch_size = 4               # 1,024 tokens a step: at so few tokens many small steps beat few large ones
micro_batch = 4
# 1.5M tokens: 270 to 277 s on two cores, 40 of them compiling where nothing was compiled before. --minutes=0 trains as
# many on any machine; with minutes they say how long the warm-ups of AdEMAMix are, and what share the decay has.
total_samples = 4 * 1440
warmup_samples = 4 * 72
decay_samples = 4 * 432      # the last 30 %
minutes = 5.0

lr = 1e-3
lr_floor = 1e-4
betas = (0.9, 0.999, 0.99)   # a run of 1,440 steps needs a short memory: 0.9999 looks back 10,000
alpha = 2.0

eval_every = 240
sample_every = 720
checkpoint_every = 360
