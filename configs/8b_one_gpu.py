# The whole 8B on one GPU of 141 GB (H200), behind its config:
#
#     python train.py configs/8b.py configs/8b_one_gpu.py --data=data/mine-apertus --resume
#     python train.py configs/continue_8b.py configs/8b_one_gpu.py --data=data/mine-apertus --resume
#
# 16 bytes a parameter are 128.9 GB: weights 32.2, gradients 32.2, averages in bf16 32.2, squares 32.2. The averages in
# fp32 alone would make it 161. The rest holds one window: python -m tools.plan with this config has the sum;
# no GPU has run it. Eight of 80 GB hold 8b.py without this, in shards, two windows at a time.
#
# A step of 4.2M tokens takes some ten minutes there, so 15T tokens would take 60 years: it is for continuing the
# published weights on a few billions, or for a run with a --total_samples of its own.
out = "out/8b_one_gpu"

state_dtype = "bfloat16"
recompute = "selective"
micro_batch = 1

eval_every = 20
checkpoint_every = 20               # three hours; 97 GB each, and keep_checkpoints of them
