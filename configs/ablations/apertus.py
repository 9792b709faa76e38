# Everything together: the recipe of Apertus against the Llama-style one that the report starts from (llama.py).
study = "apertus"
question = "Apertus' recipe against the Llama-style one"
baseline = "llama"
arms = dict(llama="configs/ablations/llama.py", apertus={})
lrs = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
published = "report sec. 2.4, 3B, one run: 1.906 -> 1.843 nats of training loss, the baseline's final loss after 60 to 70 % of its tokens."
