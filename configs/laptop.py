# The default: a small Apertus on the source of Python's standard library, tuned for five minutes of training.
out = "out/laptop"
data = "data/stdlib"

block_size = 256
# Narrow, because in five minutes the number of tokens matters more than the width: at equal CPU time a width of 128
# reached 1.631 bits/byte, 192 reached 1.754.
# Few layers for the same reason, but four where there is bf16: in five minutes one thread of Zen 5 reads 6.6M tokens
# with four layers and reaches 1.201, 9.4M with two and reaches 1.285, 4.1M with four of width 192 and reaches 1.221. A
# machine that reads only 2.5M (3.6M with two layers) reaches 1.389 (1.367), and two cores of a Xeon with AMX, which
# read 3.3M (5.6M), reach 1.354 (1.317): there take --n_layer=2.
n_layer = 4
n_head = 2
n_kv_head = 1
n_embd = 128
ffn_dim = 672                # 5.25 C, as in the 8B
# Unlike Apertus, whose embedding and head are two matrices. A shared matrix learns rare tokens from both sides, and
# leaves less room to recite a text that is read several times: 1.518 instead of 1.555 after 1.4M tokens. All other
# comparisons in this file had two matrices.
tie_embeddings = True
# A narrow model needs larger initial weights: after 1M tokens 0.02 reached 1.665, 0.06 1.631, 0.12 1.702. The report's
# 0.008944 is for a width of 4,096.
init_std = 0.06

# In windows of 256 tokens scope 'window' trains every label that it should drop 24 times in 128 repetitions.
goldfish_scope = "stream"

batch_size = 4               # 1,024 tokens a step; a batch of 2 reaches the same loss per token, but is slower
micro_batch = 4
# 1.5M tokens, half of what five minutes give on two cores without bf16. With --minutes=0 the run has this length; with
# minutes these three give the length of AdEMAMix' warm-ups and the share of the decay.
total_samples = 4 * 1440
warmup_samples = 4 * 72
decay_samples = 4 * 432      # the last 30 %
minutes = 5.0

lr = 2e-3                    # after 1.2M tokens 1e-3 reached 1.591, 2e-3 1.573, 3e-3 1.581
min_lr = 2e-4
betas = (0.9, 0.999, 0.99)   # a run of 1,440 steps needs a short memory; 0.9999 averages over 10,000
alpha = 2.0

eval_every = 240
sample_every = 720
checkpoint_every = 360
