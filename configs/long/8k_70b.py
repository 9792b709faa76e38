# Long context, the first of four stages, for the 70B: windows of 8,192 tokens. Explained in common.py.
from configs.long.common import *

block_size = 8192
rope_theta = 1e6

batch_size = 2048                  # 16.8M tokens a step
total_samples = 4680 * batch_size  # 78.5B tokens
warmup_samples = 75 * batch_size   # 1.26B tokens
lr = 1e-6                          # the floor of pretraining

last_eval_windows = 2048           # 16.8M tokens
stages = (("8k", {"stage5": 55.80, "fineweb-long": 15.87, "books": 6.88}, total_samples, 33),)
