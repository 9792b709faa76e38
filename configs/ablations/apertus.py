# Everything together: the recipe of Apertus against the Llama-style one that the report starts from (llama.py).
study = "apertus"
question = "Apertus' recipe against the Llama-style one"
baseline = "llama"
arms = dict(llama="configs/ablations/llama.py", apertus={})
lrs = (5e-4, 1e-3, 2e-3, 4e-3)
published = "report sec. 2.4, 3B, one run: 1.906 -> 1.843 nats of training loss, the baseline's final loss after 60 to 70 % of its tokens."
reading = (
    "The sign of the headline holds at this size, for three seeds of three: -0.090 +- 0.014 bits per byte, although "
    "Apertus' labels lose 1.6 % to Goldfish. The baseline's loss is reached after 74 % of its tokens, published are 60 to "
    "70 %. Both arms' best rate is the same, 2e-3, inside a grid of four. Where it comes from here, by the other studies: "
    "the schedule, 0.024 of it; not the activation, the optimizer or the document mask, which make no difference that three "
    "seeds could show. The rest was not taken apart: QK-norm at the right rate, clipping at 0.1, AdamW's second beta, "
    "RoPE's scaling. With 0.69M parameters at as many tokens it was -0.056 and 82 %: the recipe gains with the size, as far "
    "as two sizes can say. 0.3M tokens of Python are 300 steps.")
