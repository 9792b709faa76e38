# Long context, the second of four stages: windows of 16,384 tokens (report sec. 2.5, Tables 5 and 8;
# swiss-ai/pretrain-code). Stacked on a size, from the weights of the stage before with a fresh optimizer:
#
#     python train.py configs/8b.py configs/long/16k.py --init_from=out/8b-8k --data=data/long-16k --out=out/8b-16k
_70b = _before["n_layer"] == 80

block_size = 16384
rope_theta = 2e6

batch_size = 1024 if _70b else 512
batch_ramp_at = 0
micro_batch = 1
total_samples = batch_size * (3470 if _70b else 6930)      # 58.2B tokens, 58.1B
warmup_samples = batch_size * (75 if _70b else 150)
decay_samples = 0
lr = 1e-6 if _70b else 1.1e-5

eval_every = 250
last_eval_windows = 2**24 // block_size
checkpoint_every = 250

# --stage=16k: billions of tokens of stage 5, of long documents (prepare.py --min_tokens=8192 --max_tokens=16383;
# the top tenth of FineWeb-HQ and FineWeb-2-HQ) and of books. Each stage takes those of its length: none is repeated.
stages = (("16k", {"stage5": 41.31, "fineweb-long": 11.83, "books": 5.15}, total_samples, 34),)
