# Long context, the last of four stages, for the 8B: windows of 65,536 tokens. Explained in common.py.
from configs.long.common import *

block_size = 65536
rope_theta = 12e6
doc_mask = False                   # as in both scripts, which also predict the token after an end of text; we never do

batch_size = 128                   # 8.4M tokens a step
total_samples = 3480 * batch_size  # 29.2B tokens
warmup_samples = 150 * batch_size  # 1.26B tokens
lr = 1.1e-5                        # the floor of pretraining

last_eval_windows = 256            # 16.8M tokens
stages = (("64k", {"stage5": 20.74, "fineweb-long": 5.58, "books": 2.96}, total_samples, 36),)
