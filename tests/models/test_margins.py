"""The rule by which tokens are compared everywhere."""

import pytest

from tests.margins import MARGIN, assert_equal_tokens, compare_tokens


def test_equal_runs_are_equal():
    assert compare_tokens([1, 2, 3], [1, 2, 3], [1.0, 0.0, 1.0]) == (True, 0, None)


def test_a_divergence_is_excused_only_below_the_margin():
    assert compare_tokens([1, 9, 9], [1, 2, 3], [1.0, MARGIN / 2, 1.0]) == (True, 1, 1)
    assert compare_tokens([1, 9, 3], [1, 2, 3], [0.0, MARGIN, 0.0]) == (False, 0, 1)


def test_a_run_of_another_length_is_not_equal():
    assert compare_tokens([1, 2], [1, 2, 3], [0.0, 0.0, 0.0]) == (False, 0, 2)
    assert compare_tokens([1, 2, 3, 4], [1, 2, 3], [0.0, 0.0, 0.0]) == (False, 0, 3)


def test_margins_must_belong_to_the_expected_run():
    with pytest.raises(ValueError, match="one margin a token"):
        compare_tokens([1], [1], [])


def test_the_gate_names_the_run_and_the_token(capsys):
    runs = [compare_tokens([5], [5], [1.0]), compare_tokens([1], [2], [0.0]), compare_tokens([1], [2], [1.0])]
    with pytest.raises(AssertionError, match=r"\{2: 0\}"):
        assert_equal_tokens(runs, "broken")
    assert "3 runs, 1 divergences excused" in capsys.readouterr().out
