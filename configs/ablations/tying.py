# One matrix for the embedding and the output, or two: fewer parameters at equal tokens.
study = "tying"
question = "tied and untied embeddings"
baseline = "untied"
arms = dict(untied={}, tied=dict(tie_embeddings=True))
lrs = (5e-4, 1e-3, 2e-3)
published = "no row in the report; Apertus is untied at both sizes."
reading = (
    "Not told apart: +0.008 +- 0.020 bits per byte for one matrix instead of two, at 73 % of the parameters. Over "
    "half of this model's parameters are embeddings, which is not so at 8B.")
