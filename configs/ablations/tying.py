# One matrix for the embedding and the output, or two: fewer parameters at equal tokens.
study = "tying"
question = "tied and untied embeddings"
baseline = "untied"
arms = dict(untied={}, tied=dict(tie_embeddings=True))
lrs = (1e-3, 2e-3, 4e-3, 8e-3)
published = "no row in the report; Apertus is untied at both sizes."
