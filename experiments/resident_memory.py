"""What a virtual space costs in memory, by the kernel's own account, when rows reserve far more than they use.

    python -m experiments.resident_memory [--rows 64] [--max_context 32768] [--used 1000] [--shared 0,1000]

Every row reserves `--max_context` tokens and is given `--used`; with `--shared` the rows after the first take so many
of them from it.  Counted are the blocks of the file behind the mappings, and what /proc/self/smaps says of the
addresses: Rss counts a page for every place it is mapped at, Pss once.  Linux.
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import app, flags

from experiments.figures import write_figures
from experiments.resident_measure import serve

ROWS = flags.DEFINE_integer("rows", 64, "Sequences.", lower_bound=1)
MAX_CONTEXT = flags.DEFINE_integer("max_context", 32768, "Tokens that each reserves.", lower_bound=1)
USED = flags.DEFINE_integer("used", 1000, "Tokens that each holds.", lower_bound=1)
SHARED = flags.DEFINE_list("shared", ["0", "1000"], "Tokens that the other rows share with the first.")
PAGE_GROUP_BYTES = flags.DEFINE_integer("page_group_bytes", 65536, "Bytes mapped at a time.", lower_bound=4096)
JSON = flags.DEFINE_string("json", None, "Also write the figures to this file.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    figures = []
    for shared in map(int, SHARED.value):
        space, memory = serve(
            rows=ROWS.value,
            max_context=MAX_CONTEXT.value,
            used=USED.value,
            shared=shared,
            page_group_bytes=PAGE_GROUP_BYTES.value,
        )
        token = space.layout.record_bytes
        figures.append(
            {
                "shared_tokens": shared,
                "reserved_bytes": space.figures().reserved_bytes,
                "token_bytes": token * (ROWS.value * (USED.value - shared) + shared),
                "page_group_bytes": space.layout.page_bytes,
                "blocks": memory.blocks,
                "rss": memory.rss,
                "pss": memory.pss,
            }
        )
        space.close()
        one = figures[-1]
        print(
            f"{ROWS.value} rows × {MAX_CONTEXT.value} reserved, {USED.value} used, {shared} shared: addresses "
            f"{one['reserved_bytes'] / 1e6:,.0f} MB, tokens {one['token_bytes'] / 1e6:,.1f} MB, file "
            f"{memory.blocks / 1e6:,.1f} MB, Pss {memory.pss / 1e6:,.1f} MB, Rss {memory.rss / 1e6:,.1f} MB",
            flush=True,
        )
    if JSON.value:
        write_figures(JSON.value, resident=figures)


if __name__ == "__main__":
    app.run(main)
