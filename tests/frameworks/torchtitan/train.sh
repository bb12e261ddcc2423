# The command of the guide, with ranks on the CPU: `sh train.sh RANKS SETUP FLAGS`; see program.py.
ranks=$1
setup=$2
shift 2
exec torchrun --nproc_per_node "$ranks" -m tests.frameworks.torchtitan.program "$setup" "$@" \
    --checkpoint.enable \
    --override.imports ray_ckpt.torchtitan.manager
