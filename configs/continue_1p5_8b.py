# Apertus 1.5's continued pretraining of the 8B: 805B, 2.80T and 403B tokens in windows of 8,192 tokens. The optimizer
# is kept from stage to stage; the learning rate decays over exactly the third (swiss-ai/pretrain-code, pretraining/).
#
#     python train.py configs/continue_1p5_8b.py --data=data/mine-apertus --stage=1 --resume    # then --stage=2, 3
#
# This config trains on text alone. Apertus 1.5 also read images and sound as ids of codebooks, with no loss on them
# from stage 2 on, and chats in stage 3; it also applied weight decay to xIELU's scalars. The shares of its sources are
# not published, so each stage here reads all of the data folder.
from configs.pretraining import *

out = "out/continue_1p5_8b"
init_from = "swiss-ai/Apertus-8B-2509"

block_size = 8192
total_samples = 1024 * 478_000    # 8.4M tokens a step
warmup_samples = 1024 * 500
decay_samples = 1024 * 48_000
stages = tuple((str(n), None, 1024 * end, 27 + n) for n, end in enumerate((96_000, 430_000, 478_000), 1))
