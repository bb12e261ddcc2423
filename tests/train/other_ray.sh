#!/bin/sh
# The contract with Ray, and trainings under it, with another version than that of .venv:
#
#     tests/train/other_ray.sh 2.56.1      # the oldest that is supported, the default
#
# The other version lies over the packages of .venv, which stays as it is. Takes about two minutes.
set -eu
version=${1:-2.56.1}
cd "$(dirname "$0")/../.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
.venv/bin/python -m venv --without-pip "$folder"
over=$("$folder/bin/python" -c "$packages")
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target "$over" "ray==$version"
.venv/bin/python -c "$packages" > "$over/zz_under.pth"
"$folder/bin/python" -m pytest -p no:cacheprovider tests/train tests/cluster/test_ray_compat.py \
    tests/cluster/test_train_traps.py -m "not slow"
