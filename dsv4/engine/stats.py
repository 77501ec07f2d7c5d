"""Statistics of a generation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class GenerationStats:
    """Counts and wall-clock seconds of an engine's forwards, over all its requests.

    Attributes:
        prefill_tokens: tokens prefilled; more than the prompts hold when a request was recomputed.
        prefill_seconds: time in prefill forwards.
        prefix_tokens: tokens that were found in the prefix cache and not prefilled.
        decode_tokens: tokens that decode forwards added; the first token of a request is prefill's.
        decode_seconds: time in decode forwards.
        drafts_proposed, drafts_accepted: draft tokens that decode forwards checked, and kept.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    drafts_proposed: int = 0
    drafts_accepted: int = 0
    prefix_tokens: int = 0

    @property
    def prefill_rate(self) -> float:
        """Prefilled tokens per second; 0 without prefill."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Decoded tokens per second; 0 without decode."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def __str__(self) -> str:
        text = (
            f"prefill {self.prefill_tokens} tokens, {self.prefill_rate:.1f} tokens/s; "
            f"decode {self.decode_tokens} tokens, {self.decode_rate:.1f} tokens/s"
        )
        if self.drafts_proposed:
            share = self.drafts_accepted / self.drafts_proposed
            text += f"; drafts accepted {self.drafts_accepted}/{self.drafts_proposed} ({share:.0%})"
        return text
