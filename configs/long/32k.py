# Long context, the third of four stages, for the 8B: windows of 32,768 tokens. Explained in common.py.
from configs.long.common import *

block_size = 32768
rope_theta = 4e6

batch_size = 256                   # 8.4M tokens a step
total_samples = 7000 * batch_size  # 58.7B tokens
warmup_samples = 150 * batch_size  # 1.26B tokens
lr = 1.1e-5                        # the floor of pretraining

last_eval_windows = 512            # 16.8M tokens
stages = (("32k", {"stage5": 41.62, "fineweb-long": 12.09, "books": 5.16}, total_samples, 35),)
