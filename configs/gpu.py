# A small Apertus for one GPU of 24 GB and one night: 144M parameters, 3B tokens, 2.5e18 FLOPs, 10 hours of a 4090 at
# 40 % of its peak. No GPU has run it yet; we tested it on a CPU with a narrow model.
#
#     python prepare.py "hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT/*.parquet" --max_bytes=15e9 \
#         --train_bpe=32768 --out=data/gpu
#     python -m tools.plan configs/gpu.py --vocab_size=32768 --gpus=1 --gpu=4090
#     python train.py configs/gpu.py --resume
out = "out/gpu"
data = "data/gpu"
device = "cuda"                   # not auto, which takes the CPU if the driver is too old for this torch

block_size = 2048
n_layer = 12
n_head = 12
n_kv_head = 4
n_embd = 768
ffn_dim = 4032                    # 5.25 C, as in the 8B
init_std = 0.02                   # 0.008944 is for a width of 4,096

batch_size = 256                  # 0.52M tokens a step
micro_batch = 16
total_samples = 256 * 5_722
warmup_samples = 256 * 200
decay_samples = 256 * 1_144       # the last fifth

lr = 6e-4
betas = (0.9, 0.999, 0.999)
