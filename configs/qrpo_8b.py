# Apertus 8B, alignment with QRPO (report sec. 4; swiss-ai/posttraining): 380,537 prompts scored by
# Skywork-Reward-V2-Llama-3.1-8B, and 72,698 controversial ones by the Swiss AI Charter. The 70B, with a fifth of the
# learning rate:
#
#     --init_from=out/sft_70b --micro_batch=1 --lr=1e-7 --rewards=
#
# Its data need "completions", "rewards" and "ref_rewards", from an inference engine and the reward model of the 8B.
# Then each rank reads its shards of the start model, and no rank ever holds all of it, 282 GB.
out = "out/qrpo_8b"
init_from = "out/sft_8b"
# Prompts. If they come with "completions" of other models (offline), the references (off-policy) are trained on too.
data = "data/preferences.jsonl"
# A file of yours; for the reward model of the report, with pip install transformers:
#     name = "Skywork/Skywork-Reward-V2-Llama-3.1-8B"
#     tok = transformers.AutoTokenizer.from_pretrained(name)
#     model = transformers.AutoModelForSequenceClassification.from_pretrained(name, dtype="bfloat16").to("cuda")
#     def reward(prompt, completion, row):
#         messages = [*row["messages"], dict(role="assistant", content=completion)]
#         ids = tok.apply_chat_template(messages, return_tensors="pt", sanitize_control_tokens=True)
#         return model(ids.to("cuda")).logits[0, 0].item()
rewards = "reward.py"
device = "cuda"                   # not auto, which takes the CPU if the driver is too old for this torch

loss = "qrpo"
length_norm = True
beta = 5.0                        # divided by |y|: about 0.03 on average
n_refs = 10                       # the report and the README of the code; the released configurations have 30
# The released scripts compare a sample with itself too: with 30 references R_q is then .017 too large on average.
pairs = "best"                    # the best against one with a quantile <= max(.2, 1/n)
max_length = 4096
max_new_tokens = 2048
epochs = 1
batch_size = 512
micro_batch = 2
warmup = 0.1
lr = 5e-7
optimizer = "ademamix"
# Released configuration; the report has 0.99 for post-training. .999 is used: under a thousand steps both are
# short.
betas = (0.9, 0.999, 0.999)
alpha = 8.0
weight_decay = 0.0
grad_clip = 20.0                  # practically off: released values are 20 and 1e5
