"""Programs of ours that sandboxes find on their PATH."""
