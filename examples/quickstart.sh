#!/usr/bin/env bash
# Fine-tunes a real model over an edge and a cloud on this one machine, as two machines would.
#
#   bash examples/quickstart.sh [options]
#
#   --model DIR      a Hugging Face model directory with its tokenizer  (SmolLM2-135M-Instruct, built once)
#   --text FILE      the text to train on, opened by the edge only      (Python's reference manual)
#   --steps N        training steps                                     (8)
#   --domains D      data-parallel pipelines in the cloud               (2)
#   --config FILE    a DeepSpeed JSON of your own, used as it is        (made from --base)
#   --base FILE      the JSON that the run's own is made from           (ds_configs/smollm2_quickstart.json)
#   --workdir DIR    where everything it makes goes                     (ldt_work)
#   --help
#
# Set-up, the model and the conversion are kept in the work directory, so a second run starts at once.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
. "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

model="" text="" steps=8 domains="" config="" base="$LDT_ROOT/ds_configs/smollm2_quickstart.json"
workdir="$LDT_ROOT/ldt_work"
while [ "$#" -gt 0 ]; do
    case "$1" in
        -h | --help) sed -n '2,16s/^# \{0,1\}//p' "$0"; exit 0 ;;
        --model | --text | --steps | --domains | --config | --base | --workdir)
            [ "$#" -ge 2 ] || ldt_die "$1 needs a value"
            case "$1" in
                --model) model="$2" ;;
                --text) text="$2" ;;
                --steps) steps="$2" ;;
                --domains) domains="$2" ;;
                --config) config="$2" ;;
                --base) base="$2" ;;
                --workdir) workdir="$2" ;;
            esac
            shift 2 ;;
        *) ldt_die "unknown option $1 (--help lists them)" ;;
    esac
done
for number in steps domains; do
    [[ "${!number}" =~ ^([1-9][0-9]*)?$ ]] || ldt_die "--$number is '${!number}', expected a whole number of at least 1"
done
[ -z "$model" ] || [ -f "$model/config.json" ] || ldt_die "--model '$model' is no Hugging Face directory: no config.json in it"
[ -z "$text" ] || [ -f "$text" ] || ldt_die "--text '$text' does not exist"
[ -z "$config" ] || [ -f "$config" ] || ldt_die "--config '$config' does not exist"
[ -f "$base" ] || ldt_die "--base '$base' does not exist"
[ -z "$config" ] || [ -z "$domains" ] || ldt_die "--domains and --config both say how many domains there are: give one of them"

begin="$(date +%s)"
{ mkdir -p "$workdir" && probe="$(mktemp "$workdir/.probe.XXXXXX")" && rm "$probe"; } 2>/dev/null ||
    ldt_die "--workdir '$workdir' cannot be written to"
ldt_setup
examples="$LDT_ROOT/examples"
workdir="$(cd "$workdir" && pwd)"
# Nothing here may come from a model hub; ranks share the cores, so threads of the tokenizer would only be in the way.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

if [ -z "$model" ]; then
    model="$workdir/smollm2"
    ldt_say "1/5 model: SmolLM2-135M-Instruct in $model"
    python "$examples/build_smollm2.py" "$model"
else
    ldt_say "1/5 model: $model"
fi

if [ -z "$config" ]; then
    config="$workdir/config.json"
    python "$examples/quickstart_steps.py" config --base "$base" \
        --model "$model" ${domains:+--domains "$domains"} --out "$config"
fi
python "$examples/quickstart_steps.py" hostfile --config "$config" --out "$workdir/hostfile"

ldt_say "2/5 conversion: edge layers to $workdir/edge/layers, cloud layers to $workdir/cloud/layers"
python "$LDT_ROOT/checkpoint/hf_to_ds_ldt.py" --hf "$model" --config "$config" --overwrite \
    --out-edge "$workdir/edge/layers" --out-cloud "$workdir/cloud/layers"

