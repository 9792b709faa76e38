# Everything together: the recipe of Apertus against the Llama-style one that the report starts from (llama.py).
study = "apertus"
question = "Apertus' recipe against the Llama-style one"
baseline = "llama"
arms = dict(llama="configs/ablations/llama.py", apertus={})
lrs = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
published = "report sec. 2.4, 3B, one run: 1.906 -> 1.843 nats of training loss, the baseline's final loss after 60 to 70 % of its tokens."
reading = (
    "The sign of the headline holds at this size, for three seeds of three: -0.049 bits per byte, about nine standard deviations of the "
    "paired difference, although Apertus' labels lose 1.6 % to Goldfish. The share of tokens is 82 %, not the published 60 to 70 %. What the "
    "numbers do not say: 0.3M tokens of Python are 300 steps, three quarters of the 0.69M parameters are embeddings, and how the gain "
    "divides among optimizer, activation and schedule is the other studies' question. The Llama-style arm's best rate is inside the grid, "
    "Apertus' at its lower edge, so a finer search could only widen the gap. The seconds are from a machine shared with other work and compare nothing.")
