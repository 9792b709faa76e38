"""Weights of sources as whole numbers of samples."""

# A weight is a whole number of slots, so every 10,000 samples have exactly this mixture.
SLOTS = 10_000


def mix_weights(weights):
    """
    {source: weight} -> {source: slots of SLOTS}, by largest remainders.

    ValueError if there is no weight, or one is not positive or below 1/SLOTS of their sum.
    """
    if not weights or min(weights.values()) <= 0:
        raise ValueError(f"weights {weights}: want a positive number for each source")
    total = sum(weights.values())
    exact = {name: SLOTS * weight / total for name, weight in weights.items()}
    slots = {name: int(share) for name, share in exact.items()}
    # Largest remainder first.
    for name in sorted(exact, key=lambda name: slots[name] - exact[name])[: SLOTS - sum(slots.values())]:
        slots[name] += 1
    if min(slots.values()) < 1:
        raise ValueError(f"weights {weights}: the smallest is below one sample in {SLOTS:,}")
    return slots
