# Apertus 70B, supervised fine-tuning: as the 8B, twice the batch, a smaller step (report sec. 4;
# swiss-ai/posttraining).
from configs.sft_8b import *

out = "out/sft_70b"
init_from = "swiss-ai/Apertus-70B-2509"
batch_size = 1024                 # 4,087 steps
micro_batch = 1
lr = 2e-6
