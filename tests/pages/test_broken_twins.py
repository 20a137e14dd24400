"""Each law of ownership has a broken twin here, and the checks catch it.

A twin is the real code with one rule taken out.  `caught_after` drives it against the model until a comparison fails.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest

from kvjax.pages import GroupShape, Status, epochs, grow, holders, mapping, plan, share, shrink
from tests.pages.model import Harness, jitted

SHAPES = (GroupShape(14, 4, 5),)


def caught_after(seed: int, limit: int = 300) -> int:
    """Drives the transitions as they are now; the step whose comparison failed, or an error if there is none."""
    harness = Harness(SHAPES, rows=5, seed=seed, operations=jitted())
    for step in range(1, limit + 1):
        try:
            harness.step()
        except AssertionError:
            return step
    raise RuntimeError(f"{limit} steps did not tell the broken twin from the real table")


def without_copies(real):
    """A shared tail is written in place."""

    def planned(*args):
        outcome = real(*args)
        groups = tuple(replace(group, copy=jnp.zeros_like(group.copy)) for group in outcome.groups)
        return replace(outcome, groups=groups)

    return planned


def without_last_holder_rule(real):
    """Every holder that writes copies; the page they all left stays counted as held by the last."""
    return lambda page: (real(page)[0], jnp.zeros(page.shape, bool), real(page)[2])


def freeing_at_once(real):
    """Pages skip their limbo."""

    def advanced(table, completed):
        table, info = real(table, completed)
        return replace(table, groups=tuple(replace(g, ready=g.tail) for g in table.groups)), info

    return advanced


def clamping_refcounts(real):
    """Counts stop at one on the way down, so that a page never becomes free."""

    def changed(group, gained, lost):
        after, faults = real(group, gained, jnp.full_like(lost, group.num_pages))
        return after, faults

    return changed


def pushing_every_mention(real):
    """A page dropped by two rows in one call enters the ring twice."""

    def changed(group, gained, lost):
        after, faults = real(group, gained, lost)
        zero = after.refcount.at[lost].get(mode="fill", fill_value=1) == 0
        return holders._give_back(
            replace(after, tail=group.tail, ring=group.ring), jnp.where(zero, lost, group.num_pages)
        ), faults

    return changed


def lengthening_refused_rows(real):
    """A refused row's reserved end moves all the same."""

    def reserved(table, tokens, **keywords):
        after, info = real(table, tokens, **keywords)
        return replace(after, reserved=jnp.maximum(after.reserved, table.length + jnp.maximum(tokens, 0))), info

    return reserved


def committing_anything(real):
    """Lengths move past what was reserved."""

    def committed(table, tokens):
        _, info = real(table, tokens)
        return replace(table, length=table.length + jnp.maximum(tokens, 0)), replace(
            info, status=jnp.where(tokens < 0, Status.NOT_RESERVED, Status.OK)
        )

    return committed


def dropping_pages_but_not_lengths(real):
    """Table and length move apart."""

    def shrunk(table, kept, status, bound):
        after, info = real(table, kept, status, bound)
        return replace(after, length=table.length), info

    return shrunk


def serving_past_a_refusal(real):
    """Rows after the first that does not fit are served if they happen to fit: the order is not strict."""

    def needed(group, by_order, length, tokens, asking):
        need = real(group, by_order, length, tokens, asking)
        fits = jnp.cumsum(need.needed) <= group.free
        return replace(need, fresh=jnp.where(fits, need.fresh, 0))

    return needed


TWINS = [
    (grow, "plan_reserve", without_copies),
    (plan, "writers_of_each", without_last_holder_rule),
    (epochs, "advance", freeing_at_once),
    (mapping, "change_holders", clamping_refcounts),
    (mapping, "change_holders", pushing_every_mention),
    (share, "change_holders", clamping_refcounts),
    (grow, "reserve", lengthening_refused_rows),
    (grow, "commit", committing_anything),
    (shrink, "_shrink", dropping_pages_but_not_lengths),
    (plan, "_group_need", serving_past_a_refusal),
]


@pytest.mark.parametrize(("module", "name", "twin"), TWINS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_broken_twin_is_caught(monkeypatch, module, name, twin):
    broken = twin(getattr(module, name))
    monkeypatch.setattr(module, name, broken)
    monkeypatch.setattr("kvjax.pages." + name, broken, raising=False)
    assert caught_after(seed=0)
