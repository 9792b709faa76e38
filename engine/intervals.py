"""
Confidence intervals and p-values of a mean by Student's t, and Wilson's interval of a share.

    mean +- t(n - 1) sd / sqrt(n)        t(1) = 12.7, t(2) = 4.3, t(4) = 2.8

The normal distribution's 1.96 in place of t holds for many values only, and studies have five seeds.
Sources: Abramowitz & Stegun, Handbook of Mathematical Functions (1964), 26.7; Wilson, JASA 22 (1927).
"""

import math
import statistics


def p_value(t, df):
    """
    P(|T| > |t|) of Student's t with df degrees of freedom, an integer of at least 1.

    By the finite sums of Abramowitz & Stegun 26.7.3-4, where a = atan(|t| / sqrt(df)) and c = cos a:

        df even     P(|T| < |t|) = sin a (1 + 1/2 c^2 + (1 * 3)/(2 * 4) c^4 + ...)                      df / 2 terms
        df odd      P(|T| < |t|) = 2/pi (a + c sin a (1 + 2/3 c^2 + (2 * 4)/(3 * 5) c^4 + ...))    (df - 1) / 2 terms
    """
    angle = math.atan(abs(t) / math.sqrt(df))
    odd = df % 2
    term, total = 1.0, 0.0
    for n in range(1 + odd, df, 2):
        total += term
        term *= math.cos(angle) ** 2 * n / (n + 1)
    inside = math.sin(angle) * total
    if odd:
        inside = 2 / math.pi * (angle + math.cos(angle) * inside)
    return max(0.0, 1 - inside)


def t_quantile(df):
    """The t with P(|T| > t) = 0.05, by bisection: half of a 95 % interval is t standard errors."""
    if df > 10_000:
        # The normal quantile agrees to 2e-4 here, and p_value would add up thousands of terms.
        return 1.959963984540054
    low, high = 0.0, 1000.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        if p_value(middle, df) > 0.05:
            low = middle
        else:
            high = middle
    return low


def student(values):
    """
    The mean of a list of numbers, half of its 95 % interval, and the p-value of a true mean of 0: three floats.

    Interval and p-value are nan for one value, all three for an empty list.
    """
    n = len(values)
    mean = statistics.fmean(values) if n else math.nan
    if n < 2:
        return mean, math.nan, math.nan
    error = statistics.stdev(values) / math.sqrt(n)
    if not error:
        return mean, 0.0, float(mean == 0)
    return mean, t_quantile(n - 1) * error, p_value(mean / error, n - 1)


def wilson(right, n):
    """
    95 % interval (low, high) of the share right / n (Wilson 1927).

    It stays inside [0, 1] and keeps its coverage at small n, unlike p +- 1.96 sd.
    """
    z = 1.96
    scale = n + z**2
    centre = right + z**2 / 2
    half = z * math.sqrt(right * (n - right) / n + z**2 / 4)
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)
