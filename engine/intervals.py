"""
What a mean or a share of few values is worth: intervals and p-values by Student's t, and Wilson's interval of a share.

    mean +- t(n - 1) sd / sqrt(n)        t(1) = 12.7, t(2) = 4.3, t(4) = 2.8: the normal's 1.96 is true of many values only
"""

import functools
import math
import statistics


def p_value(t, df):
    """
    P(|T| > |t|) of Student's t with a whole number df >= 1 of degrees of freedom, by the finite sums of Abramowitz & Stegun 26.7.3-4.
    """
    if df < 1:
        return math.nan
    if math.isinf(t):
        return 0.0
    angle = math.atan(abs(t) / math.sqrt(df))
    term, total = 1.0, 0.0
    for i in range(df // 2):                                                # even: 1 + c^2/2 + 1*3 c^4/(2*4) ...; odd: 1 + 2 c^2/3 ...
        total += term
        term *= math.cos(angle) ** 2 * ((2 * i + 1) / (2 * i + 2) if df % 2 == 0 else (2 * i + 2) / (2 * i + 3))
    inside = total * math.sin(angle) if df % 2 == 0 else 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total)
    return max(0.0, 1 - inside)


@functools.cache
def t_quantile(df, p=0.05):
    """t with P(|T| > t) = p, by bisection."""
    if df > 10_000:                                                         # where the normal's is the same to 2e-4
        return statistics.NormalDist().inv_cdf(1 - p / 2)
    low, high = 0.0, 1000.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle, df) > p else (low, middle)
    return low


def wilson(right, n, z=1.96):
    """95 % interval of a share (Wilson 1927): stays inside [0, 1] and is honest at small n, where p +- 1.96 sd is not."""
    p, w = right / n, 1 + z * z / n
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / w
    return max(0.0, (p + z * z / (2 * n)) / w - half), min(1.0, (p + z * z / (2 * n)) / w + half)
