"""Keep the logit biases of every slot on the device: those of requests, and −inf for tokens that may not come next.

Legend: S slots, B bias entries of a slot, F entries of a slot that depend on generated tokens, G such tokens of an
entry, r slots that are looked up.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from tok_core.messages import NewSlots

_ANY_TOKEN = -1  # in `BiasTables.prefix`


class BiasTables:
    """Bias entries of every slot. The tables have no entries until a request needs some; unused entries are padding.

    token   int64 [S, B]: the token whose logit is biased
    value   float32 [S, B]: the number that is added to it
    until   int64 [S, B]: first sampled position at which the entry no longer applies; 0 for unused entries
    prefix  int64 [S, F, G]: the first F entries of a slot apply only after these generated tokens, the last token first
            in the row; −1: any token
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.token = torch.zeros((slots, 0), dtype=torch.int64, device=device)
        self.value = torch.zeros((slots, 0), dtype=torch.float32, device=device)
        self.until = torch.zeros((slots, 0), dtype=torch.int64, device=device)
        self.prefix = torch.zeros((slots, 0, 0), dtype=torch.int64, device=device)

    def replace(self, slot: Tensor, new: NewSlots, staged: Mapping[str, Tensor]) -> None:
        """Replace the entries of `slot`, the slots of `new`; `staged` has `bias_arrays(new)` on the device."""
        index = _index_within_slot(new.bias_slot)
        self._grow(int(index.max(initial=-1)) + 1)
        if not self.token.shape[1]:
            return
        self.until.index_fill_(0, slot, 0)
        self.prefix.index_fill_(0, slot, _ANY_TOKEN)
        if not len(index):
            return
        row, column = staged["new_bias_slot"].long(), staged["new_bias_index"].long()
        self.token[row, column] = staged["new_bias_token"].long()
        self.value[row, column] = staged["new_bias_value"]
        self.until[row, column] = staged["new_bias_until"].long()
        if len(new.prefix_slot):
            self._grow_prefixes(int(_index_within_slot(new.prefix_slot).max()) + 1, new.prefix.shape[1])
            row, column = staged["new_prefix_slot"].long(), staged["new_prefix_index"].long()
            tokens = staged["new_prefix"]
            self.prefix[row, column, : tokens.shape[1]] = tokens.long()

    def copy(self, slot: Tensor, source: Tensor) -> None:
        """Copy the entries of the slots `source` to the slots `slot`."""
        for table in (self.token, self.value, self.until, self.prefix):
            if table.numel():
                table.index_copy_(0, slot, table.index_select(0, source))

    def follows_prefix(self, slots: Tensor, generated: Tensor) -> Tensor:
        """Return whether the first F entries of `slots` apply after the generated tokens: bool `[r, F]`.

        `generated` is int64 `[r, G]`, the last token first.
        """
        prefix = self.prefix[slots]
        return ((prefix == generated.unsqueeze(1)) | (prefix == _ANY_TOKEN)).all(-1)

    def _grow(self, entries: int) -> None:
        """Make B at least `entries`."""
        more = entries - self.token.shape[1]
        if more > 0:
            self.token, self.value, self.until = (
                pad(table, (0, more)) for table in (self.token, self.value, self.until)
            )

    def _grow_prefixes(self, entries: int, tokens: int) -> None:
        """Make F at least `entries`, and G at least `tokens`."""
        more_entries, more_tokens = entries - self.prefix.shape[1], tokens - self.prefix.shape[2]
        if more_entries > 0 or more_tokens > 0:
            self.prefix = pad(self.prefix, (0, max(more_tokens, 0), 0, max(more_entries, 0)), value=_ANY_TOKEN)


def bias_arrays(new: NewSlots) -> dict[str, np.ndarray]:
    """Return the host arrays that `BiasTables.replace` needs, by name; some may be empty."""
    arrays = {f"new_{name}": getattr(new, name) for name in ("bias_slot", "bias_token", "bias_value", "bias_until")}
    arrays["new_bias_index"] = _index_within_slot(new.bias_slot)
    if len(new.prefix_slot):
        arrays |= {"new_prefix_slot": new.prefix_slot, "new_prefix": new.prefix}
        arrays["new_prefix_index"] = _index_within_slot(new.prefix_slot)
    return arrays


def _index_within_slot(slot: np.ndarray) -> np.ndarray:
    """Return each entry's index among the entries of its slot, which are contiguous: `[4, 4, 7] -> [0, 1, 0]`."""
    _, first, owner = np.unique(slot, return_index=True, return_inverse=True)
    return (np.arange(len(slot)) - first[owner]).astype(np.int32)
