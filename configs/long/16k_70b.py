# Long context, the second of four stages, for the 70B: windows of 16,384 tokens. Explained in common.py.
from configs.long.common import *

block_size = 16384
rope_theta = 2e6

batch_size = 1024                  # 16.8M tokens a step
total_samples = 3470 * batch_size  # 58.2B tokens
warmup_samples = 75 * batch_size   # 1.26B tokens
lr = 1e-6                          # the floor of pretraining

last_eval_windows = 1024           # 16.8M tokens
stages = (("16k", {"stage5": 41.31, "fineweb-long": 11.83, "books": 5.15}, total_samples, 34),)
