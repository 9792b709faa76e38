# Long context, the first of four stages: windows of 8,192 tokens (report sec. 2.5, Tables 5 and 8;
# swiss-ai/pretrain-code). Stacked on a size, from the weights of the stage before with a fresh optimizer:
#
#     python train.py configs/8b.py configs/long/8k.py --init_from=out/8b --data=data/long-8k --out=out/8b-8k
#
# A step keeps the tokens of pretraining's end, 8.4M (8B) and 16.8M (70B). Its rate is constant, pretraining's floor,
# after 1.2B tokens of warm-up. Goldfish and clipping stay; so do AdEMAMix' own warm-ups of 100,000 steps, and the slow
# average never weighs more than 0.75: nearly AdamW.
#
#     python data.py data/stage5 data/fineweb-long data/books --join=data/long-8k        # what --stage=8k reads
_70b = _before["n_layer"] == 80

block_size = 8192
rope_theta = 1e6                   # its factor 8 and original context of 8,192 never change

batch_size = 2048 if _70b else 1024
batch_ramp_at = 0
micro_batch = 1
total_samples = batch_size * (4680 if _70b else 9350)      # 78.5B tokens, 78.4B
warmup_samples = batch_size * (75 if _70b else 150)
decay_samples = 0
lr = 1e-6 if _70b else 1.1e-5

eval_every = 250
last_eval_windows = 2**24 // block_size
checkpoint_every = 250

# --stage=8k: billions of tokens of stage 5, of long documents (prepare.py --min_tokens=4096 --max_tokens=8191;
# the top tenth of FineWeb-HQ and FineWeb-2-HQ) and of books. Each stage takes those of its length: none is repeated.
stages = (("8k", {"stage5": 55.80, "fineweb-long": 15.87, "books": 6.88}, total_samples, 33),)
