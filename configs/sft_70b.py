# Apertus 70B, supervised fine-tuning: as the 8B, twice the batch, a smaller step (report sec. 4;
# swiss-ai/posttraining).
out = "out/sft_70b"
init_from = "swiss-ai/Apertus-70B-2509"
data = "data/sft.jsonl"

max_length = 4096
pack = False
epochs = 1
batch_size = 1024                 # 3,696 steps
micro_batch = 1
warmup = 0.03
lr = 2e-6
optimizer = "ademamix"
betas = (0.9, 0.999, 0.99)        # report; released configuration: 0.999
alpha = 8.0
weight_decay = 0.0
grad_clip = 1.0
