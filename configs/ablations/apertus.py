# Everything together: the recipe of Apertus against the Llama-style one that the report starts from (llama.py).
study = "apertus"
question = "Apertus' recipe against the Llama-style one"
baseline = "llama"
arms = dict(llama="configs/ablations/llama.py", apertus={})
lrs = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
published = (
    "report sec. 2.4, 3B, one run: 1.906 -> 1.843 nats of training loss, the baseline's final loss after 60 to 70 "
    "% of its tokens.")
reading = (
    "The sign of the headline holds at this size, in five seeds of five: -0.097 +- 0.032 bits per byte, although "
    "Apertus' labels lose 1.6 % to Goldfish. The baseline's loss is reached after 70 % of its tokens; published "
    "are 60 to 70 %. Each arm's best rate is inside a grid of five, and they are far apart: 1e-3 for Apertus, "
    "4e-3 for the baseline, which at 1e-3 is 0.147 behind. The other studies exchange one choice at a time: half "
    "a cosine instead of WSD costs 0.042, and no other that was asked costs 0.01 at its own best rate. 0.3M "
    "tokens of Python are 300 steps.")
