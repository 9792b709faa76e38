# Apertus 70B, alignment with QRPO: as the 8B with a fifth of its learning rate (report sec. 4;
# swiss-ai/posttraining).
out = "out/qrpo_70b"
init_from = "out/sft_70b"
# With "completions", "rewards", "ref_rewards" from an inference engine and the reward model of the 8B:
data = "data/preferences.jsonl"
# Then each rank reads its shards of the start model and none ever holds all of it, 282 GB.
rewards = ""

loss = "qrpo"
length_norm = True
beta = 5.0
beta_max = 0.1                    # released code only, not in the report
n_refs = 10                       # report; released configurations: 30
loo = 1                           # released scripts: 0
pairs = "best"
pairs_per_prompt = 1
max_length = 4096
max_new_tokens = 2048
epochs = 1
batch_size = 512
micro_batch = 1
warmup = 0.1
lr = 1e-7
optimizer = "ademamix"
betas = (0.9, 0.999, 0.999)       # released configuration; report: 0.99
alpha = 8.0
weight_decay = 0.0
grad_clip = 20.0
