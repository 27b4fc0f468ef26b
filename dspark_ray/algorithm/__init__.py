"""The paper as pure functions over arrays: no transformers, no torch.distributed, no Ray, no I/O."""
