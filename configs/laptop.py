# A small Apertus on the source of Python's standard library, as good as a machine makes it in five minutes.
# The default. What the values were chosen by: LOG.md.
out = "out/laptop"
data = "data/stdlib"

block_size = 256
# Shallow and narrow: in five minutes a model is as good as the number of tokens that it has seen. At equal CPU time two
# layers had 1.575 bits/byte where four had 1.631, and four of 192 wide 1.754.
n_layer = 2
n_head = 2
n_kv_head = 1
n_embd = 128
ffn_dim = 672                # 5.25 C, as in the 8B
# A narrow model needs larger weights to begin with: 0.02 had 1.665, 0.06 1.631, 0.12 1.702. The report's 0.008944 is for
# 4,096 wide.
init_std = 0.06

# At 256-token windows the scope 'window' trains every forgotten label 24 times in 128 repetitions.
goldfish_scope = "stream"

batch_size = 4               # 1,024 tokens a step; half of it has the same loss at as many tokens, but takes longer
micro_batch = 4
# 2.3M tokens, about what five minutes give on two AVX2 cores. --minutes=0 trains as many on any machine; with minutes
# they say how long the warm-ups of AdEMAMix are, and what share the decay has.
total_samples = 4 * 2250
warmup_samples = 4 * 112
decay_samples = 4 * 675      # the last 30 %
minutes = 5.0

lr = 1e-3                    # 2e-3 is as good, within the noise of a seed
lr_floor = 1e-4
betas = (0.9, 0.999, 0.99)   # a run of 2,250 steps needs a short memory: 0.9999 looks back 10,000
alpha = 2.0

eval_every = 450
sample_every = 1350
checkpoint_every = 450
