"""Covering arrays: few rows of settings in which each pair of values of two features occurs together."""

from itertools import combinations
from random import Random


def pairs_of(row):
    """The pairs of a row or of a part of one: {((feature, value), (feature, value))}, features in one order."""
    return set(combinations(sorted(row.items(), key=lambda item: item[0]), 2))


def covering(features, never=(), tries=20, seed=0):
    """
    Rows, {feature: value}, until each allowed pair is in one of them. features: {name: values}.

    Greedy: a row begins with a pair that is still missing and takes, feature by feature, the value that adds the most
    missing pairs; of several such rows, in random orders of the features, the best one stays. never: pairs of
    (feature, value) that exclude each other.
    """
    rng, rows = Random(seed), []
    excluded = {pair for one, other in never for pair in ((one, other), (other, one))}
    values = [(name, value) for name in sorted(features) for value in features[name]]
    missing = {(a, b) for a, b in combinations(values, 2) if a[0] != b[0] and (a, b) not in excluded}
    while missing:
        rows.append(max((draw_row(features, missing, excluded, rng) for _ in range(tries)), key=lambda row: row[1])[0])
        missing -= pairs_of(rows[-1])
    return rows


def draw_row(features, missing, excluded, rng):
    """(a row, how many of the missing pairs it has)"""
    row = dict(rng.choice(sorted(missing, key=repr)))
    for name in sorted(sorted(features.keys() - row.keys()), key=lambda name: rng.random()):
        items = [(name, value) for value in features[name]]
        items = [item for item in items if not any((item, other) in excluded for other in row.items())]
        counts = [sum(tuple(sorted((item, other))) in missing for other in row.items()) for item in items]
        best = [item for item, count in zip(items, counts) if count == max(counts)]
        row |= [rng.choice(best)]
    return row, len(pairs_of(row) & missing)
