from ray_ckpt.cli import main

main()
