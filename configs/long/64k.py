# Long context, the last of four stages: windows of 65,536 tokens (report sec. 2.5, Tables 5 and 8;
# swiss-ai/pretrain-code). Stacked on a size, from the weights of the stage before with a fresh optimizer:
#
#     python train.py configs/8b.py configs/long/64k.py --init_from=out/8b-32k --data=data/long-64k --out=out/8b-64k
_70b = _before["n_layer"] == 80

block_size = 65536
rope_theta = 12e6                 # of report and released models; the 70B's script has 8e6
doc_mask = False                  # commented out in both scripts of this stage

batch_size = 256 if _70b else 128
batch_ramp_at = 0
micro_batch = 1
total_samples = batch_size * (1742 if _70b else 3480)      # 29.2B tokens, 29.2B
warmup_samples = batch_size * (75 if _70b else 150)
decay_samples = 0
lr = 1e-6 if _70b else 1.1e-5

eval_every = 250
last_eval_windows = 2**24 // block_size
checkpoint_every = 250

# --stage=64k: billions of tokens of stage 5, of long documents (prepare.py --min_tokens=32768 --max_tokens=65535;
# the top tenth of FineWeb-HQ and FineWeb-2-HQ) and of books. Each stage takes those of its length: none is repeated.
stages = (("64k", {"stage5": 20.74, "fineweb-long": 5.58, "books": 2.96}, total_samples, 36),)
