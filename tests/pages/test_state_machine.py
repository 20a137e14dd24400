"""Hypothesis looks for a sequence of operations on which table and model part, and shortens what it finds."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.pages.machine import PageTableMachine

PROFILE = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=30,
    stateful_step_count=25,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)


def test_no_sequence_of_operations_tells_the_table_from_the_model():
    run_state_machine_as_test(PageTableMachine, settings=PROFILE)