# Two machines, started apart, that share nothing but an address and a port.
port="$(python "$examples/quickstart_steps.py" port)"
ldt_say "3/5 training: $steps steps; edge and cloud meet at 127.0.0.1:$port (log of the cloud: $workdir/cloud/log.txt)"
rm -rf "$workdir/edge/checkpoint" "$workdir/cloud/checkpoint"
ranks="$(awk '{ split($2, part, "="); total += part[2] } END { print total }' "$workdir/hostfile")"
cores="$(getconf _NPROCESSORS_ONLN)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores / ranks > 0 ? cores / ranks : 1))}"
export LDT_LAUNCHER_ARGS="${LDT_LAUNCHER_ARGS:---quiet}"
meeting=(--hostfile "$workdir/hostfile" --master_addr 127.0.0.1 --master_port "$port")
same=("$examples/finetune.py" --config "$config" --steps "$steps")

bash "$examples/run_cloud.sh" "${meeting[@]}" "${same[@]}" \
    --model "$workdir/cloud/layers" --save "$workdir/cloud/checkpoint" >"$workdir/cloud/log.txt" 2>&1 &
cloud=$!
bash "$examples/run_edge.sh" "${meeting[@]}" "${same[@]}" ${text:+--text "$text"} \
    --model "$workdir/edge/layers" --save "$workdir/edge/checkpoint" &
edge=$!
stop() { kill -TERM "$edge" "$cloud" 2>/dev/null || true; wait "$edge" "$cloud" 2>/dev/null || true; }
trap 'stop; exit 129' HUP
trap 'stop; exit 130' INT
trap 'stop; exit 143' TERM

# When one site fails the other one learns of it over the link and says so itself; only then is it stopped.
alive() { kill -0 "$1" 2>/dev/null; }
while alive "$edge" && alive "$cloud"; do sleep 0.5; done
first="$edge" second="$cloud" failed=0
if alive "$edge"; then first="$cloud" second="$edge"; fi
wait "$first" || failed=$?
if [ "$failed" -eq 0 ]; then wait "$second" || failed=$?; fi
if [ "$failed" -ne 0 ]; then
    for _ in $(seq 60); do
        alive "$second" || break
        sleep 0.5
    done
    stop
    printf '%s\n' "--- the last lines of $workdir/cloud/log.txt:" >&2
    tail -n 30 "$workdir/cloud/log.txt" >&2
    ldt_die "training failed with status $failed; the edge's messages are above, the cloud's just here"
fi
trap - INT TERM
python "$examples/quickstart_steps.py" report "$workdir/edge/checkpoint/metrics.json"

both=(--edge "$workdir/edge/checkpoint" --cloud "$workdir/cloud/checkpoint" --hf-config "$model")
if [ "$(python "$examples/quickstart_steps.py" trained --config "$config")" = adapter ]; then
    out="$workdir/adapter" what="the adapter, a directory for PeftModel.from_pretrained"
    ldt_say "4/5 export: both halves into one adapter"
    python "$LDT_ROOT/checkpoint/ds_ldt_to_hf.py" "${both[@]}" --adapter --out "$out" --overwrite
    ldt_say "5/5 the model with the adapter, loaded with PeftModel, goes on with a sentence:"
    python "$examples/quickstart_steps.py" generate --model "$model" --adapter "$out"
else
    out="$workdir/finetuned" what="the fine-tuned model, a Hugging Face directory"
    ldt_say "4/5 merge: both halves into one Hugging Face model"
    python "$LDT_ROOT/checkpoint/ds_ldt_to_hf.py" "${both[@]}" --out "$out" --overwrite
    ldt_say "5/5 the fine-tuned model, loaded with AutoModelForCausalLM, goes on with a sentence:"
    python "$examples/quickstart_steps.py" generate --model "$out"
fi

cat <<EOF

What you have now (after $(($(date +%s) - begin)) s):
  $out   $what
  $workdir/edge, .../cloud   what each site had: its layers and its half of the checkpoint
  $VIRTUAL_ENV   the environment: source it with  . "$VIRTUAL_ENV/bin/activate"
What to do next:
  your own model and text:  bash examples/quickstart.sh --model DIR --text FILE --steps 100
  your own script:          copy examples/finetune.py
  two real machines:        bash examples/run_edge.sh --help, and docs/privacy.md on what the cloud can and cannot see
  run every test:           bash tests/run.sh
EOF
