# Apertus 70B, alignment with QRPO: as the 8B with a fifth of its learning rate (report sec. 4;
# swiss-ai/posttraining).
from configs.qrpo_8b import *

out = "out/qrpo_70b"
init_from = "out/sft_70b"
# The data need "completions", "rewards" and "ref_rewards", from an inference engine and the reward model of the 8B.
# Then each rank reads its shards of the start model, and no rank ever holds all of it, 282 GB.
rewards = ""
micro_batch = 1
lr = 1e-7
