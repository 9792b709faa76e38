# The whole 8B on one GPU of 141 GB (H200). Name this file after the config of the run:
#
#     python train.py configs/8b.py configs/8b_one_gpu.py --data=data/mine-apertus --resume
#     python train.py configs/continue_8b.py configs/8b_one_gpu.py --data=data/mine-apertus --resume
#
# 16 bytes a parameter are 128.9 GB: weights 32.2, gradients 32.2, averages in bf16 32.2, squares 32.2. With averages in
# fp32 it would be 161 GB. The rest of the memory holds one window: python -m tools.plan with this config prints the
# sum. No GPU has run it yet. Eight GPUs of 80 GB hold 8b.py without this file, in shards, two windows at a time.
#
# A step of 4.2M tokens would take about ten minutes, so 15T tokens would take 60 years. Use this to continue the
# published weights on a few billion tokens, or set your own --total_samples.
out = "out/8b_one_gpu"

state_dtype = "bfloat16"
recompute = "selective"
micro_batch = 1

eval_every = 20
checkpoint_every = 20               # every three hours; 97 GB each, times keep_checkpoints
