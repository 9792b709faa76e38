# Apertus 8B, supervised fine-tuning (report sec. 4; swiss-ai/posttraining): 4,184,087 conversations (Table 12; the
# report's text says 3.8 million), one epoch. The 70B, with twice the batch and a smaller step:
#
#     --init_from=swiss-ai/Apertus-70B-2509 --batch_size=1024 --micro_batch=1 --lr=2e-6        # 4,087 steps
out = "out/sft_8b"
# The published base; the run itself started from the checkpoint of the 64k-context stage.
init_from = "swiss-ai/Apertus-8B-2509"
data = "data/sft.jsonl"
device = "cuda"                   # not auto, which takes the CPU if the driver is too old for this torch

max_length = 4096
pack = False                      # as published: a conversation a row
epochs = 1
batch_size = 512                  # 8,173 steps
micro_batch = 4
warmup = 0.03
lr = 5e-6
optimizer = "ademamix"
# The report's beta3; the released configuration has 0.999. 0.99 is used: over 8,173 steps both are short.
betas = (0.9, 0.999, 0.99)
alpha = 8.0                       # alpha and beta3 warm up over the run, at most 100,000 steps
weight_decay = 0.0
grad_clip = 1.0
