# Long context: Apertus' four stages from windows of 4,096 to 65,536 tokens (report sec. 2.5, Tables 5 and 8;
# swiss-ai/pretrain-code). 8k.py, 16k.py, 32k.py and 64k.py are the stages of the 8B, 8k_70b.py to 64k_70b.py those of
# the 70B. Name one after the config of the size, and start from the weights of the stage before, with a fresh
# optimizer:
#
#     python train.py configs/8b.py configs/long/8k.py --init_from=out/8b --data=$DATA --out=out/8b-8k
#     python train.py configs/70b.py configs/long/8k_70b.py --init_from=out/70b --data=$DATA --out=out/70b-8k
#
# DATA=data/stage5,data/fineweb-long,data/books is what --stage=8k reads.
#
# A step has as many tokens as at the end of pretraining, 8.4M (8B) and 16.8M (70B). After 1.26B tokens of warm-up the
# learning rate is constant, at pretraining's floor. Goldfish and clipping stay; so do AdEMAMix' own warm-ups of 100,000
# steps, so the slow average never weighs more than 0.75: nearly AdamW. RoPE's factor 8 and original context of 8,192
# never change; theta is that of the report and the released models (the 70B's script has 8e6 at 64k).
#
# The table `stages` has the billions of tokens of stage 5's data, of long documents (the top tenth of FineWeb-HQ and
# FineWeb-2-HQ) and of books. Each stage takes documents from half a window to a whole one, so none is repeated: 16k by
# prepare.py --min_tokens=8192 --max_tokens=16383. The seeds are ours: the scripts have 28 in every stage.
batch_ramp_at = 0
micro_batch = 1
decay_samples = 0

eval_every = 250
checkpoint_every = 250
