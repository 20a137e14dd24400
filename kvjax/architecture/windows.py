"""Which layers attend to a window, and how wide it is: the ways in which configs say so.

Each function returns the window of every layer, None where a layer attends to everything.
"""

from __future__ import annotations

from kvjax.architecture.fields import ConfigError, Fields

Windows = tuple[int | None, ...]
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
WINDOW_USE = "tokens a sliding-window layer keeps"


def no_windows(fields: Fields, layers: int) -> Windows:
    """Families without windows; a file that names the kind of every layer can only name one."""
    fields.layer_kinds("layer_types", "which layers have a window", layers, (FULL,))
    return (None,) * layers


def one_window(fields: Fields, layers: int) -> Windows:
    """Mixtral, Phi-3: every layer has the window, if there is one and `layer_types` does not say otherwise."""
    window = fields.optional("sliding_window", WINDOW_USE)
    kinds = fields.layer_kinds("layer_types", "which layers have a window", layers, (FULL, SLIDING))
    return (window,) * layers if kinds is None else _from_kinds(kinds, window)


def stated_window(fields: Fields, layers: int) -> Windows:
    """Mistral: transformers' default is 4096 and many files mean none, so the file has to say."""
    if "sliding_window" not in fields:
        raise ConfigError("sliding_window", "config has no field 'sliding_window'; add it (null: no window)")
    return one_window(fields, layers)


def window_from_layer(fields: Fields, layers: int) -> Windows:
    """Qwen 2 and 3: layers from `max_window_layers` on, and only if `use_sliding_window`."""
    use = fields.flag("use_sliding_window", "whether any layer has a window")
    window = fields.optional("sliding_window", WINDOW_USE)
    first = fields.whole("max_window_layers", "first layer with a window", 28)
    window = window if use else None
    kinds = fields.layer_kinds("layer_types", "which layers have a window", layers, (FULL, SLIDING))
    if kinds is None:
        return tuple(window if layer >= first else None for layer in range(layers))
    return _from_kinds(kinds, window)


def window_pattern(fields: Fields, layers: int, every: int, settable: bool = False) -> Windows:
    """Gemma 2 and 3, gpt-oss: every `every`-th layer attends to everything, unless `layer_types` says otherwise."""
    window = fields.optional("sliding_window", WINDOW_USE)
    kinds = fields.layer_kinds("layer_types", "which layers have a window", layers, (FULL, SLIDING))
    if settable:
        every = fields.integer("sliding_window_pattern", "one layer in this many attends to everything", every)
    if kinds is None:
        kinds = tuple(FULL if (layer + 1) % every == 0 else SLIDING for layer in range(layers))
    return _from_kinds(kinds, window)


def chunks(fields: Fields, layers: int) -> Windows:
    """Llama 4: layers with rotary positions attend within aligned chunks, the others to everything."""
    chunk = fields.optional("attention_chunk_size", "tokens of a chunk")
    kinds = fields.layer_kinds("layer_types", "which layers are chunked", layers, (FULL, CHUNKED))
    rotary = fields.integers("no_rope_layers", "1: rotary and chunked; 0: no positions, full attention")
    every = fields.integer("no_rope_layer_interval", "one layer in this many attends to everything", 4)
    if kinds is None:
        rotary = rotary or tuple((layer + 1) % every for layer in range(layers))
        if len(rotary) != layers:
            raise ConfigError("no_rope_layers", f"config no_rope_layers has {len(rotary)} entries for {layers} layers")
        kinds = tuple(CHUNKED if one and chunk else FULL for one in rotary)
    return _from_kinds(kinds, chunk, "attention_chunk_size")


def _from_kinds(kinds: tuple[str, ...], window: int | None, field: str = "sliding_window") -> Windows:
    other = next((kind for kind in kinds if kind != FULL), None)
    if other is not None and window is None:
        raise ConfigError(field, f"config layer_types has {other!r} and {field} is null; give {field} a number")
    return tuple(None if kind == FULL else window for kind in kinds)
