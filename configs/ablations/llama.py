# The baseline that the report ablates against (Table 3): a Llama-style model and recipe. Name it after a config:
#     python train.py configs/1b5.py configs/ablations/llama.py
activation = "swiglu"
qk_norm = False
doc_mask = False
rope_scaling = 32.0               # the 1B baseline's launcher has Llama 3.2's factor
goldfish_k = 0
optimizer = "adamw"
betas = (0.9, 0.95, 0.9999)       # the third is not used
grad_clip = 1.0
schedule = "cosine"
lr = 3e-4
min_lr = 3e-5
