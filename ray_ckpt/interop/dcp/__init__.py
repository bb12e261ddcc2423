"""torch.distributed.checkpoint (DCP): its `save`, `async_save` and `load` with the storage of ray_ckpt."""
