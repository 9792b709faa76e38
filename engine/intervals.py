"""
Confidence intervals and p-values of a mean by Student's t, and Wilson's interval of a share.

    mean +- t(n - 1) sd / sqrt(n)        t(1) = 12.7, t(2) = 4.3, t(4) = 2.8

The normal distribution's 1.96 in place of t holds for many values only, and studies have five seeds.
Sources: Abramowitz & Stegun, Handbook of Mathematical Functions (1964), 26.7; Wilson, JASA 22 (1927).
"""

import math
import statistics

import mpmath  # torch installs it, for sympy


def p_value(t, df):
    """
    P(|T| > |t|) of Student's t with df degrees of freedom.

    By the regularised incomplete beta function, I_x(df / 2, 1 / 2) at x = df / (df + t^2) (26.7.1, 26.5.27).
    """
    return float(mpmath.betainc(df / 2, 0.5, 0, df / (df + t * t), regularized=True))


def t_quantile(df):
    """The t with P(|T| > t) = 0.05: half of a 95 % interval is t standard errors."""
    return float(mpmath.findroot(lambda t: p_value(t, df) - 0.05, 2))


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
