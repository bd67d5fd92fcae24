"""Intervals and tests against scipy and against numbers worked by hand."""

import numpy as np
import pytest
from scipy import stats

from fedabml.experiments.statistics import holm, interval, paired, student_quantile, student_within, t_test


@pytest.mark.parametrize("df", [1, 2, 3, 4, 5, 8, 9, 50, 51, 1000])
def test_students_distribution(df):
    for t in (0.0, 1e-6, 0.3, 1.0, 2.5, 10.0, 1e3):
        assert student_within(t, df) == pytest.approx(1 - 2 * stats.t.sf(t, df), abs=1e-10)  # scipy's own error
    for level in (0.5, 0.9, 0.95, 0.999):
        assert student_quantile(df, level) == pytest.approx(stats.t.ppf((1 + level) / 2, df), rel=1e-9)


def test_the_quantiles_of_every_textbook():
    assert [round(student_quantile(df), 3) for df in (1, 2, 4, 9)] == [12.706, 4.303, 2.776, 2.262]
    with pytest.raises(ValueError, match="at least one degree"):
        student_quantile(0)


def test_an_interval():
    values = [0.9, 0.94, 0.92]  # deviation 0.02, so half is 4.303 · 0.02 / √3
    mean, half = interval(values)
    assert mean == pytest.approx(0.92) and half == pytest.approx(0.04968, abs=1e-5)
    low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    assert (mean - half, mean + half) == pytest.approx((low, high))
    assert interval([0.5]) == (0.5, None)
    assert interval([0.5, 0.5]) == (0.5, 0.0)


def test_a_t_test():
    rng = np.random.default_rng(0)
    for n in (2, 3, 5, 100):
        a, b = rng.normal(0.1, 1, (2, n))
        assert t_test(a - b) == pytest.approx(stats.ttest_rel(a, b).pvalue, abs=1e-12)
    assert t_test([1.0, 2.0, 3.0]) == pytest.approx(0.0742, abs=1e-4)  # t = 2 / (1/√3) = 3.464 with two degrees
    assert t_test([0.0, 0.0, 0.0]) == 1 and t_test([0.1, 0.1, 0.1]) == 0
    assert t_test([5.0]) == 1  # one difference shows nothing
    sure = [t_test(np.linspace(1 - 0.003 * k, 1 + 0.003 * k, 31)) for k in range(1, 30)]
    assert min(sure) == 0 and max(sure) < 1e-9  # never below, though a sum of Student's passes 1 by rounding


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])  # 3·.01, then 2·.03, then no less than that
    assert holm([0.5, 0.9]) == pytest.approx([1, 1])
    assert holm([0.2]) == [0.2] and holm([]) == []


def test_a_difference_must_repeat_over_seeds_and_over_clients():
    rng = np.random.default_rng(1)
    noise = rng.normal(0, 0.01, (5, 40))
    real = paired(0.05 + noise)
    assert real.p_seeds < 1e-4 and real.p_clients < 1e-4 and real.p == max(real.p_seeds, real.p_clients)
    assert real.mean == pytest.approx(0.05, abs=0.005)
    shaky = paired(np.array([[0.1], [-0.04], [0.12], [-0.05], [0.1]]) + noise)  # 200 clients agree, 5 seeds do not
    assert shaky.p_clients < 1e-4 and shaky.p_seeds > 0.1 and shaky.p > 0.1
    lucky = np.zeros((3, 40))
    lucky[:, 0] = 0.9  # the same in every seed, and all of it one client's
    found = paired([*lucky])
    assert found.p_seeds < 1e-9 and found.p > 0.05


@pytest.mark.parametrize(("noise", "seeds"), [(0.0, 3), (0.5, 3), (0.5, 6)])
def test_the_least_difference_is_where_the_test_begins_to_see(noise, seeds):
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(seeds, 20)) + noise * rng.normal(size=(seeds, 1))
    for level in (0.05, 0.05 / 14):
        least = paired([*rows]).least(level)
        assert (
            paired([*(rows - rows.mean() + 1.001 * least)]).p
            < level
            < paired([*(rows - rows.mean() + 0.999 * least)]).p
        )
    assert paired([np.array([0.1])]).least(0.05) is None


def test_few_seeds_are_not_tested():
    found = paired([np.array([0.1, 0.2, 0.3]), np.array([0.2, 0.2, 0.2])])
    assert found.p_seeds is None and found.p == found.p_clients == pytest.approx(t_test([0.1, 0.2, 0.3, 0.2, 0.2, 0.2]))
    assert paired([np.array([0.1, 0.2])]).half is None


def test_a_client_that_is_met_in_every_seed_is_one_witness():
    row = np.array([0.1, 0.0, 0.05, -0.02])
    names = ["north", "south", "west", "east"]
    assert paired([row] * 5).p_clients < 0.05
    assert paired([row] * 5, [names] * 5).p_clients == pytest.approx(t_test(row))
    lacking = paired([row, row[:2]], [names, names[:2]])  # a client without data in some seed
    assert lacking.p_clients == pytest.approx(t_test(row))


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_equal_methods_are_rarely_distinguished(noise):
    """The level of the test with three rivals, five seeds and training noise that clients share."""
    rng = np.random.default_rng(2)
    wrong = 0
    for _ in range(200):
        values = rng.normal(size=(4, 5, 20)) + noise * rng.normal(size=(4, 5, 1))
        order = np.argsort(-values.mean((1, 2)))
        wrong += min(holm([paired([*(values[order[0]] - values[i])]).p for i in order[1:]])) < 0.05
    assert wrong / 200 < 0.11
