# Long context, the second of four stages, for the 8B: windows of 16,384 tokens. Explained in common.py.
from configs.long.common import *

block_size = 16384
rope_theta = 2e6

batch_size = 512                   # 8.4M tokens a step
total_samples = 6930 * batch_size  # 58.1B tokens
warmup_samples = 150 * batch_size  # 1.26B tokens
lr = 1.1e-5                        # the floor of pretraining

last_eval_windows = 1024           # 16.8M tokens
stages = (("16k", {"stage5": 41.31, "fineweb-long": 11.83, "books": 5.15}, total_samples, 34),)
