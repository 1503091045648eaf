#!/usr/bin/env bash
# Trains low-rank adapters (LoRA) of a real model over an edge and a cloud on this one machine, as two machines would.
#
#   bash examples/finetune_lora.sh [options of quickstart.sh]
#   bash examples/finetune_lora.sh --help
#
# It prints the loss on held-out text before and after, and leaves an adapter for PeftModel in ldt_lora/adapter.
# ds_configs/smollm2_lora.json says which adapters; the base model stays as it is, on both sites.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
case "${1:-}" in -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0" ;; esac

model=()
if [ -f "$root/ldt_work/smollm2/config.json" ]; then model=(--model "$root/ldt_work/smollm2"); fi # of the quickstart
exec bash "$root/examples/quickstart.sh" \
    --base "$root/ds_configs/smollm2_lora.json" --workdir "$root/ldt_lora" "${model[@]}" "$@"
