# Continued pretraining of the released 8B, on a language or a domain of yours.
#
#     python -m tools.plan configs/continue_8b.py --gpus=8 --gpu=h100
#     $NODE train.py configs/continue_8b.py --data=data/mine-apertus --recompute=cheap --micro_batch=4 --resume
# NODE and an example with adapters on one GPU: docs/scale.md
#
# The numbers are those of Greek Apertus (eellak/greek-apertus, a contract of August 2026; its 8B on 80.73B tokens), the
# one open run that continues Apertus with its own optimizer and loss: half of pretraining's peak learning rate, and a
# shorter slow average of half the weight. Two things differ: its warm-up begins at the floor, and it went back to
# pretraining's RoPE, theta 5e5. Its lessons:
#
# Replay. 79 % of its tokens are Greek, 20 % other languages as in pretraining: prepare both, and mix them in a stage,
# stages = (("1", {"mine": 4, "old": 1}, total_samples, 28),) with --stage=all. A weaker shift may need 5 % (Ibrahim et
# al., arXiv 2403.08763).
#
# Watch the old text too: in an earlier run of 15.5B tokens the loss on English ended 0.045 nats above its best, while
# the Greek MMLU rose from 49.7 to 57.1 %. evaluate.py compares two models on any text.
#
# New tokens for the language did not pay within 2B tokens.
#
# Small models did not predict the 8B: over the checkpoints their curves and its own went in opposite directions.
#
# To stay closer to the start model, keep the learning rate at the floor of pretraining, as Apertus' own long-context
# stages did: --lr=1.1e-5 --min_lr=1.1e-5 and 150 steps of warm-up.
#
# On one GPU: --lora_r=64 --base=bf16 --recompute=full trains adapters alone (weights/lora.py). Over billions of
# tokens they learn less and forget less than all weights do (Biderman et al., arXiv 2405.09673), and need another
# learning rate.
out = "out/continue_8b"
data = "data/mine"
init_from = "swiss-ai/Apertus-8B-2509"
device = "cuda"                   # not auto, which takes the CPU if the driver is too old for this torch

block_size = 4096                 # shorter than the start model's 65,536; its RoPE stays as it is

batch_size = 1024                 # 4.2M tokens a step
micro_batch = 1
total_samples = 19_709_952        # 80.7B tokens, 19,248 steps
warmup_samples = 409_600          # 400 steps
decay_samples = 3_942_400         # the last fifth, 3,850 steps

lr = 5.5e-5
min_lr = 5.5e-6
betas = (0.9, 0.999, 0.999)
alpha = 4.0
alpha_warmup = 19_248             # alpha and the slow beta grow over the whole run

eval_every = 250
sample_every = 0
checkpoint_every = 500
