# One matrix for the embedding and the output, or two: fewer parameters at equal tokens.
study = "tying"
question = "tied and untied embeddings"
baseline = "untied"
arms = dict(untied={}, tied=dict(tie_embeddings=True))
lrs = (5e-4, 1e-3, 2e-3)
published = "no row in the report; Apertus is untied at both sizes."
reading = (
    "No difference that three seeds could show: one matrix is behind two by 0.008 +- 0.004 bits per byte (p = 0.08) at "
    "equal tokens, with 524,288 fewer parameters, 27 % of the model; no comparison at equal size. At 0.69M parameters, "
    "where the second matrix was 38 %, it was worth 0.044. At Apertus' size it is 7 % (8B) and 1.5 % (70B). Untied, the "
    "best rate is the grid's highest, 2e-3, by 0.0005; 4e-3, tried in the activations study, is worse by 0.19.")
