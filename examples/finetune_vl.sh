#!/usr/bin/env bash
# Trains a small vision-language model on photographs over an edge and a cloud on this one machine, as two would.
#
#   bash examples/finetune_vl.sh [--steps N] [options of finetune_vl.py]
#   bash examples/finetune_vl.sh --help
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
. "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
case "${1:-}" in -h | --help) sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 0 ;; esac

ldt_setup
examples="$LDT_ROOT/examples"
workdir="$(mktemp -d "${TMPDIR:-/tmp}/ds_ldt_vl.XXXXXX")"
printf 'edge slots=1\ncloud slots=1\n' >"$workdir/hostfile"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export LDT_LAUNCHER_ARGS="${LDT_LAUNCHER_ARGS:---quiet}"
meeting=(--hostfile "$workdir/hostfile" --master_addr 127.0.0.1)
meeting+=(--master_port "$(python "$examples/quickstart_steps.py" port)")

bash "$examples/run_cloud.sh" "${meeting[@]}" "$examples/finetune_vl.py" "$@" >"$workdir/cloud.txt" 2>&1 &
cloud=$!
bash "$examples/run_edge.sh" "${meeting[@]}" "$examples/finetune_vl.py" "$@" &
edge=$!
# A signal reaches this script alone: both sites are stopped by it, and each ends its own ranks.
trap 'kill -TERM "$edge" "$cloud" 2>/dev/null || true; wait "$edge" "$cloud" 2>/dev/null || true; rm -rf "$workdir"' EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
failed=0
wait "$edge" || failed=$?
wait "$cloud" || { failed=1; tail -n 30 "$workdir/cloud.txt" >&2; }
exit "$failed"
