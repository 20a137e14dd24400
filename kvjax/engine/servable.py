"""Which requests an engine can ever serve."""

from __future__ import annotations

from kvjax.engine.backing import Backing
from kvjax.engine.request import Request
from kvjax.engine.sequence import pages_for


def why_not(request: Request, *, vocabulary: int, backing: Backing, has_text: bool) -> str | None:
    """Why a request can never be served; None if it can.

    Args:
      request: the request.
      vocabulary: of the model.
      backing: the cache.
      has_text: there is a decoder of tokens.
    """
    prompt = request.prompt
    foreign = [token for token in prompt if not 0 <= token < vocabulary]
    if foreign:
        return f"prompt holds token id {foreign[0]}; the vocabulary is 0 … {vocabulary - 1}"
    if len(prompt) >= backing.max_context:
        return f"prompt of {len(prompt)} tokens leaves no room in a context of {backing.max_context}"
    if pages_for(len(prompt), backing.page_size) > backing.num_pages:
        return (
            f"prompt of {len(prompt)} tokens does not fit the cache of {backing.num_pages} pages of "
            f"{backing.page_size} tokens; raise num_pages"
        )
    if request.stop and not has_text:
        return "stop strings need a tokenizer, and there is none; use eos ids"
    return None
