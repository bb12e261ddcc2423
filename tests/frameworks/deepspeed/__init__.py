"""DeepSpeed's engines through ray_ckpt, on DeepSpeed's own CPU accelerator."""
