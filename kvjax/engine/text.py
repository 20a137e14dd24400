"""Text from tokens, one at a time: pieces that are whole, and stop strings wherever they fall."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids → text, special tokens left out."""

INCOMPLETE = "\ufffd"
"""What decoders put where bytes of a character are still missing."""


class DecodeError(RuntimeError):
    """The caller's `decode` raised, or gave no string; the message says which."""


class TextStream:
    """The text of one request as its tokens arrive.

    A token's text can depend on the one before it (leading spaces) and may end inside a character, so each piece is the
    difference between two decodings of a short window that starts at the last whole piece.  O(1) decoding a token.

    Whatever goes wrong in `decode` comes out as `DecodeError`, and the stream ends with the text it has.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()):
        self._decode = decode
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._window = 0  # first token of the window that is decoded
        self._read = 0  # tokens whose text is in `text`
        self._shown = 0  # characters handed out
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> bool:
        """Adds one token; True if its text completes a stop string, which ends the stream."""
        self._tokens.append(token)
        whole, known = self._window_text()
        if len(whole) > len(known) and not whole.endswith(INCOMPLETE):
            self._append(whole[len(known) :])
            self._window, self._read = self._read, len(self._tokens)
        return self.stopped

    def take(self) -> str:
        """Text not yet handed out that no stop string can reach back into."""
        held_back = 0 if self.stopped else max((len(stop) - 1 for stop in self._stop), default=0)
        return self._hand_out(len(self.text) - held_back)

    def finish(self) -> str:
        """Ends the stream and hands out the rest, bytes of an unfinished character included."""
        if not self.stopped:
            whole, known = self._window_text()
            self._append(whole[len(known) :])
            self._window = self._read = len(self._tokens)
        return self._hand_out(len(self.text))

    def _window_text(self) -> tuple[str, str]:
        """The text of the window, and of that part of it which is in `text` already."""
        return self._text(self._window, len(self._tokens)), self._text(self._window, self._read)

    def _text(self, start: int, end: int) -> str:
        try:
            text = self._decode(self._tokens[start:end])
        except Exception as error:  # the caller's code: it may raise anything
            self.stopped = True
            raise DecodeError(f"decode raised {type(error).__name__}: {error}") from error
        if not isinstance(text, str):
            self.stopped = True
            raise DecodeError(f"decode gave {type(text).__name__}, not a string")
        return text

    def _append(self, piece: str) -> None:
        before = len(self.text)
        self.text += piece
        found = [self.text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stop]
        if any(place >= 0 for place in found):
            self.text = self.text[: min(place for place in found if place >= 0)]
            self.stopped = True

    def _hand_out(self, end: int) -> str:
        end = max(end, self._shown)
        piece, self._shown = self.text[self._shown : end], end
        return piece
