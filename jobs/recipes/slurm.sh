#!/bin/bash
# A training job on Ray in a Slurm allocation, which saves and requeues before its time is over:
#   sbatch jobs/recipes/slurm.sh python -m jobs.train_gpt --name gpt --storage-path /shared/runs --steps 100000
# The arguments are the driver; it resumes by its run name. See docs/operations/orchestrators.md.
#SBATCH --job-name=gpt
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

: "${RUN:=/shared/runs/gpt}"                 # <storage path>/<run name> of the driver
: "${RAY_CKPT_STAGING:=/tmp/ray_ckpt-$UID}"  # a local disk of each node, best NVMe
: "${SAVE_S:=120}"                           # for the last save; less than --signal has, with some to spare
: "${PORT:=6379}"
: "${RAY_ARGS:=}"                            # more arguments for each ray start
: "${RAY_AUTH_TOKEN:=$(python -c 'import secrets; print(secrets.token_hex(32))')}"  # srun passes it on
export RAY_CKPT_STAGING RAY_AUTH_TOKEN RAY_AUTH_MODE=token

is_over=0
trap 'is_over=1' USR1 TERM

on() { # runs a command on a node, as a step of the job
    srun --nodes=1 --ntasks=1 --overlap --nodelist="$1" "${@:2}"
}

address_of() { on "$1" hostname --ip-address | awk '{print $1}'; }

start() { # a Ray node, which lives as long as its step; a node that fails is started again, twice
    local address
    address=$(address_of "$1")
    for _ in 1 2 3; do
        # shellcheck disable=SC2086
        on "$1" ray start --block --disable-usage-stats --node-ip-address="$address" $RAY_ARGS "${@:2}" && return
    done
}

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
RAY_ADDRESS="$(address_of "${nodes[0]}"):$PORT"
export RAY_ADDRESS

newest() { # prints the step of the newest checkpoint, or durable one, from which the run may resume, or 0
    timeout 10 ray-ckpt ls "$RUN" --json 2>/dev/null | python -c '
import json, sys
known = [each for each in json.load(sys.stdin)["checkpoints"] if each["on_lineage"]]
print(max((each["step"] for each in known if sys.argv[1:] in ([], [each["level"]])), default=0))' "$@" 2>/dev/null
}

save() { # announce the end to Ray, and wait until a checkpoint from after that is durable
    local before start=$SECONDS end=$((SECONDS + SAVE_S))
    for _ in {1..5}; do # a checkpoint from before may still be uploading
        before=$(newest) && break
        before=999999999999 # the largest step: without an answer, wait for SAVE_S
        ((SECONDS - start < 15)) || break # the save needs the rest
        sleep 1
    done
    python -c 'import ray; ray.init(log_to_driver=False); print(*(n["NodeID"] for n in ray.nodes() if n["Alive"]))' |
        tr ' ' '\n' | while read -r id; do
        ray drain-node --node-id "$id" --reason DRAIN_NODE_REASON_PREEMPTION \
            --reason-message "the job's time is over" --deadline-remaining-seconds "$((end - SECONDS))"
    done
    while ((SECONDS < end)) && kill -0 "$driver" 2>/dev/null && (($(newest durable || echo 0) <= before)); do
        sleep 1
    done
    echo "before the end: step $(newest durable || echo 0) is durable"
}

start "${nodes[0]}" --head --port="$PORT" &
until ray health-check --address "$RAY_ADDRESS" >/dev/null 2>&1; do
    kill -0 $! 2>/dev/null || { echo "the head has not started" >&2; exit 1; }
    sleep 1
done
for node in "${nodes[@]:1}"; do start "$node" --address="$RAY_ADDRESS" & done

requeue() { # ends this job, which starts again and resumes
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}

((is_over)) && requeue # the signal came before the driver
"$@" &
driver=$!
until ((is_over)) || ! kill -0 "$driver" 2>/dev/null; do sleep 1; done # a wait could miss the signal
if ((is_over)); then
    save || true # without a save too, the job goes on from an older checkpoint
    kill -KILL "$driver" 2>/dev/null || true
    requeue
fi
status=0
wait "$driver" || status=$?
exit "$status" # Slurm ends the steps
