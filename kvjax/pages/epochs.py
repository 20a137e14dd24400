"""When a freed page may be used again: epochs and their fences."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from kvjax.inputs import integers
from kvjax.pages.status import Status
from kvjax.pages.table import PageTable


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class AdvanceInfo:
    """`Status` of an `advance`."""

    status: Int32[Array, ""]


def advance(table: PageTable, completed: Int32[Array, ""]) -> tuple[PageTable, AdvanceInfo]:
    """Closes the open epoch, and frees the pages that were dropped up to the end of epoch `completed`.

    A step enqueued in epoch e may still touch pages dropped in e; once the caller knows that e is complete, it says so
    here.  Within one program, and with one stream of programs, program order is the fence: pass `table.epoch`.

    Status: OK, or STALE if `completed` lies in the future, before an epoch already said to be complete, or more than
    `max_epochs` back; the epoch closes all the same, and nothing is freed.  O(1): nothing moves.
    """
    completed = integers("completed", completed, (), "one epoch number")
    max_epochs = table.groups[0].fences.shape[0]
    behind = table.epoch - completed
    valid = (behind >= 0) & (behind < max_epochs) & (completed - table.completed >= 0)
    groups = []
    for group in table.groups:
        fences = group.fences.at[table.epoch % max_epochs].set(group.tail)
        ready = jnp.where(valid, fences[completed % max_epochs], group.ready)
        groups.append(replace(group, fences=fences, ready=ready))
    table = replace(
        table,
        groups=tuple(groups),
        epoch=table.epoch + 1,
        completed=jnp.where(valid, completed, table.completed).astype(jnp.int32),
    )
    return table, AdvanceInfo(jnp.where(valid, Status.OK, Status.STALE).astype(jnp.int32))
