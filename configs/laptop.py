# A small Apertus on the source of Python's standard library, as good as a machine makes it in five minutes.
# The default. How the values were chosen: docs/decisions.md.
out = "out/laptop"
data = "data/stdlib"

block_size = 256
# Narrow, since a model is as good as the number of tokens that it has seen: at equal CPU time 128 wide had 1.631
# bits/byte where 192 wide had 1.754.
# Few layers, since five minutes then hold more tokens. In the time of 1.23M tokens of three layers, which end at 1.573,
# two read 1.43M and end at 1.555; after 5.8M and 6.8M they are level, 1.301 and 1.300.
n_layer = 2
n_head = 2
n_kv_head = 1
n_embd = 128
ffn_dim = 672                # 5.25 C, as in the 8B
# Not Apertus, whose embedding and output are two matrices. One learns rare words from both sides, and leaves less room
# to recite a text that is read several times: 1.518 for 1.555 after 1.4M tokens. All other comparisons here had two.
tie_embeddings = True
# A narrow model begins with larger weights: after 1M tokens 0.02 had 1.665, 0.06 1.631, 0.12 1.702. The report's
# 0.008944 is for a width of 4,096.
init_std = 0.06

# At 256-token windows the scope 'window' trains every forgotten label 24 times in 128 repetitions.
goldfish_scope = "stream"

batch_size = 4               # 1,024 tokens a step; half of it reaches the same loss per token, but is slower
micro_batch = 4
# 1.5M tokens, half of what five minutes give on two cores without bf16. --minutes=0 trains on these alone; with
# minutes they say how long the warm-ups of AdEMAMix are, and what share the decay has.
total_samples = 4 * 1440
warmup_samples = 4 * 72
decay_samples = 4 * 432      # the last 30 %
minutes = 5.0

lr = 2e-3                    # after 1.2M tokens 1e-3 had 1.591, 2e-3 1.573, 3e-3 1.581
lr_floor = 2e-4
betas = (0.9, 0.999, 0.99)   # a run of 1,440 steps needs a short memory: 0.9999 looks back 10,000
alpha = 2.0

eval_every = 240
sample_every = 720
checkpoint_every = 360
