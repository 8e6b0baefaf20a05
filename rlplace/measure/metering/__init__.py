"""What a step that runs holds in memory, as PyTorch's allocators hand it out: what predictions are held against."""
