# Long context, the third of four stages: windows of 32,768 tokens (report sec. 2.5, Tables 5 and 8;
# swiss-ai/pretrain-code). Stacked on a size, from the weights of the stage before with a fresh optimizer:
#
#     python train.py configs/8b.py configs/long/32k.py --init_from=out/8b-16k --data=data/long-32k --out=out/8b-32k
_70b = _before["n_layer"] == 80

block_size = 32768
rope_theta = 4e6

batch_size = 512 if _70b else 256
batch_ramp_at = 0
micro_batch = 1
total_samples = batch_size * (3500 if _70b else 7000)      # 58.7B tokens, 58.7B
warmup_samples = batch_size * (75 if _70b else 150)
decay_samples = 0
lr = 1e-6 if _70b else 1.1e-5

eval_every = 250
last_eval_windows = 2**24 // block_size
checkpoint_every = 250

# --stage=32k: billions of tokens of stage 5, of long documents (prepare.py --min_tokens=16384 --max_tokens=32767;
# the top tenth of FineWeb-HQ and FineWeb-2-HQ) and of books. Each stage takes those of its length: none is repeated.
stages = (("32k", {"stage5": 41.62, "fineweb-long": 12.09, "books": 5.16}, total_samples, 35),)
